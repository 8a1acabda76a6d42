"""An objective's own functions in the middle of a run, where they see what no check at the start
tried: whatever they raise, or return that is no value of theirs, is an ObjectiveError that names
the objective, the function and what it was given.

`make_objective` guards every objective that it returns. Records compare by value, as the functions
that they hold, so that two equal objectives are one static argument of a program.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thundersync_jax.factory import describe_error
from thundersync_jax.losses.objective import Objective, ObjectiveError, Tokens
from thundersync_jax.trajectory import MAX_REWARD, check_reward


def guarded(objective: Objective) -> Objective:
    """The same objective, whose functions raise nothing but ObjectiveError. Those that it leaves at
    their defaults stay these: `check_objective` knows them.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Objective)}

    def guard(part: str, function: Any, value: _Value) -> Any:
        if function is defaults.get(part):
            return function
        return _Guarded(
            name=f"objective {objective.name!r}: {part}", function=function, value=value
        )

    return dataclasses.replace(
        objective,
        terms=tuple(
            dataclasses.replace(term, value=guard(term.name, term.value, _TOKEN_VALUES))
            for term in objective.terms
        ),
        **{part: guard(part, getattr(objective, part), value) for part, value in _VALUES.items()},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Value:
    """What a function must return.

    Attributes:
      read: a returned object -> the value; raises TypeError or ValueError for any other.
    """

    expected: str
    read: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Guarded:
    name: str
    function: Callable[..., Any]
    value: _Value

    def __call__(self, *arguments: Any) -> Any:
        try:
            found = self.function(*arguments)
        except (Exception, SystemExit) as error:  # a user's code, whatever it raises
            raise ObjectiveError(
                f"{self._call(arguments)} raised {describe_error(error)}. Expected "
                f"{self.value.expected}: mend the function"
            ) from error
        try:
            return self.value.read(found)
        except (TypeError, ValueError) as error:
            raise ObjectiveError(
                f"{self._call(arguments)} is {reprlib.repr(found)}: expected "
                f"{self.value.expected}. Mend the function"
            ) from error

    def _call(self, arguments: tuple[Any, ...]) -> str:
        return f"{self.name}({', '.join(map(_shown, arguments))})"


def _shown(argument: Any) -> str:
    if isinstance(argument, Tokens):
        return f"{argument.logprobs.shape[0]} tokens"
    return reprlib.repr(argument.tolist() if isinstance(argument, np.ndarray) else argument)


def _weights(found: Any) -> np.ndarray:
    return np.asarray(found, np.float32)


def _truth(found: Any) -> bool:
    if not isinstance(found, bool | np.bool_):
        raise TypeError(type(found))
    return bool(found)


def _unread(found: Any) -> Any:
    return found


_TOKEN_VALUES = _Value(expected="one real number a token", read=_unread)
_VALUES: Mapping[str, _Value] = {
    "score": _TOKEN_VALUES,
    "advantages": _Value(expected="one finite number a reward", read=np.asarray),
    "token_weights": _Value(expected="one finite number a token", read=_weights),
    "shape_reward": _Value(
        expected=f"a finite number of at most {MAX_REWARD:g} in size", read=check_reward
    ),
    "keeps_group": _Value(expected="True or False", read=_truth),
    "advantage_scale": _Value(expected="a finite number above 0", read=float),
}
