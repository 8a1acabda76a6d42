"""`PolicyEngine` through JetStream's interface and through our loop's: the same tokens, exactly."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_cases import (
    CONFIG,
    ROW_LENGTH,
    SERVING,
    learner_logprobs,
    policy,
    warm_engine,
)

from thundersync_jax.errors import ConfigError
from thundersync_jax.model import transformer
from thundersync_jax.serving import decode_state as programs
from thundersync_jax.serving import jetstream_compat
from thundersync_jax.serving.decode_state import DecodeState
from thundersync_jax.serving.engine import PolicyEngine, PrefillInput
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SamplingParams

pytestmark = pytest.mark.optimized

Emitted = list[tuple[int, float, int]]  # id, log-probability, version


def decode(engine: PolicyEngine, state: DecodeState, slots: Sequence[int]) -> list[Emitted]:
    """Generates until the slots end, reading results as JetStream's Driver does: slot by slot."""
    emitted: dict[int, Emitted] = {slot: [] for slot in slots}
    running = set(slots)
    for _ in range(ROW_LENGTH):
        state, results = engine.generate(engine.load_params(), state)
        host = results.convert_to_numpy()
        for slot in sorted(running):
            data = host.get_result_at_slot(slot)
            columns, valid = data.tokens[0], data.valid[0]
            for at in range(0, len(columns), 3):
                if not valid[at]:
                    break
                token, bits, version = columns[at : at + 3].tolist()
                emitted[slot].append((token, float(np.int32(bits).view(np.float32)), version))
                if not valid[at + 2]:
                    running.discard(slot)
        if not running:
            return [emitted[slot] for slot in slots]
    raise AssertionError(f"slots {running} did not end")


def by_extend(
    engine: PolicyEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Emitted]:
    """One turn per prompt, prompt i in slot i, one piece per call."""
    state = engine.init_decode_state()
    for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        for piece in engine.cut(slot, 0, prompt, sampling):
            state = engine.extend(engine.load_params(), state, [piece])
    return decode(engine, state, range(len(prompts)))


def by_prefill(
    engine: PolicyEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Emitted]:
    state = engine.init_decode_state()
    for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        prefix = engine.prefill(
            params=engine.load_params(),
            padded_tokens=_padded(prompt, sampling),
            true_length=len(prompt),
        )
        state = engine.insert(prefix, state, slot)
    return decode(engine, state, range(len(prompts)))


def _padded(prompt: Sequence[int], sampling: SamplingParams) -> PrefillInput:
    padded = np.full(32, 9, np.int32)
    padded[: len(prompt)] = prompt
    return PrefillInput(token_ids=padded, sampling=sampling)


PROMPTS = [(1, 2, 3), tuple(range(12)), (4,), (5, 6, 7, 8, 9, 10)]
PARAMS = [
    SamplingParams(max_tokens=9, seed=1),
    SamplingParams(max_tokens=5, seed=2, temperature=0.7),
    SamplingParams(max_tokens=7, seed=2**40 + 3, top_k=3),
    SamplingParams(max_tokens=1, temperature=0.0),
]


def test_prefill_and_insert_sample_what_our_loop_samples() -> None:
    engine = warm_engine()
    ours, theirs = by_extend(engine, PROMPTS, PARAMS), by_prefill(engine, PROMPTS, PARAMS)
    assert [len(tokens) for tokens in ours] == [9, 5, 7, 1]
    assert [[t[0] for t in turn] for turn in ours] == [[t[0] for t in turn] for turn in theirs]
    for ours_turn, theirs_turn in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            [t[1] for t in ours_turn], [t[1] for t in theirs_turn], atol=1e-5
        )
        assert {t[2] for t in ours_turn} == {7}


def test_a_prefix_is_continued_and_inserted_again_without_being_consumed() -> None:
    """A group's prompt is prefilled once."""
    engine = warm_engine()
    prompt, whole = PROMPTS[1], SamplingParams(max_tokens=4, seed=5)
    first = engine.prefill(
        params=engine.weights, padded_tokens=_padded(prompt[:7], whole), true_length=7
    )
    rest = engine.prefill(
        params=engine.weights,
        existing_prefix=first,
        padded_tokens=_padded(prompt[7:], whole),
        true_length=len(prompt) - 7,
    )
    state = engine.insert(rest, engine.init_decode_state(), 2)
    state = engine.insert(rest, state, 0)
    state = engine.insert(first, state, 3)
    at_2, at_0, _ = decode(engine, state, [2, 0, 3])
    assert [t[0] for t in at_2] == [t[0] for t in at_0]
    [[*want]] = by_extend(engine, [prompt], [whole])
    assert [t[0] for t in at_2] == [t[0] for t in want]


