"""Decode priority where learner and engine share devices: a learner's call must not stall decode.

A call is admitted when no row decodes, or when it is expected to take at most `max_decode_stall_s`.
Rows stop decoding while their tools and verifiers run, and after the last trajectory none decodes:
so every call is admitted in the end, and streaming fills the gaps of the rollouts.

Called by `LearnerThread`, before and after a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class DecodePriority:
    """Bounds the learner's next call, and adds up what its calls cost decode.

    Args:
      num_decoding: rows that the engine decodes at this moment; may be called from any thread.
      max_decode_stall_s: infinity where the learner has devices of its own.
    """

    def __init__(self, num_decoding: Callable[[], int], max_decode_stall_s: float) -> None:
        self._num_decoding = num_decoding
        self._max_decode_stall_s = max_decode_stall_s
        self._stall_s = 0.0

    def run(self, call: Callable[[float], int], clock: Callable[[], float]) -> int:
        """Runs `call(max_call_s)` and returns what it returns."""
        is_decoding = self._num_decoding() > 0
        began_s = clock()
        result = call(self._max_decode_stall_s if is_decoding else math.inf)
        if is_decoding and result:
            self._stall_s += clock() - began_s
        return result

    def take_stall_s(self) -> float:
        """Seconds of the learner's calls that began while rows decoded, since the last take."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s
