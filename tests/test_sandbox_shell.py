"""One sandbox, every backend: framing, output, limits, timeouts and clean slates, with real
processes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable

import pytest
from sandbox_cases import begins, ends, fresh_mark, is_running, one_sandbox

from thundersync_jax.sandbox.base import SandboxError

BACKENDS = ("bubblewrap", "restricted")
T = 10.0


def on_every_backend(**limits: object) -> Callable:
    """Runs an async test in a fresh sandbox of each backend."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[[str], None]:
        @pytest.mark.parametrize("backend", BACKENDS)
        @functools.wraps(test)
        def run(backend: str) -> None:
            async def body() -> None:
                async with one_sandbox(backend, **limits) as sandbox:
                    await test(sandbox)

            asyncio.run(body())

        del run.__wrapped__  # pytest reads the signature of `run`
        return run

    return decorate


@on_every_backend()
async def test_output_is_exact_and_state_carries_over(sandbox):
    for command, output, exit_code in (
        ("printf 'no newline'", "no newline", 0),
        ("echo out; echo err >&2", "out\nerr\n", 0),
        ("true", "", 0),
        ("(exit 7)", "", 7),
        ("x='a b'; f() { echo $1-$x; }; cd /usr", "", 0),
        ("f 1; pwd", "1-a b\n/usr\n", 0),
        ("cat", "", 0),  # standard input is empty, not the next command
        ("kill -9 $BASHPID; echo unreached", "", 137),
        ("echo a new shell in ${PWD##*/} with x=$x", None, 0),
        ("printf 'two\nlines'\necho ' and \"quotes\"'", 'two\nlines and "quotes"\n', 0),
        ("echo 'ümläut €'", "ümläut €\n", 0),
    ):
        result = await sandbox.run(command, T)
        assert (result.exit_code, result.is_timeout) == (exit_code, False), command
        assert output is None or result.output == output, command


@on_every_backend()
async def test_nothing_a_command_does_to_its_shell_swallows_the_next_command(sandbox):
    for command in (
        "echo 'unbalanced",
        "if true; then",
        "exec >/dev/null",
        "exec 2>&1 1>&- 9>&-",
        "exit 3",
        "exec ls /usr",
        "exec sleep 0",
        "set -e; false",
        "set -x -v; true",
        "set -u; echo $undefined",
        "printf() { :; }; echo() { :; }; unset -f echo",
        "trap 'echo leaving' EXIT; exit 1",
        "trap 'true' DEBUG ERR",
        "cat <<END",
        "read line; echo got $line",
        "alias eval=false",
    ):
        await sandbox.run(command, T)
        result = await sandbox.run("/bin/echo alive >&2", T)
        if result.exit_code == 0:
            await sandbox.reset()
            result = await sandbox.run("/bin/echo alive", T)
        assert result.output.splitlines()[-1] == "alive", command
        await sandbox.reset()
    assert (await sandbox.run("exit 3", T)).exit_code == 3


@on_every_backend()
async def test_a_shell_that_ends_between_commands_runs_no_command_twice(sandbox):
    await sandbox.run("(sleep 0.05; kill -9 $$) &", T)
    await asyncio.sleep(0.3)
    result = await sandbox.run("echo once >> file", T)
    assert (result.exit_code, result.is_timeout) == (137, False)
    assert (await sandbox.run("cat file; echo alive", T)).output.splitlines()[-1] == "alive"
    assert (await sandbox.run("cat file", T)).exit_code == 1


@on_every_backend()
async def test_bytes_that_are_not_utf8_are_replaced(sandbox):
    result = await sandbox.run(r"printf 'a\xff\xfe\x00b\x1e'", T)
    assert result.output == "a\ufffd\ufffd\x00b\x1e"


@on_every_backend(output_bytes=1000)
async def test_long_output_keeps_head_and_tail_and_counts_what_it_dropped(sandbox):
    result = await sandbox.run("echo first; seq 1 100000; echo last >&2; false", T)
    assert result.output.startswith("first\n1\n2\n") and result.output.endswith("100000\nlast\n")
    size = len("first\nlast\n") + sum(len(f"{i}\n") for i in range(1, 100001))
    assert result.dropped_bytes == size - 1000
    assert f"[... {size - 1000} bytes dropped ...]" in result.output
    assert result.limits_hit == ("output_bytes",) and result.exit_code == 1
    exact = await sandbox.run("head -c 1000 /dev/zero", T)
    assert (len(exact.output), exact.dropped_bytes, exact.limits_hit) == (1000, 0, ())


