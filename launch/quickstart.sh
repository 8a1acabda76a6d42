#!/usr/bin/env bash
# Installs, then trains a small agent from scratch on a real tool. Arguments go to the trainer:
#   bash launch/quickstart.sh --workdir=runs/mine --config.run.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec .venv/bin/python -m thundersync_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
