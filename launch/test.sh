#!/usr/bin/env bash
# Installs, the TPU compiler (libtpu) included, then runs the test suite, two files at a time.
# Programs for TPUs are compiled, never run: JAX itself stays on the CPU. Arguments go to pytest:
#   bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh --test
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
