"""With adapters the learner's gradient is that of the merged model, by the chain rule through A B;
nothing else moves, and every buffer has the adapters' size.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import learner_cases as lc
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from objective_cases import cases_of

from thundersync_jax.benchmarks import turn_arrivals as ta
from thundersync_jax.benchmarks.exactness import OBJECTIVES
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.checkpoint import Checkpointer, CheckpointError, RunPosition
from thundersync_jax.learner.learner import Learner
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.trainable import fingerprint, join, parameter_vjp, partition
from thundersync_jax.model.transformer import forward, logits
from thundersync_jax.serving.placement import serving_mesh
from thundersync_jax.serving.weights import WeightStore

LORA = LoraSection(rank=3, alpha=6.0, targets=("query", "value", "output", "gate", "down"))
FEW = LoraSection(rank=3, alpha=6.0, targets=("value", "down"))  # where more prove nothing more
SCALE = 2.0
LENGTH = 64
PLAIN: dict[str, Any] = {"buckets": (LENGTH,), "tokens_per_step": 2 * LENGTH, "held_gradients": 0}


def adapted(dtype: str = "float32", section: LoraSection = LORA) -> TransformerConfig:
    return with_adapters(lc.tiny(dtype), section)


def trained(model: TransformerConfig, seed: int = 0) -> Any:
    """Parameters whose B is not zero any more."""
    rng = np.random.default_rng(seed)
    trainable, frozen = partition(model, lc.init_params(model, 0))

    def moved(x: Any) -> Any:
        return jax.numpy.asarray(x + 0.1 * rng.normal(size=x.shape), x.dtype)

    return join(jax.tree.map(moved, trainable), frozen)


def factors(flat: dict[Any, Any]) -> list[tuple[str, ...]]:
    return [path[:-2] for path in flat if path[-2:] == ("lora", "a")]


def matrices(flat: dict[Any, Any], at: tuple[str, ...], layer: int) -> tuple[Any, Any]:
    """A [inputs, rank] and B [rank, outputs] of one layer, in float64."""
    first, second = (np.asarray(flat[*at, "lora", f][layer], np.float64) for f in ("a", "b"))
    return first.reshape(-1, first.shape[-1]), second.reshape(second.shape[0], -1)


def merged(params: Any, scale: float = SCALE) -> Any:
    """The tree without adapters, by matrix products in numpy."""
    flat = flatten_dict(jax.device_get(params))
    found = {path: x for path, x in flat.items() if "lora" not in path}
    for at in factors(flat):
        kernel = np.array(flat[*at, "kernel"], copy=True)
        for layer in range(len(kernel)):
            first, second = matrices(flat, at, layer)
            kernel[layer] += scale * (first @ second).reshape(kernel.shape[1:])
        found[*at, "kernel"] = kernel
    return unflatten_dict(found)


def chained(params: Any, gradient: Any, scale: float = SCALE) -> Any:
    """The adapters' gradient of one in merged kernels W: dA = s dW B^T and dB = s A^T dW."""
    flat, kernels = flatten_dict(jax.device_get(params)), flatten_dict(gradient)
    found: dict[Any, Any] = {}
    for at in factors(flat):
        parts: dict[str, list[Any]] = {"a": [], "b": []}
        for layer in range(len(flat[*at, "kernel"])):
            first, second = matrices(flat, at, layer)
            slope = np.asarray(kernels[*at, "kernel"][layer], np.float64)
            slope = slope.reshape(first.shape[0], second.shape[1])
            parts["a"].append(scale * slope @ second.T)
            parts["b"].append(scale * first.T @ slope)
        for name, values in parts.items():
            like = flat[*at, "lora", name]
            found[*at, "lora", name] = np.stack(values).reshape(like.shape)
    return unflatten_dict(found)


def wanted(
    dtype: str, params: Any, cases: list[lc.Case], config: LearnerSection, scale: float = SCALE
) -> Any:
    """The oracle on the merged model, without adapters, and the chain rule by hand."""
    plain = lc.reference(lc.tiny(dtype), merged(params, scale), cases, config)
    return chained(params, plain, scale)


def learner_of(model: TransformerConfig, params: Any, **changes: Any) -> Learner:
    config = dataclasses.replace(LearnerSection(max_logprob_gap=100.0), **changes)
    return Learner(config, OptimizerSection(), model, params)


