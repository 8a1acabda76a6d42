#!/usr/bin/env bash
# Installs, then runs the test suite. Arguments go to pytest: bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh --test
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest "$@"
