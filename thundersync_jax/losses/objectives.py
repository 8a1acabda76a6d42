"""The built-in objectives, each one declaration, and how a configuration names one.

`learner.objective` is a name of `BUILT_IN` or "package.module:function"; the function is called
with `learner.objective_options` and returns an `Objective`. Options that all built-in ones take:

    normalizer          see `normalizers`; `normalizer_tokens` is L of "constant"
    kl_coefficient      0: no KL to the reference; `kl_estimator` "k1", "k2" or "k3" (default)
    entropy_coefficient 0: none
    distillation_coefficient
                        0: no distillation towards the reference (`opd`), whose weight of learner
                        against sampler `distillation_ratio_cap` cuts; 0 (default): no weight. A run
                        has one reference policy, so there is a KL to it or distillation from it
    terms_normalizer    of all terms; "" takes that of the objective
    terms_scope         "content" (default): every trajectory whose content is final counts, also in
                        groups of equal rewards and with a failed verdict; "group": those with a
                        reward, in groups with an advantage. "group" runs members when their group's
                        rewards are known: one backward pass serves both, and nothing streams
    drop_equal_groups   groups of equal rewards as graded leave the denominator too; False but for
                        DAPO
    overlong_tokens     DAPO's soft punishment (arXiv 2503.14476, eq. 13): a trajectory of more
                        action tokens than overlong_tokens - overlong_cache loses up to 1 of reward;
                        0 (default): none

`ratio` of an objective with a clip: "learner" takes p_old from the learner itself at this version:
the ratio is 1, no clip binds, and it streams by trajectory. "sampler" takes the sampler's: the clip
picks its branch by the sign of A, so members wait for their group.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thundersync_jax.errors import ConfigError, check, check_choice
from thundersync_jax.factory import call_factory, import_factory
from thundersync_jax.losses import advantages as adv
from thundersync_jax.losses import token_scores as scores
from thundersync_jax.losses.guarded import guarded
from thundersync_jax.losses.normalizers import Kind, Normalizer
from thundersync_jax.losses.objective import (
    Objective,
    Scope,
    Streams,
    Term,
    every_group,
    no_shaping,
)
from thundersync_jax.losses.objective_check import check_objective
from thundersync_jax.losses.opd import distillation_term
from thundersync_jax.losses.regularizers import ESTIMATORS, entropy_term, kl_term

Score = Callable[[Any], Any]
_KEY = "learner.objective_options"
_TERMS = ("kl_coefficient", "entropy_coefficient", "distillation_coefficient")
_KINDS = {float: "a finite number", int: "a whole number", bool: "True or False", str: "a name"}
_READERS = {  # an option -> those of which one must be set for it
    "kl_estimator": ("kl_coefficient",),
    "distillation_ratio_cap": ("distillation_coefficient",),
    "terms_normalizer": _TERMS,
    "terms_scope": _TERMS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """The options that all built-in objectives take; see the module's docstring."""

    normalizer: str = "token_mean"
    normalizer_tokens: int = 0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    distillation_coefficient: float = 0.0
    distillation_ratio_cap: float = 0.0
    terms_normalizer: str = ""
    terms_scope: str = "content"
    drop_equal_groups: bool = False
    overlong_tokens: int = 0
    overlong_cache: int = 0

    def __post_init__(self) -> None:
        for key in ("normalizer", "terms_normalizer"):
            names = tuple(kind.value for kind in Kind) + ("",) * (key == "terms_normalizer")
            check_choice(f"{_KEY}.{key}", getattr(self, key), names)
            if getattr(self, key) == "constant":
                expected = "a number of tokens, at least 1: what 'constant' divides by"
                value = self.normalizer_tokens
                check(value >= 1, f"{_KEY}.normalizer_tokens", value, expected)
        check_choice(f"{_KEY}.kl_estimator", self.kl_estimator, tuple(ESTIMATORS))
        check_choice(f"{_KEY}.terms_scope", self.terms_scope, tuple(s.value for s in Scope))
        for key in ("kl", "entropy", "distillation"):
            _check_least(f"{key}_coefficient", getattr(self, f"{key}_coefficient"), 0)
        for key in (
            "distillation_ratio_cap",
            "normalizer_tokens",
            "overlong_tokens",
            "overlong_cache",
        ):
            _check_least(key, getattr(self, key), 0)
        check(
            not (self.kl_coefficient and self.distillation_coefficient),
            f"{_KEY}.kl_coefficient",
            self.kl_coefficient,
            "0 beside a distillation_coefficient: a run has one reference policy, and both terms "
            "would pull to the same",
        )
        self._check_read()
        limit, cache = self.overlong_tokens, self.overlong_cache
        expected = f"at least 1 beside overlong_cache = {cache}: the limit, of which those are last"
        check(limit > 0 or cache == 0, f"{_KEY}.overlong_tokens", limit, expected)
        expected = f"1 to overlong_tokens = {limit}, the last tokens before the limit"
        check(0 < cache <= limit or limit == 0, f"{_KEY}.overlong_cache", cache, expected)

    def _check_read(self) -> None:
        """Raises ConfigError for an option that is set where nothing reads it."""
        for field in dataclasses.fields(self):
            value, readers = getattr(self, field.name), _READERS.get(field.name, ())
            is_read = not readers or any(getattr(self, reader) for reader in readers)
            expected = f"{field.default!r} without {' or '.join(readers)}: nothing else reads it"
            check(is_read or value == field.default, f"{_KEY}.{field.name}", value, expected)
        num_tokens = self.normalizer_tokens
        is_read = num_tokens == 0 or "constant" in (self.normalizer, self.terms_normalizer)
        expected = "0 without a normalizer 'constant': nothing else reads it"
        check(is_read, f"{_KEY}.normalizer_tokens", num_tokens, expected)

    def make(
        self,
        name: str,
        score: Score,
        advantages: Callable[[np.ndarray], np.ndarray],
        streams: Streams = Streams.TRAJECTORY,
        *,
        advantage_scale: Callable[[np.ndarray], float] | None = None,
        weighs_sampler: bool = False,
    ) -> Objective:
        """An objective with these options; terms of scope GROUP make it stream by GROUP."""
        terms = self._terms()
        is_tied = any(term.scope is Scope.GROUP for term in terms)
        if is_tied and streams is Streams.TRAJECTORY:
            score, streams = scores.WithAdvantage(score=score), Streams.GROUP
        is_shaped = self.overlong_tokens > 0
        return Objective(
            name=name,
            streams=streams,
            score=score,
            advantages=advantages,
            normalizer=self._normalizer(self.normalizer),
            terms=terms,
            shape_reward=self._overlong() if is_shaped else no_shaping,
            keeps_group=has_unequal if self.drop_equal_groups else every_group,
            advantage_scale=advantage_scale,
            weighs_sampler=weighs_sampler,
        )

    def _normalizer(self, name: str) -> Normalizer:
        return Normalizer(kind=Kind(name), length=max(self.normalizer_tokens, 1))

    def _terms(self) -> tuple[Term, ...]:
        scope = Scope(self.terms_scope)
        normalizer = self._normalizer(self.terms_normalizer or self.normalizer)
        found = []
        if self.kl_coefficient:
            kl = kl_term(self.kl_estimator, self.kl_coefficient, normalizer=normalizer, scope=scope)
            found.append(kl)
        if self.entropy_coefficient:
            found.append(entropy_term(self.entropy_coefficient, normalizer=normalizer, scope=scope))
        if self.distillation_coefficient:
            term = distillation_term(
                self.distillation_coefficient,
                ratio_cap=self.distillation_ratio_cap,
                normalizer=normalizer,
                scope=scope,
            )
            found.append(term)
        return tuple(found)

    def _overlong(self) -> SoftOverlong:
        return SoftOverlong(limit=self.overlong_tokens, cache=self.overlong_cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftOverlong:
    """r + min(0, max(-1, ((limit - cache) - |o|) / cache)): DAPO (arXiv 2503.14476, eq. 13)."""

    limit: int
    cache: int

    def __call__(self, reward: float, num_tokens: int) -> float:
        return reward + min(0.0, max(-1.0, (self.limit - self.cache - num_tokens) / self.cache))


def has_unequal(rewards: np.ndarray) -> bool:
    """DAPO's dynamic sampling: groups whose rewards are all equal do not count."""
    return not adv.is_constant(rewards)


def grpo(*, tis_cap: float = 0.0, **common: Any) -> Objective:
    """A = (r - mean) / (std + eps) of the group (arXiv 2402.03300). `normalizer` is "token_mean" by
    default; the paper's is "trajectory_mean". `tis_cap`: see `tis_reinforce`; 0 turns it off.
    """
    score, weighs = _truncated(tis_cap)
    return Common(**common).make("grpo", score, adv.standardized, weighs_sampler=weighs)


def dr_grpo(*, tis_cap: float = 0.0, normalizer: str = "constant", **common: Any) -> Objective:
    """A = r - mean of the group, over n L (arXiv 2503.20783): `normalizer_tokens` is L."""
    score, weighs = _truncated(tis_cap)
    options = Common(normalizer=normalizer, **common)
    return options.make("dr_grpo", score, adv.centered, weighs_sampler=weighs)


def rloo(*, tis_cap: float = 0.0, normalizer: str = "trajectory_sum", **common: Any) -> Objective:
    """A = r - mean of the others of the group, 1/n sum_i A_i log p(o_i) (arXiv 2402.14740)."""
    score, weighs = _truncated(tis_cap)
    options = Common(normalizer=normalizer, **common)
    return options.make("rloo", score, adv.leave_one_out, weighs_sampler=weighs)


def tis_reinforce(*, cap: float = 2.0, baseline: str = "mean", **common: Any) -> Objective:
    """sg(min(p/b, cap)) log p A, REINFORCE with truncated importance sampling. `baseline`: "mean"
    takes A = r - mean of the group, "none" A = r.
    """
    check_choice(f"{_KEY}.baseline", baseline, ("mean", "none"))
    _check_least("cap", cap, 0, is_strict=True)
    advantages = adv.centered if baseline == "mean" else adv.as_graded
    score = scores.TruncatedRatio(cap=cap)
    return Common(**common).make("tis_reinforce", score, advantages, weighs_sampler=True)


def cispo(*, clip_low: float = 1.0, clip_high: float = 2.0, **common: Any) -> Objective:
    """sg(clip(p/b, 1 - clip_low, 1 + clip_high)) log p A with GRPO's A (arXiv 2506.13585, eq. 4).

    The paper sets no lower bound, which clip_low = 1 is, and normalises by "group_token_mean".
    """
    _check_clip(clip_low, clip_high)
    score = scores.ClippedWeight(low=clip_low, high=clip_high)
    return Common(**common).make("cispo", score, adv.standardized, weighs_sampler=True)


def ppo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, ratio: str = "sampler", **common: Any
) -> Objective:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) with GRPO's A (arXiv 1707.06347)."""
    clip = scores.ClippedSurrogate(low=clip_low, high=clip_high)
    return _clipped("ppo", clip, ratio, Common(**common))


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio: str = "sampler",
    normalizer: str = "group_token_mean",
    drop_equal_groups: bool = True,
    **common: Any,
) -> Objective:
    """PPO's clip with clip_high > clip_low, GRPO's A, the mean over the tokens of a group, groups
    of equal rewards left out, and no KL (arXiv 2503.14476). `overlong_tokens` shapes the reward.
    """
    clip = scores.ClippedSurrogate(low=clip_low, high=clip_high)
    options = Common(normalizer=normalizer, drop_equal_groups=drop_equal_groups, **common)
    return _clipped("dapo", clip, ratio, options)


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio: str = "sampler",
    normalizer: str = "trajectory_mean",
    **common: Any,
) -> Objective:
    """PPO's clip of the trajectory's ratio, with GRPO's A (arXiv 2507.18071, eq. 5, section 5.1).

    Under "trajectory_mean" each trajectory counts its ratio once, as in the paper.
    """
    clip = scores.SequenceClippedSurrogate(low=clip_low, high=clip_high)
    return _clipped("gspo", clip, ratio, Common(normalizer=normalizer, **common))