SHARING: dict[str, Any] = {
    "buckets": (LENGTH,),
    "tokens_per_step": 2 * LENGTH,
    "prompt_buckets": (24,),
    "prompt_slots": 2,
    "min_shared_tokens": 2,
    "held_gradients": 1,
    "pool_size": 1,
}


@functools.partial(jax.jit, static_argnums=0)
def policy(model: TransformerConfig, params: Any) -> jax.Array:
    """Logits of some tokens."""
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), (2, 5))
    return logits(model, params, forward(model, params, tokens, positions))


def test_a_new_policy_is_its_base():
    """B is zero, and the base is drawn as without adapters."""
    model, base = adapted(), lc.tiny()
    params, want = lc.init_params(model, 3), lc.init_params(base, 3)
    trainable, frozen = partition(model, params)
    jax.tree.map(np.testing.assert_array_equal, frozen, want)
    flat = flatten_dict(trainable)
    assert {path[-3] for path in flat} == set(LORA.targets)
    for path, x in flat.items():
        bound = 1 / np.sqrt(np.prod(x.shape[1:-1]))
        assert np.all(x == 0) if path[-1] == "b" else bound / 2 < np.abs(x).max() <= bound
    np.testing.assert_array_equal(policy(model, params), policy(base, want))


def test_the_policy_is_that_of_the_merged_kernels():
    with jax.enable_x64(True):
        model, base = adapted("float64"), lc.tiny("float64")
        params = trained(model)
        got, want = policy(model, params), policy(base, merged(params))
        np.testing.assert_allclose(got, want, atol=1e-13)
        assert np.abs(got - policy(base, partition(model, params)[1])).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_streamed_gradient_is_the_merged_models_by_the_chain_rule(dtype: str):
    """Shared prompts, held gradients, turns of growing trajectories, failures: every order."""
    options = SHARING | {"stream_turns": "idle", "num_turn_caches": 2, "held_gradients": 3}
    with jax.enable_x64(dtype == "float64"):
        model, paths, num_by_turns = adapted(dtype), set(), 0
        learner = learner_of(model, trained(model), **options)
        start = lc.copied(learner.state)
        for order in range(6):
            cases = cases_of(order % 2)
            want = wanted(dtype, learner.params, cases, LearnerSection())
            run = lc.run_turn_events if order % 3 == 2 else lc.run_events
            run(learner, cases, np.random.default_rng(order))
            tolerance = 1e-5 if dtype == "float32" else 1e-12
            assert lc.rel_l2(learner.gradient(), want) <= tolerance
            paths |= {item.path for item in learner.take_work_log()}
            num_by_turns += learner.update().num_by_turns
            learner.load(lc.copied(start))
        assert {"stream", "direct", "ahead", "prompt_backward", "close", "bind"} <= paths
        assert num_by_turns > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_kl_entropy", "dapo", "reinforce_pp"])
def test_every_kind_of_objective_has_it(name: str):
    """What streams by trajectory, group and batch, with terms, in float64."""
    objective, options = OBJECTIVES[name]
    kind: dict[str, Any] = {"objective": objective, "objective_options": options}
    with jax.enable_x64(True):
        model, cases = adapted("float64"), cases_of(3)
        learner = learner_of(model, trained(model), **SHARING | {"prompt_buckets": ()} | kind)
        want = wanted("float64", learner.params, cases, LearnerSection(**kind))
        lc.run_events(learner, cases, np.random.default_rng(0))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-12


def run_steps(learner: Learner, orders: list[int | None]) -> list[bytes]:
    """Bits of the weights and moments after a step in each order; None is barrier mode."""
    for step, order in enumerate(orders):
        cases = cases_of(step)
        if order is None:
            lc.enqueue(learner, cases)
        else:
            lc.run_events(learner, cases, np.random.default_rng(order))
        assert not learner.update().is_empty
    return [leaf.tobytes() for leaf in lc.copy_state(learner)]


