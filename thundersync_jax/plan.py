"""python -m thundersync_jax.plan --config=configs/NAME.py --topology=v5e:16x16 [--json=FILE]
    [--config.KEY=VALUE ...]

Compiles a configuration's programs for a TPU topology, without a TPU, and says whether they fit:
memory, arithmetic and exchanges of every program, the groups that can stream at a time, what a step
takes at the chip's published peaks, and the mesh that would be fastest. Needs `libtpu`
(pip install libtpu). --json=- writes the report to standard output, where the table is otherwise.
Exit status: 0 when everything fits, 1 when something does not, 2 for bad input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from thundersync_jax.command_line import (
    check_new_file,
    define_config_flag,
    load_config,
    run_main,
)
from thundersync_jax.config import resolve

_CONFIG = define_config_flag()
_TOPOLOGY = flags.DEFINE_string("topology", None, "A TPU topology, such as v5e:16x16.")
_JSON = flags.DEFINE_string("json", "", "A file for the report; - is standard output.")


def main(argv: Sequence[str]) -> int:
    """Plans, prints and writes; returns the exit status."""
    if len(argv) > 1 or not _CONFIG.present or _TOPOLOGY.value is None:
        raise app.UsageError("give --config=configs/NAME.py --topology=v5e:16x16")
    config, is_shown = resolve(load_config(_CONFIG)), _JSON.value == "-"
    if _JSON.value and not is_shown:
        check_new_file("json", Path(_JSON.value))

    # Imported late: a mistake in the configuration is reported without waiting for jax.
    from thundersync_jax.planner import plan

    report = plan(config, _TOPOLOGY.value, lambda text: print(text, file=sys.stderr, flush=True))
    text = json.dumps(report, indent=1)
    print(table(report), file=sys.stderr if is_shown else sys.stdout, flush=True)
    if is_shown:
        print(text)
    elif _JSON.value:
        Path(_JSON.value).write_text(text + "\n")
    return 0 if report["fits"] else 1


def table(report: Mapping[str, Any]) -> str:
    """For people."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
    lines = [
        f"{report['model']} on {report['topology']}: {report['num_chips']} chips, {mesh}",
        f"{'program':16} {'peak GB':>8} {'fits':>5} {'TFLOP':>9} {'arithmetic':>11} "
        f"{'memory':>9} {'links':>9}",
    ]
    lines += [
        f"{name:16} {found['peak_bytes'] / 1e9:8.2f} {'yes' if found['fits'] else 'no':>5} "
        f"{found['flops'] / 1e12:9.2f} {found['arithmetic_s']:10.3f}s {found['memory_s']:8.3f}s "
        f"{found['links_s']:8.3f}s"
        for name, found in report["programs"].items()
    ]
    best, step = report["recommended_mesh"], report["step"]["learner"]
    lines += [
        f"{report['resident_bytes'] / 1e9:.2f} GB stay on a chip; {report['open_groups']} groups "
        f"can stream, with prompts of {report['prompt_tokens']} tokens and trajectories of "
        f"{report['trajectory_tokens']}",
        f"a step of the learner takes at least {step['overlapped_s']:.2f} s: arithmetic "
        f"{step['arithmetic_s']:.2f}, memory {step['memory_s']:.2f}, links {step['links_s']:.2f}",
        f"recommended: data {best['data']} x fsdp {best['fsdp']} x tensor {best['tensor']}",
    ]
    return "\n".join(lines)


def _run_with_compiler() -> None:
    """Starts this program again with the variables that the TPU compiler reads at its start."""
    from thundersync_jax.topology import environment

    wanted = environment()
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        command = [sys.executable, "-m", "thundersync_jax.plan", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | wanted)


if __name__ == "__main__":
    _run_with_compiler()
    run_main(main)