def test_sampled_logprobs_are_the_learners() -> None:
    """An unchanged policy gives ratio 1 (LESSONS 14)."""
    params = [dataclasses.replace(p, temperature=1.0, top_k=0, max_tokens=9) for p in PARAMS]
    for prompt, turn in zip(PROMPTS, by_extend(warm_engine(), PROMPTS, params), strict=True):
        want = learner_logprobs((*prompt, *(t[0] for t in turn)))[len(prompt) :]
        np.testing.assert_allclose([t[1] for t in turn], want, rtol=0, atol=1e-5)


def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit() -> None:
    """LESSONS 18."""
    engine = warm_engine()
    assert by_extend(engine, PROMPTS[:1], PARAMS[:1])[0] == by_extend(engine, PROMPTS, PARAMS)[0]


def live_state(engine: PolicyEngine) -> DecodeState:
    state = engine.init_decode_state()
    for slot, (prompt, sampling) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        for piece in engine.cut(slot, 0, prompt, sampling):
            state = engine.extend(engine.weights, state, [piece])
    return state


def test_a_row_that_is_not_kept_stops_before_it_samples_and_the_others_go_on() -> None:
    """Cancelled rows cost nothing from the next call on."""
    engine = warm_engine()
    is_kept = np.array([True, False, True, True])
    state, results = engine.generate(engine.weights, live_state(engine), is_kept=is_kept)
    stopped = engine.unpack(results)
    whole = engine.unpack(engine.generate(engine.weights, live_state(engine))[1])
    assert not stopped.is_sampled[1].any() and whole.is_sampled[1].all()
    np.testing.assert_array_equal(stopped.token_ids[is_kept], whole.token_ids[is_kept])
    np.testing.assert_array_equal(stopped.logprobs[is_kept], whole.logprobs[is_kept])
    again = engine.unpack(engine.generate(engine.weights, state)[1])
    assert not again.is_sampled[1].any() and again.is_sampled[0].all()


def test_a_call_ends_with_the_step_in_which_enough_rows_have_ended() -> None:
    """The fourth row ends with its first token: one program, without compiling another."""
    engine = warm_engine()
    for until_ended, num_steps in ((1, 1), (2, SERVING.steps_per_sync)):
        _, results = engine.generate(engine.weights, live_state(engine), until_ended=until_ended)
        is_sampled = engine.unpack(results).is_sampled
        assert is_sampled[:3].sum(axis=1).tolist() == [num_steps] * 3


def test_tokens_do_not_depend_on_the_slot() -> None:
    engine = warm_engine()
    turns = by_extend(engine, [PROMPTS[0]] * 4, [PARAMS[0]] * 4)
    assert len({tuple(t[0] for t in turn) for turn in turns}) == 1


def test_members_of_a_group_differ_and_a_seed_repeats() -> None:
    """LESSONS 19."""
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (0, 1, 2, 0)]
    turns = by_extend(warm_engine(), [PROMPTS[0]] * 4, params)
    tokens = [tuple(t[0] for t in turn) for turn in turns]
    assert len(set(tokens[:3])) == 3 and tokens[3] == tokens[0]


def test_a_stop_token_ends_the_turn_and_keeps_its_logprob() -> None:
    """LESSONS 14."""
    engine = warm_engine()
    free = SamplingParams(max_tokens=12, seed=3)
    [turn] = by_extend(engine, PROMPTS[:1], [free])
    stop = turn[7][0]
    first = next(i for i, t in enumerate(turn) if t[0] == stop)
    [stopped] = by_extend(
        engine, PROMPTS[:1], [dataclasses.replace(free, stop_ids=frozenset({stop}))]
    )
    assert stopped == turn[: first + 1]


@pytest.mark.parametrize(("below_limit", "num_sampled"), [(1, 1), (2, 2), (5, 5)])
def test_a_row_is_filled_exactly(below_limit: int, num_sampled: int) -> None:
    """LESSONS 18: the last position of the row holds a token, and its log-probability is right."""
    prompt = tuple(i % 13 for i in range(ROW_LENGTH - below_limit))
    [turn] = by_extend(warm_engine(), [prompt], [SamplingParams(max_tokens=50)])
    assert len(turn) == num_sampled
    want = learner_logprobs((*prompt, *(t[0] for t in turn)))[len(prompt) :]
    np.testing.assert_allclose([t[1] for t in turn], want, rtol=0, atol=1e-5)