@on_every_backend(output_bytes=256)
async def test_endless_output_is_killed_and_named(sandbox):
    mark = fresh_mark()
    result = await sandbox.run(f"sleep {mark} & yes", T)
    assert result.exit_code is None and "output_flood" in result.limits_hit
    assert await ends(mark)
    assert (await sandbox.run("echo again", T)).output == "again\n"


@on_every_backend()
async def test_background_children_that_hold_the_output_block_nothing(sandbox):
    mark = fresh_mark()
    began_s = time.monotonic()
    assert (await sandbox.run(f"sleep {mark} & echo started", T)).output == "started\n"
    assert (await sandbox.run("echo next", T)).output == "next\n"
    assert time.monotonic() - began_s < 2
    assert await begins(mark)
    await sandbox.run("(while :; do echo noise; sleep 0.001; done) &", T)
    for _ in range(20):
        result = await sandbox.run("echo word", T)
        assert "word\n" in result.output and result.exit_code == 0
    await sandbox.reset()
    assert not is_running(mark)
    assert (await sandbox.run("echo clean", T)).output == "clean\n"


@on_every_backend()
async def test_a_timeout_kills_the_whole_tree_and_keeps_the_files(sandbox):
    mark = fresh_mark()
    await sandbox.run(
        f"echo kept > file; setsid nohup sleep {mark} >/dev/null 2>&1 </dev/null &", T
    )
    began_s = time.monotonic()
    result = await sandbox.run("x=1; echo before; trap '' TERM INT; sleep 60 & wait", 0.1)
    assert 0.1 <= time.monotonic() - began_s < 2
    assert (result.is_timeout, result.exit_code, result.output) == (True, None, "before\n")
    assert result.limits_hit == ("timeout_s",)
    assert await ends(mark)
    assert (await sandbox.run("cat file; echo x=$x", T)).output == "kept\nx=\n"


@on_every_backend(max_file_bytes=1 << 20, max_processes=12, cpu_s=1)
async def test_every_limit_that_fires_is_named(sandbox):
    assert (await sandbox.run("head -c 3M /dev/zero > big", T)).limits_hit == ("max_file_bytes",)
    assert (await sandbox.run("while :; do :; done & wait $!", T)).limits_hit == ("cpu_s",)
    spawn = "sh -c 'for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do sleep 9 & done'"
    assert "max_processes" in (await sandbox.run(spawn, 1.0)).limits_hit


LEAVINGS = (
    "x=1; export y=2; f() { :; }; alias g=ls; set -o noglob; shopt -s extglob; umask 0",
    "cd /usr; exec 7</etc/passwd 8>&1; trap 'echo trapped' EXIT; ulimit -n 64",
    "mkdir -p a/b; echo 1 > a/b/c; echo 2 > .hidden; ln -s / link; mkfifo pipe; touch -- -rf",
    "mkdir -p locked/in; chmod 000 locked/in locked",
    "for d in /tmp /dev/shm $TMPDIR /var/tmp; do touch $d/left-behind; done 2>/dev/null",
    "ipcmk -M 100 -Q -S 2 >/dev/null 2>&1",
    "setsid nohup sleep MARK >/dev/null 2>&1 </dev/null & (sleep MARK & ) ; sleep MARK | cat &",
    "(trap '' TERM HUP INT; sleep MARK) & disown",
)
LOOK = """
printf '%s|' "$x$y$(declare -F f)$(alias)" "$-" "$(umask)" "$(ulimit -n)" "${PWD##*/}"
ls -A ~ $TMPDIR
for f in /tmp /dev/shm /var/tmp; do ls $f/left-behind; done 2>/dev/null
ls /proc/$BASHPID/fd | wc -l; trap; shopt | sha256sum; ipcs 2>/dev/null | wc -l; echo $?
"""


@on_every_backend()
async def test_nothing_of_an_attempt_survives_a_reset(sandbox):
    """Processes, files, variables, options, directory, descriptors, IPC: as on the first day."""
    mark = fresh_mark()
    before = await sandbox.run(LOOK, T)
    for leave in LEAVINGS:
        await sandbox.reset()
        await sandbox.run(leave.replace("MARK", mark), T)
    for leave in LEAVINGS:
        await sandbox.run(leave.replace("MARK", mark), T)
    assert await begins(mark)
    await sandbox.reset()
    assert not is_running(mark)
    assert (await sandbox.run(LOOK, T)).output == before.output


