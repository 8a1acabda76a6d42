"""The end marker is found, and the head and tail kept, however a stream is cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.sandbox.framing import Marker, OutputWindow

TOKEN = "0123456789abcdef"
# Streams rich in beginnings of markers.
PIECES = st.sampled_from(
    [b"\x1e", b"\x1e0123", TOKEN.encode(), b"\x1e" + TOKEN[:-1].encode(), b" ", b"7 0"]
)
STREAMS = st.lists(PIECES | st.binary(max_size=20), max_size=30).map(b"".join)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    chunks = []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    return [chunk for chunk in (*chunks, data) if chunk]


@given(
    STREAMS, st.binary(max_size=20), st.lists(st.integers(1, 40), max_size=60), st.integers(0, 300)
)
def test_any_cut_of_any_stream_gives_the_same_result(output, rest, sizes, max_bytes):
    if b"\x1e" + TOKEN.encode() + b" " in output:
        return  # a marker of this token: cannot be met by accident
    marker = b"\x1e" + TOKEN.encode() + b" 7 137\x1e"
    window = OutputWindow(TOKEN, max_bytes)
    found = None
    after = []
    for chunk in cut(output + marker + rest, sizes):
        if found is None:
            found = window.feed(chunk)
        else:
            after.append(chunk)
    assert found is not None
    assert (found.kind, found.exit_code) == ("7", 137)
    assert found.rest + b"".join(after) == rest
    text, num_dropped = window.text()
    if len(output) <= max_bytes:
        assert (text, num_dropped) == (output.decode(errors="replace"), 0)
    else:
        head, tail = output[: (max_bytes + 1) // 2], output[len(output) - max_bytes // 2 :]
        cut_note = f"\n[... {len(output) - max_bytes} bytes dropped ...]\n"
        assert num_dropped == len(output) - max_bytes
        assert text == head.decode(errors="replace") + cut_note + tail.decode(errors="replace")


def test_memory_is_bounded_while_reading():
    window = OutputWindow(TOKEN, 1000)
    for _ in range(1000):
        assert window.feed(b"x" * 65536) is None
        assert len(window._head) + len(window._tail) + len(window._pending) < 3000
    assert window.num_bytes + len(window._pending) == 1000 * 65536


def test_an_end_without_a_command_is_not_taken_for_one():
    window = OutputWindow(TOKEN, 100)
    assert window.feed(f"\x1e{TOKEN} exit 3\x1e".encode()) == Marker(
        kind="exit", exit_code=3, rest=b""
    )
    with pytest.raises(SandboxError, match="malformed"):
        OutputWindow(TOKEN, 100).feed(f"\x1e{TOKEN} 1 2 3\x1e".encode())