def test_a_prefill_beyond_the_row_is_refused() -> None:
    engine = warm_engine()
    prompt = _padded((1,) * (ROW_LENGTH + 1), PARAMS[0])
    with pytest.raises(ServingError, match=f"expected 1 to {ROW_LENGTH}"):
        engine.prefill(params=engine.weights, padded_tokens=prompt, true_length=ROW_LENGTH + 1)


def test_nothing_compiles_after_the_warm_up() -> None:
    """LESSONS 21 and 28: budgets, lengths and sampling parameters never enter a shape."""
    engine = PolicyEngine(CONFIG, SERVING, ROW_LENGTH)
    engine.warm_up(with_prefill=True)
    params = jax.tree.map(jnp.copy, policy())
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine.weights.publish(params, 7)
        by_extend(engine, PROMPTS, PARAMS)
        by_prefill(engine, PROMPTS, PARAMS)
        for budget in (1, 2, 3):
            by_extend(engine, PROMPTS[:1], [SamplingParams(max_tokens=budget, top_p=0.9)])
        engine.weights.publish(params, 8)
        assert compiled == []
        jax.jit(lambda x: x * 3.5)(jnp.ones(3))
        assert compiled  # the listener would have heard
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_cache_is_updated_in_place() -> None:
    """A step that copied the whole cache would be bound by that copy at any real size."""
    config = dataclasses.replace(CONFIG, num_layers=8)
    state = jax.eval_shape(lambda: programs.empty_state(config, 4, 2048))
    step = functools.partial(programs.generate, config, 2)
    weights = transformer.abstract_params(config)
    kept, ended = jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(step, donate_argnums=1).lower(weights, state, kept, ended)
    memory = lowered.compile().memory_analysis()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2


def test_the_engines_weights_survive_the_learners_donation() -> None:
    engine = PolicyEngine(CONFIG, SERVING, ROW_LENGTH)
    engine.warm_up()
    mine = jax.tree.map(jnp.copy, policy())
    engine.weights.publish(mine, 7)
    update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    jax.block_until_ready(update(mine))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    assert by_extend(engine, PROMPTS, PARAMS) == by_extend(warm_engine(), PROMPTS, PARAMS)


def test_bfloat16_engines_keep_bfloat16_weights_of_float32_masters() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    engine = PolicyEngine(config, SERVING, ROW_LENGTH)
    engine.warm_up()
    engine.weights.publish(policy(), 0)
    leaves = jax.tree.leaves(engine.weights.current().params)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}
    [turn] = by_extend(engine, PROMPTS[:1], PARAMS[:1])
    want = learner_logprobs((*PROMPTS[0], *(t[0] for t in turn)))[3:]
    np.testing.assert_allclose([t[1] for t in turn], want, atol=0.5)


def test_weights_of_another_model_are_refused_by_name() -> None:
    engine = warm_engine()
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    with pytest.raises(ServingError, match="structure"):
        engine.weights.publish(transformer.abstract_params(tied), 8)
    wide = transformer.abstract_params(dataclasses.replace(CONFIG, vocab_size=14))
    with pytest.raises(ServingError, match=r"embedding.*float32\(14, 16\)"):
        engine.weights.publish(wide, 8)
    assert engine.weights.current().version == 7


def test_slots_that_do_not_fit_are_refused_with_the_number_that_would() -> None:
    many = dataclasses.replace(SERVING, num_slots=10**12)
    with pytest.raises(ConfigError, match=r"serving\.num_slots = 10{12}: expected at most \d+"):
        PolicyEngine(CONFIG, many, ROW_LENGTH)


def test_calls_before_warm_up_or_weights_say_what_to_do() -> None:
    engine = PolicyEngine(CONFIG, SERVING, ROW_LENGTH)
    with pytest.raises(ServingError, match="warm_up"):
        engine.init_decode_state()
    with pytest.raises(ServingError, match="publish"):
        engine.weights.current()


def test_jetstream_is_pinned_light_and_leaves_the_root_logger_alone() -> None:
    assert jetstream_compat.JETSTREAM_VERSION == "0.2.2"
    script = (
        "import logging, sys; root = logging.getLogger(); before = root.level, list(root.handlers);"
        "from thundersync_jax.serving import jetstream_compat as c;"
        "assert (root.level, root.handlers) == before, root.handlers;"
        "import jax; prefix = {'a': jax.numpy.ones(2)}; c.orchestrator.delete_pytree(prefix);"
        "assert prefix['a'].is_deleted();"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_missing_jetstream_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise jetstream_compat.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(jetstream_compat.importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"launch/setup\.sh"):
        jetstream_compat._check_version()
    monkeypatch.setattr(jetstream_compat.importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(ImportError, match=r"is 0\.3\.0, expected 0\.2\.2"):
        jetstream_compat._check_version()
