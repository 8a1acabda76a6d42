"""AdamW and Adafactor on a learner: the first steps by hand, and how much the moments take."""

from __future__ import annotations

from typing import Any

import jax
import learner_cases as lc
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.placement import Placement
from thundersync_jax.model.presets import preset

LR = 1e-2


def stepped(config: OptimizerSection, params: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    for grad in grads:
        updates, state = jax.jit(optimizer.update)(grad, state, params)
        params = params + updates
    return params


@pytest.mark.parametrize("shape", [(8, 5), (130, 129)])
def test_adafactor_by_hand(shape: tuple[int, int]):
    """Two steps; kernels from 128 x 128 on have the product of their rows' and columns' means."""
    rng = np.random.default_rng(0)
    params = rng.normal(size=shape).astype(np.float32)
    grads = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]
    config = OptimizerSection(name="adafactor", learning_rate=LR, weight_decay=0.1, clip_norm=1e9)
    want, mean = params.astype(np.float64), np.zeros(shape)
    rows, columns = np.zeros((shape[0], 1)), np.zeros((1, shape[1]))
    for step, grad in enumerate(grads, start=1):
        decay, square = 1 - step**-0.8, np.square(grad.astype(np.float64))
        mean = decay * mean + (1 - decay) * square
        rows = decay * rows + (1 - decay) * square.mean(axis=1, keepdims=True)
        columns = decay * columns + (1 - decay) * square.mean(axis=0, keepdims=True)
        second = rows * columns / rows.mean() if min(shape) >= 128 else mean
        update = grad / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(np.square(update))))
        want = want - LR * (update + 0.1 * want)
    np.testing.assert_allclose(stepped(config, params, grads), want, rtol=2e-5, atol=1e-7)


def test_what_adafactor_does_not_read_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.b1 = 0.8: expected the default 0.9, for"):
        OptimizerSection(name="adafactor", b1=0.8)
    with pytest.raises(ConfigError, match=r"optimizer.name = 'sgd': expected one of"):
        OptimizerSection(name="sgd")


def test_a_learner_steps_with_adafactor():
    """On either: the same gradient, and a step that lowers the loss along it."""
    config = OptimizerSection(name="adafactor", learning_rate=LR)
    learner = lc.make_learner(lc.tiny(), optimizer=config, buckets=(64,), held_gradients=0)
    before = jax.device_get(learner.state.params)
    lc.enqueue(learner, lc.random_batch(0))
    gradient = learner.gradient()
    learner.update()
    moved = jax.tree.map(np.subtract, jax.device_get(learner.state.params), before)
    along = jax.tree.map(lambda g, m: float(np.sum(g * m)), gradient, moved)
    assert max(jax.tree.leaves(along)) <= 0 > min(jax.tree.leaves(along))
    sizes = [np.sqrt(np.mean(np.square(m))) for m in jax.tree.leaves(moved)]
    assert max(sizes) <= LR * (1 + 1e-5)


def test_factored_moments_are_small_and_lie_as_their_parameters():
    """qwen3_0p6b as data 2 x fsdp 4 x tensor 2: less than a 50th of AdamW's moments a device."""
    mesh: Any = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    states = {}
    for name in ("adamw", "adafactor"):
        optimizer = make_optimizer(OptimizerSection(name=name))
        place = Placement(preset("qwen3_0p6b"), optimizer, mesh, num_slots=0, slot_length=0)
        states[name] = place.opt_state
    sizes = {
        name: sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
        for name, state in states.items()
    }
    assert sizes["adafactor"] < sizes["adamw"] / 50
