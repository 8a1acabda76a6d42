#!/usr/bin/env bash
# Installs, makes a teacher from demonstrations, and distills it into a smaller student by turns.
# Arguments go to the student's trainer:
#   bash launch/opd_quickstart.sh --workdir=runs/mine --config.run.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
.venv/bin/python -m thundersync_jax.imitate \
    --config=configs/opd_quickstart.py:teacher --workdir=runs/opd_teacher
exec .venv/bin/python -m thundersync_jax.train \
    --config=configs/opd_quickstart.py --workdir=runs/opd_quickstart "$@"
