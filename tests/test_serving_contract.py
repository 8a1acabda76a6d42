"""One contract for both loops: the co-located `ServingWorker`, and JetStream's Driver behind gRPC
in its supervised process. Both serve the weights of the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import served_run
from serving_cases import key, request

from thundersync_jax.config import resolve
from thundersync_jax.saved_policy import FRESH
from thundersync_jax.served_policy import load_engine
from thundersync_jax.serving.remote_client import RemotePolicyClient
from thundersync_jax.serving.supervision import is_serving
from thundersync_jax.serving.wire import encode_request
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.transport.client import PolicyClient, ServingError
from thundersync_jax.transport.messages import FinishReason, SampleResult
from thundersync_jax.workdir import WorkDirectory

pytestmark = pytest.mark.optimized

TESTS = Path(__file__).parent
CONFIG = resolve(served_run.get_config())
ROW = CONFIG.model.max_context
SLOTS = CONFIG.serving.num_slots
TIMEOUT_S = CONFIG.serving.request_timeout_s
LONG = {"max_tokens": ROW}  # a turn of seconds
MANY = 20 * SLOTS  # so many of them take longer than SOON_S, on any machine
SOON_S = 20.0
START_S = 200.0
BOTH = pytest.mark.parametrize("loop", ["worker", "served"])

Connect = Callable[[], contextlib.AbstractAsyncContextManager[PolicyClient]]


@dataclasses.dataclass(kw_only=True)
class Served:
    """A running `serve` main, and what it said."""

    process: subprocess.Popen[bytes]
    output: Path
    address: str = ""

    def child(self) -> int:
        return int(re.findall(r"process (\d+) serves", self.output.read_text())[-1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if match := re.search(pattern, self.output.read_text()):
                return match
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in {self.output.read_text()!r}")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> WorkDirectory:
    """Its compile cache is the tests' own."""
    workdir = WorkDirectory(tmp_path_factory.mktemp("served"))
    workdir.compile_cache.symlink_to(jax.config.jax_compilation_cache_dir)
    return workdir


@pytest.fixture(scope="module")
def worker(workdir: WorkDirectory) -> Iterator[ServingWorker]:
    worker = ServingWorker(load_engine(CONFIG, workdir, FRESH))
    worker.start()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def served(worker: ServingWorker, workdir: WorkDirectory) -> Iterator[Served]:
    """Asks for `worker` so that it compiles first, and this loads its programs."""
    output = workdir.root / "output.txt"
    command = [
        *(sys.executable, "-m", "thundersync_jax.serve"),
        *(f"--config={TESTS / 'served_run.py'}", f"--workdir={workdir.root}", "--port=0"),
    ]
    with output.open("wb") as stream:
        process = subprocess.Popen(command, cwd=TESTS, stdout=stream, stderr=subprocess.STDOUT)
    served = Served(process=process, output=output)
    try:
        served.address = served.wait_for(r"127\.0\.0\.1:\d+")[0]
        served.wait_for("process .* serves")
        yield served
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def loops(worker: ServingWorker, served: Served) -> Mapping[str, Connect]:
    @contextlib.asynccontextmanager
    async def local() -> AsyncIterator[PolicyClient]:
        yield worker

    return {"worker": local, "served": lambda: remote(served.address)}


