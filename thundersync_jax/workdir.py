"""The work directory of a run: what is in it, and whether it may be resumed.

    config.json         the resolved configuration, versions, the model's numbers, fingerprints of
                        tokenizer, template and the frozen policy that it learns from
    metrics.jsonl       a line a train step
    evaluation.jsonl    a line an evaluation, on its own axis
    events.jsonl        the coordinator's journal
    trajectories/       step_NNNNNN.jsonl
    timeline.json       Chrome trace of the last steps
    checkpoints/        the newest and the best
    compile_cache/      compiled programs
    data/               prepared data sets
    profile/            jax.profiler traces
    lock                held by the process that runs here

The same directory resumes, one process at a time. A key that is not marked `resume_mutable` in
config_*.py may not differ.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import IO, Any

import thundersync_jax
from thundersync_jax.config import RunConfig, resume_differences, to_dict
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import write_atomically

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "google-jetstream", "numpy")


class WorkDirectory:
    """Paths of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.config = self.root / "config.json"
        self.metrics = self.root / "metrics.jsonl"
        self.evaluation = self.root / "evaluation.jsonl"
        self.events = self.root / "events.jsonl"
        self.trajectories = self.root / "trajectories"
        self.timeline = self.root / "timeline.json"
        self.checkpoints = self.root / "checkpoints"
        self.compile_cache = self.root / "compile_cache"
        self.profile = self.root / "profile"
        self.data = self.root / "data"
        self._lock: IO[str] | None = None

    def open(self, config: RunConfig) -> None:
        """Creates the directory, or checks that it belongs to this configuration; locks it.

        Raises:
          ConfigError: it is a file, another process runs in it, or it holds another
            configuration; nothing was written.
        """
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(
                f"--workdir={self.root} is a file: give a directory, new or of this run"
            )
        if self.compile_cache.exists() and not self.compile_cache.is_dir():
            raise ConfigError(
                f"{self.compile_cache} is a file: remove it, compiled programs go there"
            )
        self.check_same(config)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / "lock").open("a")
        except OSError as error:
            raise ConfigError(
                f"--workdir={self.root} cannot be written ({error.strerror}): give a directory on "
                "a disk where you may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"--workdir={self.root} is in use by another process: wait for it, stop it, or "
                "give another directory"
            ) from None

    def close(self) -> None:
        """Gives the lock back; the end of the process does too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def claim(
        self,
        config: RunConfig,
        *,
        model: Any,
        tokenizer: str,
        template: str = "",
        frozen_policy: str | None = None,
    ) -> None:
        """Writes config.json, once everything compiled and before any other file of the run.

        Args:
          model: of its policy, a TransformerConfig.
          tokenizer: its fingerprint, which a student of this run must share.
          template: the chat template's, "" without one.
          frozen_policy: the teacher's or reference's identity; None where it has none, or nothing
            was learned from it.
        """
        content = {
            **describe(config),
            "model": _plain(model),
            "tokenizer": tokenizer,
            "template": template,
            "frozen_policy": frozen_policy,
        }
        write_atomically(self.config, json.dumps(content, indent=2) + "\n")

    def check_same(self, config: RunConfig, *sections: str) -> None:
        """Raises ConfigError when the directory holds a run of another configuration.

        Args:
          sections: those that matter; all by default.
        """
        saved = self._saved("config")
        if saved is None:
            return
        differences = [
            difference
            for difference in resume_differences(saved, config)
            if not sections or difference.split(".")[0] in sections
        ]
        if differences:
            raise ConfigError(
                f"--workdir={self.root} holds a run of another configuration: "
                + "; ".join(differences[:8])
                + ". Use a new --workdir, or the saved values"
            )

    def check_model(self, model: Any) -> None:
        """Raises ConfigError when the directory holds a run of another model, a
        TransformerConfig: its weights would compute something else. What a run did not write is
        not compared.
        """
        saved, now = self._saved("model") or {}, _plain(model)
        differences = [
            f"{name}: {saved[name]!r} -> {now.get(name, '(absent)')!r}"
            for name in saved
            if saved[name] != now.get(name, "(absent)")
        ]
        if differences:
            raise ConfigError(
                f"{self.root} holds a run of a model with other numbers than model.checkpoint's "
                f"config.json, or the preset, has now: {'; '.join(differences)}. With them its "
                "weights are another policy. Restore the config.json, or use a new --workdir"
            )

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raises ConfigError when the directory holds a run with another tokenizer."""
        saved = self._saved("tokenizer")
        if saved not in (None, fingerprint):
            raise ConfigError(
                f"--workdir={self.root} holds a run with a tokenizer of fingerprint {saved}, and "
                f"the environment's vocabulary, or the tokenizer's directory, now has {fingerprint}"
                ": ids would mean other tokens than its policy learned. Restore it, or use a new "
                "--workdir"
            )

    def check_template(self, fingerprint: str) -> None:
        """Raises ConfigError when the directory holds a run with another chat template."""
        saved = self._saved("template")
        if saved not in (None, fingerprint):
            raise ConfigError(
                f"--workdir={self.root} holds a run with a chat template of fingerprint "
                f"{saved or 'none'}, and the tokenizer's directory now has "
                f"{fingerprint or 'none'}: its policy would read other conversations than it "
                "learned. Restore the template, tokenizer_config.json and generation_config.json "
                "there, or use a new --workdir"
            )

    def check_frozen_policy(self, key: str, identity: str) -> None:
        """Raises ConfigError when the directory holds a run that learned from another policy than
        the one that `config.<key>` now names.
        """
        saved = self._saved("frozen_policy")
        if saved not in (None, identity):
            raise ConfigError(
                f"--workdir={self.root} holds a run that learned from a policy of fingerprint "
                f"{saved}, and config.{key} now names one of {identity}: it would go on with "
                "another objective. Restore that policy where it was, for instance from a copy, or "
                "use a new --workdir"
            )

    def _saved(self, key: str) -> Any:
        """A value of config.json; None without the file. Raises ConfigError."""
        if not self.config.exists():
            return None
        try:
            content = json.loads(self.config.read_text(encoding="utf-8"))
            # Of a run that did not write them, unknown.
            unknown = {"template": None, "model": None, "frozen_policy": None}
            return {**unknown, **content}[key]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.config} cannot be read ({type(error).__name__}: {error}): restore it, or "
                "use a new --workdir"
            ) from error


def _plain(model: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(model)))


def describe(config: RunConfig) -> dict[str, Any]:
    """The content of config.json."""
    return {"config": to_dict(config), "versions": versions()}


def versions() -> dict[str, str]:
    """Versions of this package, Python and what the results depend on."""
    found = {"thundersync_jax": thundersync_jax.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
