"""`Scorer` gives what one full forward of its model gives, however requests are cut and mixed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_reference import random_params
from serving_cases import CONFIG, ROW_LENGTH, SERVING, key, policy, run

from thundersync_jax.learner.compilation import CompileCounter
from thundersync_jax.model import transformer
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving import scorer as scorer_module
from thundersync_jax.serving.scorer import ScoreBatch, Scorer
from thundersync_jax.transport.client import ScoreClient, ServingError
from thundersync_jax.transport.messages import ScoreRequest, ScoreResult

pytestmark = pytest.mark.optimized

FLOAT64 = dataclasses.replace(CONFIG, dtype="float64", param_dtype="float64")


def make(config: TransformerConfig = CONFIG, **options: float) -> Scorer:
    """The sum over the vocabulary of 13 is joined from three pieces."""
    return Scorer(config, SERVING, ROW_LENGTH, **{"logprob_chunk": 5} | options)


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    scoring = make()
    scoring.start()
    scoring.publish(policy(), 7)
    yield scoring
    scoring.close()


@pytest.fixture
def float64() -> Iterator[None]:
    """For all threads: the scorer has one of its own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 13, length).tolist())


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    config: TransformerConfig, params: transformer.Params, token_ids: jax.Array
) -> jax.Array:
    positions = jnp.arange(token_ids.shape[0])[None]
    hidden = transformer.forward(config, params, token_ids[None], positions)
    return transformer.logits(config, params, hidden)[0]


def full_forward(
    config: TransformerConfig,
    params: transformer.Params,
    token_ids: Sequence[int],
    temperature: float = 1.0,
) -> np.ndarray:
    """log p(token_ids[t] | token_ids[:t]) for t from 1."""
    padded = np.zeros(ROW_LENGTH, np.int32)
    padded[: len(token_ids)] = token_ids
    logits = np.asarray(_logits(config, params, padded)) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(token_ids) - 1), list(token_ids[1:])]