@on_every_backend()
async def test_a_supervisor_that_does_not_answer_is_replaced(sandbox):
    mark = fresh_mark()
    await sandbox.run(f"echo 1 > left; sleep {mark} &", T)
    sandbox._supervisor.process.kill()
    await sandbox.reset()
    assert (await sandbox.run("ls -A; echo clean", T)).output == "clean\n"
    if os.getuid() == 0:  # an ordinary user's restricted sandbox has no uid to find orphans by
        assert await ends(mark)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "order", list(itertools.permutations(("commands", "output", "control"))), ids="-".join
)
def test_a_host_that_vanishes_leaves_nothing_alive_whichever_end_closes_first(backend, order):
    async def body() -> None:
        mark = fresh_mark()
        async with one_sandbox(backend) as sandbox:
            await sandbox.run(f"setsid sleep {mark} & true", T)
            assert await begins(mark)
            ends_of = {
                "commands": sandbox._commands,
                "output": sandbox._output,
                "control": sandbox._control.fileno(),
            }
            with open(os.devnull) as nothing:
                for name in order:
                    os.dup2(nothing.fileno(), ends_of[name], inheritable=False)  # closes it
                    await asyncio.sleep(0.02)
            assert await ends(mark)

    asyncio.run(body())


@on_every_backend()
async def test_files_go_in_and_out_and_links_of_the_sandbox_are_not_followed(sandbox):
    await sandbox.write_file("a/b/in.txt", "text ü\n")
    await sandbox.write_file("big", b"\0" * (3 << 20))
    assert (
        await sandbox.run("cat a/b/in.txt; wc -c < big; echo more >> a/b/in.txt", T)
    ).output == (f"text ü\n{3 << 20}\n")
    assert await sandbox.read_file("a/b/in.txt") == "text ü\nmore\n".encode()
    assert len(await sandbox.read_file("big")) == 3 << 20
    await sandbox.run("ln -s /etc link; ln -s /etc/passwd file; mkfifo fifo; mkdir dir", T)
    for path in ("link/passwd", "file", "fifo", "dir", "absent", "/etc/passwd", "../x", "a//b", ""):
        with pytest.raises(SandboxError):
            await sandbox.read_file(path)
    await sandbox.write_file("file", "mine")  # replaces the link, not what it points to
    assert await sandbox.read_file("file") == b"mine"
    with pytest.raises(SandboxError):
        await sandbox.write_file("link/passwd", "overwritten")


@on_every_backend()
async def test_cancelling_a_command_kills_it_and_the_sandbox_goes_on(sandbox):
    mark = fresh_mark()
    task = asyncio.create_task(sandbox.run(f"setsid sleep {mark} & sleep 60", T))
    assert await begins(mark)
    with pytest.raises(SandboxError, match="busy"):
        await sandbox.run("echo second owner", T)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ends(mark)
    assert (await sandbox.run("echo alive", T)).output == "alive\n"


@on_every_backend()
async def test_closing_wakes_a_running_command_and_is_final(sandbox):
    mark = fresh_mark()
    task = asyncio.create_task(sandbox.run(f"sleep {mark}", T))
    assert await begins(mark)
    await sandbox.close()
    assert not is_running(mark)
    with pytest.raises(SandboxError, match="killed"):
        await task
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true", T)
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.reset()


@on_every_backend()
async def test_commands_that_cannot_be_sent_are_results_and_change_nothing(sandbox):
    """A policy wrote them: a failure would leave its attempt out of the group."""
    await sandbox.run("x=1", T)
    for command, said in (("echo \0", "hold a NUL byte"), ("#" * 70000, "expected at most 65536")):
        result = await sandbox.run(command, T)
        assert result.exit_code == 126 and said in result.output and not result.is_timeout
    assert (await sandbox.run("echo $x\ud800", T)).output == "1?\n"


@on_every_backend()
async def test_a_thousand_commands_and_fifty_resets_take_a_second_at_most(sandbox):
    """Bounds are ten times the medians on two quiet cores: 0.1 ms a command, 1 to 4 ms a reset."""
    command_s, reset_s = [], []
    for _ in range(1000):
        began_s = time.perf_counter()
        await sandbox.run("echo higher", T)
        command_s.append(time.perf_counter() - began_s)
    for _ in range(50):
        await sandbox.run("echo 5 > secret", T)
        began_s = time.perf_counter()
        await sandbox.reset()
        reset_s.append(time.perf_counter() - began_s)
    assert statistics.median(command_s) < 1.5e-3
    assert statistics.median(reset_s) < 40e-3