def reinforce_pp(*, tis_cap: float = 0.0, **common: Any) -> Objective:
    """A = (r - mean) / (std + eps) of all rewards of the step (arXiv 2501.03262)."""
    score, weighs = _truncated(tis_cap)
    return Common(**common).make(
        "reinforce_pp", score, adv.standardized, Streams.BATCH, weighs_sampler=weighs
    )


def reinforce_pp_baseline(*, tis_cap: float = 0.0, **common: Any) -> Objective:
    """A = (r - mean of the group) / (std of that over the step + eps): REINFORCE++-baseline (arXiv
    2501.03262). The mean closes a group and the std divides at the update: it streams as GRPO.
    """
    score, weighs = _truncated(tis_cap)
    return Common(**common).make(
        "reinforce_pp_baseline",
        score,
        adv.centered,
        advantage_scale=adv.spread,
        weighs_sampler=weighs,
    )


BUILT_IN: Mapping[str, Callable[..., Objective]] = {
    made.__name__: made
    for made in (
        grpo,
        dr_grpo,
        rloo,
        dapo,
        gspo,
        cispo,
        reinforce_pp,
        reinforce_pp_baseline,
        tis_reinforce,
        ppo,
    )
}


def make_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """The objective of a configuration, checked. Raises ConfigError or ObjectiveError."""
    if ":" in name:
        factory = import_factory(name, "learner.objective")
        objective = call_factory(factory, name, options, _KEY)
    else:
        if name not in BUILT_IN:
            near = difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"config.learner.objective = {name!r} is not built in. Did you mean {near!r}? "
                f"There are {', '.join(BUILT_IN)}; one of your own is 'package.module:function'"
            )
        _check_options(name, options)
        objective = BUILT_IN[name](**options)
    check(
        isinstance(objective, Objective),
        "learner.objective",
        name,
        f"a function that returns an Objective, it returned {type(objective).__name__}",
    )
    check_objective(objective)
    return guarded(objective)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for one that there is not, or of another type than its default."""
    own = inspect.signature(BUILT_IN[name]).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(Common)}
    defaults |= {key: own[key].default for key in own if key != "common"}
    for key, value in options.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"config.{_KEY}.{key} is not an option of {name!r}. Did you mean {near!r}?"
            )
        kind = type(defaults[key])
        is_typed = type(value) is kind or (kind is float and type(value) is int)
        check(is_typed, f"{_KEY}.{key}", value, f"{_KINDS[kind]}, as by default {defaults[key]!r}")


def _truncated(cap: float) -> tuple[Score, bool]:
    """The score on-policy, or with a truncated weight of sampler against learner."""
    _check_least("tis_cap", cap, 0)
    return (scores.TruncatedRatio(cap=cap), True) if cap else (scores.log_probability, False)


def _clipped(name: str, clip: Any, ratio: str, common: Common) -> Objective:
    check_choice(f"{_KEY}.ratio", ratio, ("learner", "sampler"))
    _check_clip(clip.low, clip.high)
    if ratio == "learner":
        return common.make(name, scores.log_probability, adv.standardized)
    return common.make(name, clip, adv.standardized, Streams.GROUP, weighs_sampler=True)


def _check_clip(low: float, high: float) -> None:
    is_low = 0 < low <= 1
    check(is_low, f"{_KEY}.clip_low", low, "a number in (0, 1]")
    _check_least("clip_high", high, 0, is_strict=True)


def _check_least(key: str, value: float, least: float, *, is_strict: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    is_valid = is_number and (value > least if is_strict else value >= least)
    expected = f"a finite number {'above' if is_strict else 'of at least'} {least}"
    check(is_valid, f"{_KEY}.{key}", value, expected)