def check(result: ScoreResult, want: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(result.logprobs, want, rtol=0, atol=tolerance)


async def ask(
    client: ScoreClient, index: int, context_ids: tuple[int, ...], first: int = 1
) -> ScoreResult:
    return await client.score(
        ScoreRequest(session=key(index), context_ids=context_ids, first=first)
    )


async def play(client: ScoreClient, index: int, cuts: Sequence[int]) -> list[ScoreResult]:
    """One context, asked for up to each cut, every token once."""
    context, results, first = tokens(index, cuts[-1]), [], 1
    for cut in cuts:
        results.append(await ask(client, index, context[:cut], first))
        first = cut
    return results


def test_at_once_in_turns_and_in_company_equal_the_full_forward(scorer: ScoreClient) -> None:
    """Eleven sessions of up to 24 tokens on four rows."""
    cuts = [(ROW_LENGTH,), (2, 3, 9, 24), (8, 9, 10), (5, 17), (12, 24)]
    asked = [cuts[i % len(cuts)] for i in range(11)]

    async def main() -> None:
        for results, index in zip(
            await asyncio.gather(*(play(scorer, i, asked[i]) for i in range(11))),
            range(11),
            strict=True,
        ):
            want = full_forward(CONFIG, policy(), tokens(index, asked[index][-1]))
            joined = [x for result in results for x in result.logprobs]
            np.testing.assert_allclose(joined, want, rtol=0, atol=1e-5)
            assert {result.policy_version for result in results} == {7}
            await scorer.release(key(index))

    run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float64_is_exact(float64: None, temperature: float) -> None:
    """To 1e-12, also where a row was evicted and filled again."""
    params = random_params(FLOAT64)
    scorer = make(FLOAT64, temperature=temperature)
    scorer.start()
    scorer.publish(params, 0)

    async def main() -> None:
        contexts = [tokens(i, 20) for i in range(6)]
        want = [full_forward(FLOAT64, params, ids, temperature) for ids in contexts]
        for cut in (7, 20):
            for i, context in enumerate(contexts):
                check(await ask(scorer, i, context[:cut]), want[i][: cut - 1], 1e-12)

    run(main())
    scorer.close()


def test_alone_and_in_company_are_equal_bit_for_bit(scorer: ScoreClient) -> None:
    async def main() -> None:
        alone = await play(scorer, 3, (4, 11))
        await scorer.release(key(3))
        crowd = await asyncio.gather(*(play(scorer, i, (4, 11)) for i in range(4)))
        assert [r.logprobs for r in crowd[3]] == [r.logprobs for r in alone]

    run(main())


def test_a_row_is_extended_and_nothing_runs_twice(scorer: ScoreClient) -> None:
    async def main() -> None:
        context = tokens(0, 20)
        first = await ask(scorer, 0, context[:9], 4)
        assert (len(first.logprobs), first.num_run) == (5, 8)
        more = await ask(scorer, 0, context, 9)
        assert (len(more.logprobs), more.num_run) == (11, 11)
        again = await ask(scorer, 0, context, 4)
        assert again.num_run == 0
        assert again.logprobs == first.logprobs + more.logprobs
        assert first.started_s <= first.ended_s <= more.started_s

    run(main())


def test_the_least_recently_used_row_is_evicted_and_filled_again(scorer: ScoreClient) -> None:
    async def main() -> None:
        contexts = [tokens(i, 12) for i in range(5)]
        want = [full_forward(CONFIG, policy(), context) for context in contexts]
        for i in (0, 1, 2, 3, 0, 4):  # four rows: 1 is the one that goes
            cut = 8 if i else 9
            check(await ask(scorer, i, contexts[i][:cut]), want[i][: cut - 1])
        assert (await ask(scorer, 1, contexts[1][:8])).num_run == 0  # what was scored stays
        for i, num_run in ((0, 3), (3, 4), (4, 4), (1, 11)):
            result = await ask(scorer, i, contexts[i])
            check(result, want[i])
            assert result.num_run == num_run

    run(main())


@pytest.mark.parametrize(
    ("context_ids", "first", "message"),
    [
        ((1, 2, 9, 4), 1, "differ at index 2 from the 3 tokens"),
        ((1, 2), 1, "differ at index 2 from the 3 tokens"),
        ((1, 2, 3, 13), 1, "from 13 to 13 are outside the vocabulary of 13"),
        ((1, 2, 3, -1, 5), 1, "from -1 to 5 are outside the vocabulary of 13"),
        ((1, 2, 3, 4), 0, "first = 0 .* expected 1 to 3"),
        ((1, 2, 3, 4), 4, "first = 4 .* expected 1 to 3"),
        ((1, 2, 3) + (1,) * (ROW_LENGTH - 2), 1, f"{ROW_LENGTH + 1} tokens; .* 2 to {ROW_LENGTH}"),
    ],
)
def test_bad_input_is_refused_by_name_and_others_go_on(
    scorer: ScoreClient, context_ids: tuple[int, ...], first: int, message: str
) -> None:
    async def main() -> None:
        await ask(scorer, 0, (1, 2, 3))
        other = asyncio.create_task(play(scorer, 1, (5, 12)))
        with pytest.raises(ServingError, match=f"^step 0 group 0 index 0: .*{message}"):
            await ask(scorer, 0, context_ids, first)
        assert len(await other) == 2
        want = full_forward(CONFIG, policy(), (1, 2, 3, 4))
        result = await ask(scorer, 0, (1, 2, 3, 4))
        check(result, want)
        assert result.num_run == 1

    run(main())


def test_a_session_has_one_request(scorer: ScoreClient) -> None:
    async def main() -> None:
        answers = await asyncio.gather(
            *(ask(scorer, 0, tokens(0, ROW_LENGTH)) for _ in range(2)), return_exceptions=True
        )
        assert isinstance(answers[0], ScoreResult)
        assert "index 0 already has a request" in str(answers[1])
        with pytest.raises(ServingError, match="a row takes 2"):
            await ask(scorer, 1, (1,))

    run(main())


def test_new_weights_rescore_what_is_asked_for_then(scorer: Scorer) -> None:
    other = random_params(CONFIG, 1)

    async def main() -> None:
        context = tokens(0, 20)
        await ask(scorer, 0, context[:9])
        waiting = asyncio.gather(*(ask(scorer, i, tokens(i, 20)) for i in range(1, 9)))
        await asyncio.sleep(0)
        await asyncio.to_thread(scorer.publish, other, 8)
        for i, result in enumerate(await waiting, 1):
            params = {7: policy(), 8: other}[result.policy_version]
            check(result, full_forward(CONFIG, params, tokens(i, 20)))
        result = await ask(scorer, 0, context)
        assert (result.policy_version, result.num_run) == (8, 19)
        check(result, full_forward(CONFIG, other, context))

    run(main())
    with pytest.raises(ServingError, match="structure"):
        scorer.publish({}, 9)


def test_without_weights_a_request_is_refused() -> None:
    scorer = make()
    scorer.start()
    with pytest.raises(ServingError, match="publish"):
        run(ask(scorer, 0, (1, 2)))
    scorer.close()
    with pytest.raises(ServingError, match="expected above 0"):
        make(temperature=0.0)


def test_nothing_compiles_after_warm_up(scorer: Scorer) -> None:
    counter = CompileCounter()
    counter.start()
    run(play(scorer, 0, (2, 5, 17, ROW_LENGTH)))
    scorer.publish(policy(), 8)
    run(play(scorer, 1, (ROW_LENGTH,)))
    counter.close()
    assert counter.count == 0


def test_scores_shifted_by_one_token_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of `check`: a teacher asked for the token it has just read."""
    right = scorer_module.score_pieces

    def shifted(*arguments: object) -> object:
        *others, batch = arguments
        assert isinstance(batch, ScoreBatch)
        return right(*others, batch.replace(targets=batch.tokens))

    monkeypatch.setattr(scorer_module, "score_pieces", shifted)
    scorer = make()
    scorer.start()
    scorer.publish(policy(), 0)

    async def main() -> None:
        result = await ask(scorer, 0, tokens(0, 12))
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(result, full_forward(CONFIG, policy(), tokens(0, 12)))

    run(main())
    scorer.close()


class StubbornScorer(Scorer):
    """Its rounds wait for `go`, and fail once it is told to."""

    def __init__(self, timeout_s: float) -> None:
        section = dataclasses.replace(SERVING, num_slots=1, request_timeout_s=timeout_s)
        super().__init__(CONFIG, section, ROW_LENGTH)
        self.go = threading.Event()
        self.is_broken = False

    def _run_round(self, cache: object) -> object:
        cache = super()._run_round(cache)
        assert self.go.wait(30)
        if self.is_broken:
            raise RuntimeError("the device is gone")
        return cache


def test_a_deadline_names_the_session_and_what_it_waited_for() -> None:
    scorer = StubbornScorer(1.5)
    scorer.start()
    scorer.publish(policy(), 0)

    async def main() -> None:
        answers = await asyncio.gather(
            *(ask(scorer, i, tokens(i, 12)) for i in range(2)), return_exceptions=True
        )
        late = "and not scored within 1.5 s"
        assert f"index 0: it was running its tokens {late}" in str(answers[0])
        assert f"index 1: it was waiting for a row {late}" in str(answers[1])
        scorer.go.set()
        check(await eventually(), full_forward(CONFIG, policy(), tokens(2, 12)))

    async def eventually() -> ScoreResult:
        """On a busy machine the short deadline may pass again."""
        while True:
            with contextlib.suppress(ServingError):
                return await ask(scorer, 2, tokens(2, 12))

    run(main())
    scorer.close()


def test_a_cancelled_request_frees_its_row() -> None:
    scorer = StubbornScorer(30.0)
    scorer.start()
    scorer.publish(policy(), 0)

    async def main() -> None:
        tasks = [asyncio.create_task(ask(scorer, i, tokens(i, 12))) for i in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        scorer.go.set()
        result = await ask(scorer, 0, tokens(8, 12))
        check(result, full_forward(CONFIG, policy(), tokens(8, 12)))

    run(main())
    scorer.close()


def test_a_failure_reaches_every_waiter_and_the_owner() -> None:
    scorer = StubbornScorer(30.0)
    scorer.start()
    scorer.publish(policy(), 0)

    async def main() -> None:
        tasks = [asyncio.create_task(ask(scorer, i, tokens(i, 12))) for i in range(4)]
        await asyncio.sleep(0.05)
        scorer.is_broken = True
        scorer.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all("the device is gone" in str(answer) for answer in answers), answers
        with pytest.raises(ServingError, match="the device is gone"):
            await ask(scorer, 9, (1, 2))
        await scorer.release(key(0))

    run(main())
    _raises_the_failure(lambda: scorer.publish(policy(), 1))
    _raises_the_failure(scorer.close)


def _raises_the_failure(call: Callable[[], None]) -> None:
    with pytest.raises(ServingError, match="the device is gone") as caught:
        call()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_closing_refuses_requests_in_flight_and_later_ones() -> None:
    scorer = StubbornScorer(30.0)
    with pytest.raises(ServingError, match=r"start\(\)"):
        scorer.publish(policy(), 1)
    scorer.start()
    scorer.publish(policy(), 1)

    async def main() -> None:
        tasks = [asyncio.create_task(ask(scorer, i, tokens(i, 12))) for i in range(4)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(asyncio.to_thread(scorer.close))
        late = asyncio.create_task(ask(scorer, 8, (1, 2)))
        await asyncio.sleep(0.05)
        scorer.go.set()
        await closing
        answers = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert all(isinstance(answer, ServingError) for answer in answers)
        assert all("closed" in str(answer) for answer in answers[1:-1])
        with pytest.raises(ServingError, match="not running"):
            await ask(scorer, 0, (1, 2))

    run(main())