@pytest.mark.optimized
def test_exact_sums_of_adapters_have_the_same_bits_in_every_order_and_the_base_stands_still():
    """From the start, where B is zero and A has no gradient."""
    model = adapted(section=FEW)
    options = PLAIN | {"pool_size": 1, "held_gradients": 1, "reduction": "exact"}
    learner = learner_of(model, lc.init_params(model, 0), **options)
    start, base = lc.copied(learner.state), jax.device_get(partition(model, learner.params)[1])
    found = []
    for orders in ([None, None], [0, 1], [2, 3]):
        learner.load(lc.copied(start))
        found.append(run_steps(learner, [*orders]))
    assert found[0] == found[1] == found[2]
    trainable, frozen = partition(model, learner.params)
    jax.tree.map(np.testing.assert_array_equal, frozen, base)
    moved = jax.tree.map(lambda a, b: np.any(a != b), trainable, start.params)
    assert all(jax.tree.leaves(moved))


def test_hundreds_of_groups_are_open_in_the_memory_of_adapters():
    """Every group streams into a pair of its own; pairs and sums have the adapters' size."""
    num_groups, model = 200, adapted(section=LoraSection(rank=1, targets=("value",)))
    options: dict[str, Any] = {"buckets": (16,), "tokens_per_step": 16, "held_gradients": 0}
    learner = learner_of(model, trained(model), **options, pool_size=num_groups)
    trainable, frozen = partition(model, learner.params)
    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(trainable))
    parts = learner.memory.parts
    assert parts["batch sum"] == num_bytes and parts["pairs"] == 2 * num_groups * num_bytes
    assert parts["frozen parameters"] == 4 * sum(x.size for x in jax.tree.leaves(frozen))

    rng = np.random.default_rng(0)
    cases = [
        lc.Case(
            prompt=(1, 2),
            trajectories=tuple(lc.random_tokens(rng, 2) for _ in range(2)),
            rewards=(1.0, 0.0),
        )
        for _ in range(num_groups)
    ]
    groups = [learner.open_group(str(n), case.prompt, 2) for n, case in enumerate(cases)]
    for index in range(2):
        for group, case in zip(groups, cases, strict=True):
            learner.add_trajectory(group, index, case.trajectories[index])
            learner.set_reward(group, index, case.rewards[index])
        learner.work()
    want = wanted("float32", learner.params, cases, LearnerSection(), scale=32.0)
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    assert learner.update().paths["stream"] >= num_groups


def test_no_gradient_of_a_frozen_kernel_is_computed():
    """A backward pass for inputs alone: two thirds of the operations of one for kernels too."""
    model = dataclasses.replace(lc.tiny(), embed_dim=128, mlp_dim=512, num_layers=4)
    tokens = np.zeros((1, 64), np.int32)

    def flops(section: LoraSection) -> float:
        config = with_adapters(model, section)

        def gradient(params: Any) -> Any:
            hidden, pull_back = parameter_vjp(
                config, lambda params: forward(config, params, tokens, tokens), params
            )
            return pull_back(hidden)

        params = jax.eval_shape(lambda: lc.init_params(config, 0))
        costs = jax.jit(gradient).lower(params).compile().cost_analysis()
        return costs["flops"]

    share = flops(LoraSection(rank=1)) / flops(LoraSection())
    assert 0.6 < share < 0.75


def test_a_checkpoint_holds_the_adapters_and_refuses_another_base(tmp_path: Path):
    """In bfloat16 with float32 masters; the base has none."""
    model = adapted("bfloat16", FEW)
    learner = learner_of(model, lc.init_params(model, 0), **PLAIN)
    run_steps(learner, [None])
    for tree, dtype in ((learner.params, "bfloat16"), (learner.state.params, "float32")):
        assert {x.dtype.name for x in jax.tree.leaves(tree)} == {dtype}
    want = jax.device_get(learner.params)
    for x, master in zip(
        *map(jax.tree.leaves, (partition(model, want)[0], learner.state.params)), strict=True
    ):
        np.testing.assert_array_equal(x, np.asarray(master).astype(x.dtype))

    checkpoints = Checkpointer(tmp_path, keep_last=1)
    checkpoints.save(learner.state, RunPosition(num_steps=1), reward=0.0)
    _, frozen = partition(model, learner.params)
    frozen_bytes = learner.memory.parts["frozen parameters"]
    assert frozen_bytes == 2 * sum(x.size for x in jax.tree.leaves(frozen))
    state, _ = checkpoints.restore(learner.state, 1)
    assert state.base == fingerprint(frozen) and state.base
    learner.load(state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.params), want)
    other = dataclasses.replace(learner.state, base="0123")
    with pytest.raises(CheckpointError, match=r"adapters of step 1.*are 0123. Give the base that"):
        checkpoints.restore(other, 1)
    checkpoints.close()
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    with pytest.raises(CheckpointError, match="and these are none"):
        checkpoints.restore_policy(learner.state.params, 1)
    checkpoints.close()


