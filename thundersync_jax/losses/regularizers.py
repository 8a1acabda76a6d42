"""Reward-free terms that compose with every objective: KL to a reference policy, and entropy.

With d_t = log p_t - log q_t, p the learner and q the reference, at tokens that the policy sampled
(estimators of KL(p || q): http://joschu.net/blog/kl-approx.html):

    k1   d_t                          its gradient is grad log p_t, of mean 0 on-policy (arXiv
                                      2506.09477): it measures the KL and does not lower it
    k2   d_t^2 / 2                    its gradient d_t grad log p_t is that of KL(p || q)
    k3   exp(-d_t) - 1 + d_t          GRPO's (arXiv 2402.03300, eq. 4); at least 0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from thundersync_jax.losses.normalizers import Normalizer
from thundersync_jax.losses.objective import Scope, Term, Tokens


def kl_term(
    estimator: str,
    coefficient: float,
    *,
    normalizer: Normalizer,
    scope: Scope = Scope.CONTENT,
) -> Term:
    """- coefficient KL, by "k1", "k2" or "k3"."""
    return Term(
        name=f"kl_{estimator}",
        value=ESTIMATORS[estimator],
        coefficient=-coefficient,
        normalizer=normalizer,
        scope=scope,
        needs_reference=True,
    )


def entropy_term(
    coefficient: float, *, normalizer: Normalizer, scope: Scope = Scope.CONTENT
) -> Term:
    """+ coefficient times the entropy of the next token's distribution, in nats."""
    return Term(
        name="entropy",
        value=_entropy,
        coefficient=coefficient,
        normalizer=normalizer,
        scope=scope,
        needs_entropy=True,
    )


def _k1(tokens: Tokens) -> jax.Array:
    assert tokens.reference_logprobs is not None
    return tokens.logprobs - tokens.reference_logprobs


def _k2(tokens: Tokens) -> jax.Array:
    return jnp.square(_k1(tokens)) / 2


def _k3(tokens: Tokens) -> jax.Array:
    distance = _k1(tokens)
    return jnp.exp(-distance) - 1 + distance


def _entropy(tokens: Tokens) -> jax.Array:
    assert tokens.entropy is not None
    return tokens.entropy


ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}