@contextlib.asynccontextmanager
async def remote(address: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[RemotePolicyClient]:
    client = RemotePolicyClient(address, timeout_s=timeout_s, max_context=ROW)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await main()

    asyncio.run(bounded())


async def sample(
    client: PolicyClient, index: int, context_ids: tuple[int, ...] = (1, 2, 3), **sampling: Any
) -> SampleResult:
    """One turn of a session that is then released."""
    asked = request(index, context_ids, **sampling)
    try:
        return await client.sample(asked)
    finally:
        await client.release(asked.session)


def assert_same(a: SampleResult, b: SampleResult) -> None:
    assert a.token_ids == b.token_ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    assert (a.policy_versions, a.finish_reason) == (b.policy_versions, b.finish_reason)


REQUESTS = (
    {"max_tokens": 1},
    {"max_tokens": 4},
    {"max_tokens": 5},
    {"max_tokens": 23, "temperature": 0.5, "seed": 2**32 - 1},
    {"max_tokens": 7, "temperature": 0.0},
    {"max_tokens": 30, "top_k": 3, "stop_ids": frozenset({1, 4})},
    {"max_tokens": 9, "top_p": 0.5, "context_ids": tuple(i % 7 for i in range(300))},
)


def test_both_loops_give_the_same_tokens_and_log_probabilities(
    loops: Mapping[str, Connect],
) -> None:
    async def main() -> None:
        answers = []
        for connect in loops.values():
            async with connect() as client:
                sampled = (sample(client, i, **asked) for i, asked in enumerate(REQUESTS))
                answers.append(await asyncio.gather(*sampled))
        for asked, local, served in zip(REQUESTS, *answers, strict=True):
            assert_same(local, served)
            assert len(local.token_ids) <= asked["max_tokens"]

    run(main)


@BOTH
def test_turns_do_not_depend_on_their_company(loops: Mapping[str, Connect], loop: str) -> None:
    """More concurrent turns than slots; every token has its version, and seeds matter."""

    async def main() -> None:
        async with loops[loop]() as client:
            alone = [await sample(client, i, max_tokens=6) for i in range(4)]
            crowd = await asyncio.gather(*(sample(client, i, max_tokens=6) for i in range(9)))
        for one, same in zip(alone, crowd, strict=False):
            assert_same(one, same)
        assert len({result.token_ids for result in crowd}) > 4
        for result in crowd:
            assert result.policy_versions == (0,) * 6 and len(result.logprobs) == 6
            assert all(-10 < logprob < 0 for logprob in result.logprobs)
            assert result.finish_reason is FinishReason.LENGTH

    run(main)


@BOTH
def test_a_stop_id_ends_the_turn_and_keeps_its_log_probability(
    loops: Mapping[str, Connect], loop: str
) -> None:
    """At every place of a call of four steps, its last included."""

    async def main() -> None:
        async with loops[loop]() as client:
            whole = await sample(client, 1, max_tokens=12)
            for stop in set(whole.token_ids):
                result = await sample(client, 1, max_tokens=12, stop_ids=frozenset({stop}))
                length = whole.token_ids.index(stop) + 1
                assert result.token_ids == whole.token_ids[:length]
                np.testing.assert_allclose(
                    result.logprobs, whole.logprobs[:length], rtol=0, atol=1e-5
                )
                assert result.policy_versions == (0,) * length
                assert result.finish_reason is FinishReason.STOP

    run(main)


@BOTH
def test_the_context_limit_has_three_defined_outcomes(
    loops: Mapping[str, Connect], loop: str
) -> None:
    """LESSONS 17."""

    async def main() -> None:
        async with loops[loop]() as client:
            for length, num_tokens in ((ROW - 1, 1), (ROW, 0)):
                result = await sample(client, 0, (1,) * length)
                assert len(result.token_ids) == len(result.policy_versions) == num_tokens
                assert result.finish_reason is FinishReason.CONTEXT
            with pytest.raises(ServingError, match=f"step 0 group 0 index 0.*{ROW + 1}"):
                await sample(client, 0, (1,) * (ROW + 1))

    run(main)


BAD = (
    {"context_ids": ()},
    {"context_ids": (1, 99)},
    {"context_ids": (1, -1)},
    {"max_tokens": 0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_k": -1},
    {"top_p": 0.0},
    {"stop_ids": frozenset(range(9))},
)


@BOTH
def test_bad_requests_are_refused_by_name_and_others_go_on(
    loops: Mapping[str, Connect], loop: str
) -> None:
    async def main() -> None:
        async with loops[loop]() as client:
            good = asyncio.create_task(sample(client, 0, max_tokens=40))
            refused = await asyncio.gather(
                *(sample(client, 10 + i, **asked) for i, asked in enumerate(BAD)),
                return_exceptions=True,
            )
            for i, error in enumerate(refused):
                assert isinstance(error, ServingError), (BAD[i], error)
                assert f"index {10 + i}:" in str(error)
            assert len((await good).token_ids) == 40

    run(main)


@BOTH
def test_cancelled_turns_free_their_slots(loops: Mapping[str, Connect], loop: str) -> None:
    """Of turns that run and of turns that wait; a released turn is told so."""

    async def main() -> None:
        async with loops[loop]() as client:
            turns = [asyncio.create_task(sample(client, i, **LONG)) for i in range(MANY)]
            await asyncio.sleep(0.3)
            released = asyncio.create_task(client.sample(request(999, (1,), **LONG)))
            await asyncio.sleep(0.1)
            await client.release(key(999))
            with pytest.raises(ServingError, match="index 999 was released during its turn"):
                await released
            for turn in turns:
                turn.cancel()
            await asyncio.wait(turns)
            assert all(turn.cancelled() for turn in turns)
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*(sample(client, i) for i in range(SLOTS)))

    run(main)


def test_a_call_over_time_is_named_and_frees_its_slot(served: Served) -> None:
    async def main() -> None:
        async with remote(served.address, timeout_s=1.5) as client:
            turns = (sample(client, i, **LONG) for i in range(MANY))
            for error in await asyncio.gather(*turns, return_exceptions=True):
                assert re.search(r"index \d+: no turn from .* within 1.5 s", str(error))
        async with remote(served.address) as client, asyncio.timeout(SOON_S):
            await sample(client, 0)

    run(main)


@BOTH
def test_a_turn_of_another_version_is_refused(loops: Mapping[str, Connect], loop: str) -> None:
    async def main() -> None:
        async with loops[loop]() as client:
            with pytest.raises(ServingError, match="index 0 asks for version 99, and the weights"):
                await client.sample(request(0, (1,), policy_version=99))
            await client.release(key(0))

    run(main)


def test_a_server_that_is_not_there_is_named() -> None:
    async def main() -> None:
        async with remote("127.0.0.1:9", timeout_s=0.3) as client:
            with pytest.raises(ServingError, match=r"index 0: no server at 127.0.0.1:9 within"):
                await sample(client, 0)

    run(main)


CLIENT = """
import sys, time, grpc
call = grpc.insecure_channel(sys.argv[1]).unary_stream("/jetstream_proto.Orchestrator/Decode")
turns = [call(bytes.fromhex(turn)) for turn in sys.argv[2:]]
time.sleep(0.5)
print("asked", flush=True)
time.sleep(60)
"""


def test_a_client_that_vanishes_frees_its_slots(served: Served) -> None:
    turns = [encode_request(request(i, (1,), **LONG)) for i in range(MANY)]
    command = [sys.executable, "-c", CLIENT, served.address]
    command += [turn.SerializeToString().hex() for turn in turns]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline() == b"asked\n"
        client.kill()

    async def main() -> None:
        async with remote(served.address) as client, asyncio.timeout(SOON_S):
            await sample(client, 0)

    run(main)


def test_a_killed_server_fails_its_turns_by_name_and_serves_the_same_again(
    served: Served,
) -> None:
    async def main() -> None:
        async with remote(served.address) as client:
            before = await sample(client, 1, max_tokens=20)
            running = asyncio.create_task(sample(client, 2, **LONG))
            await asyncio.sleep(0.3)
            killed = served.child()
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(SOON_S):
                with pytest.raises(ServingError, match=r"index 2: the server at .* is gone"):
                    await running
            # This one waits for the next server.
            assert_same(await sample(client, 1, max_tokens=20), before)
            assert served.child() != killed

    run(main)
    served.wait_for(f"process {served.child()} serves")
    assert re.search(
        r"process \d+ was killed by SIGKILL; it is restarted", served.output.read_text()
    )


def test_a_signal_ends_the_server_and_its_process(served: Served) -> None:
    """The last test of this module: a turn in flight is told, and nothing is left."""

    async def main() -> None:
        async with remote(served.address) as client:
            running = asyncio.create_task(sample(client, 2, **LONG))
            await asyncio.sleep(0.3)
            served.process.send_signal(signal.SIGINT)
            with pytest.raises(ServingError, match=r"index 2: the server .*the server was closed"):
                await running

    child = served.child()
    run(main)
    assert served.process.wait(60) == 0
    assert served.output.read_text().endswith("ended by SIGINT\n")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not is_serving(served.address, 1.0)