def test_a_fingerprint_sees_every_bit_and_every_place():
    tree = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(3)}
    tree = jax.tree.map(jax.numpy.asarray, tree)
    flipped = {**tree, "b": tree["b"].at[1].set(np.nextafter(np.float32(1), np.float32(2)))}
    turned = {**tree, "a": {"kernel": tree["a"]["kernel"][:, ::-1]}}
    renamed = {"a": tree["a"], "c": tree["b"]}
    found = {fingerprint(t) for t in (tree, flipped, turned, renamed)}
    assert len(found) == 4 and fingerprint(tree) in found
    assert fingerprint({}) == ""
    with jax.enable_x64(True):  # 1 and 2 differ in the upper halves of their bits
        doubles = [jax.numpy.asarray([1.0, 1.0, x], np.float64) for x in (1, 2, 1 + 2**-52)]
        assert len({fingerprint({"a": x}) for x in doubles}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("query", "q_proj")}, r"'q_proj' .* is no projection.*There are: down, gate"),
        ({"targets": ("embedding",)}, "Did you mean 'query'|There are: down, gate, key, output"),
    ],
)
def test_targets_that_match_nothing_are_refused_with_what_exists(changes: dict, message: str):
    with pytest.raises(ModelError, match=message):
        adapted(section=LoraSection(rank=1, **changes))


def test_a_rank_beyond_every_kernels_is_refused():
    with pytest.raises(ModelError, match=r"rank = 100000: expected at most \d+, the model's width"):
        adapted(section=LoraSection(rank=100000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, r"model.lora.rank = -1: expected 0"),
        ({"alpha": 0.0}, r"model.lora.alpha = 0.0: expected a finite number above 0"),
        ({"targets": ()}, r"model.lora.targets = \(\): expected at least one"),
        ({"targets": ("up", "up")}, "each once"),
        ({"alpha": 16.0}, r"alpha = 16.0: expected the default 32.0 with model.lora.rank = 0"),
    ],
)
def test_sections_that_cannot_be_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LoraSection(**changes)


def test_the_engine_shares_the_base_and_copies_the_adapters():
    """They stay what they were while the learner donates its own; a base is placed once."""
    model = adapted(section=FEW)
    learner = learner_of(model, lc.init_params(model, 0), **PLAIN)
    store = WeightStore(model, serving_mesh(model, jax.devices()[:1]))
    store.compile()
    served = []
    for version in range(2):
        store.publish(learner.params, version)
        served.append(store.current().params)
        lc.enqueue(learner, cases_of(version))
        learner.update()
    _, base = partition(model, learner.params)
    for params in served:
        _, frozen = partition(model, params)
        for x, want in zip(*map(jax.tree.leaves, (frozen, base)), strict=True):
            assert x.unsafe_buffer_pointer() == want.unsafe_buffer_pointer()
    first, second = (partition(model, params)[0] for params in served)
    moved = jax.tree.map(lambda a, b: np.any(a != b), first, second)
    assert any(jax.tree.leaves(moved))


@pytest.mark.slow
def test_a_teachers_turns_are_replayed_from_residuals_that_hold_no_parameter():
    """The distiller's gradient after a first update, when B is not zero any more."""
    distiller = ta.make_distiller(
        adapted(),
        num_caches=3,
        num_residuals=2,
        optimizer=OptimizerSection(learning_rate=0.1),
    )
    for step in range(2):
        cases = [ta.random_case(5 * step + seed) for seed in range(5)]
        total = ta.plain_gradient(lc.tiny(), merged(distiller.params), cases)
        want = jax.tree.map(
            lambda g, cases=cases: -g / ta.num_scored(cases), chained(distiller.params, total)
        )
        ta.run_events(distiller, cases, np.random.default_rng(step))
        assert lc.rel_l2(distiller.gradient(), want) <= 1e-5
        distiller.update()
    assert "turn_replay_kept" in {item.path for item in distiller.take_work_log()}
    caches = distiller._programs.caches
    assert caches is not None
    shapes = {x.shape[2:] for kept in caches.residuals.values() for x in kept}
    assert not {p.shape for p in jax.tree.leaves(distiller.params)} & shapes
