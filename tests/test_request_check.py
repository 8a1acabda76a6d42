"""What no row can serve is refused where the caller is, by name, before any batch sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_cases import key, request

from thundersync_jax.config_sampling import MIN_SAMPLING, SamplingSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.serving.request_check import check_request, check_types, check_version
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import ScoreRequest

pytestmark = pytest.mark.optimized

GOOD = request(0, (1, 2))
NOT_AN_INT = ["1", None, 1.5, True, (1,)]


def with_sampling(**values: Any) -> Any:
    return dataclasses.replace(GOOD, sampling=dataclasses.replace(GOOD.sampling, **values))


@pytest.mark.parametrize("value", NOT_AN_INT)
@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "stop_ids", "context_ids"])
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    if name == "context_ids":
        bad = dataclasses.replace(GOOD, context_ids=(1, value))
    else:
        bad = with_sampling(**{name: (value,) if name == "stop_ids" else value})
    with pytest.raises(ServingError, match=rf"index 0: {name} has .*, expected int"):
        check_types(bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (with_sampling(temperature="1"), "temperature has '1', expected int or float"),
        (with_sampling(top_p=None), "top_p has None, expected int or float"),
        (with_sampling(stop_strings="ab"), "stop_strings = 'ab', expected a tuple of str"),
        (with_sampling(stop_strings=None), "stop_strings = None, expected a tuple of str"),
        (with_sampling(stop_ids=3), "stop_ids = 3, expected a tuple of int"),
        (dataclasses.replace(GOOD, context_ids=None), "context_ids = None, expected a tuple"),
        (dataclasses.replace(GOOD, context_ids=[1, 2]), "context_ids are no tuple"),
        (dataclasses.replace(GOOD, policy_version="7"), "policy_version has '7', expected int"),
        (dataclasses.replace(GOOD, session=[0]), r"session = \[0\], expected a TrajectoryKey"),
        (ScoreRequest(session=key(0), context_ids=(1, 2), first="1"), "first has '1'"),
    ],
)
def test_what_is_no_field_of_its_kind_is_refused(bad: Any, message: str) -> None:
    check_types(GOOD)
    with pytest.raises(ServingError, match=message):
        check_types(bad)


@given(st.floats(), st.integers(), st.floats())
def test_a_configuration_and_a_request_take_the_same_sampling(
    temperature: float, top_k: int, top_p: float
) -> None:
    """And what they take survives float32: nothing becomes 0 or infinite."""
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    possible = (
        (temperature == 0 or MIN_SAMPLING <= temperature <= 1 / MIN_SAMPLING)
        and 0 <= top_k < 2**31
        and MIN_SAMPLING <= top_p <= 1
    )
    if possible:
        SamplingSection(**values)
        check_request(with_sampling(**values), row_length=9, vocab_size=9)
    else:
        with pytest.raises(ConfigError):
            SamplingSection(**values)
        with pytest.raises(ServingError, match=r"index 0: (temperature|top_k|top_p) = "):
            check_request(with_sampling(**values), row_length=9, vocab_size=9)


def test_a_turn_may_ask_for_one_version() -> None:
    check_version(GOOD, 3)
    asked = dataclasses.replace(GOOD, policy_version=3)
    check_version(asked, 3)
    with pytest.raises(ServingError, match=r"index 0 asks for version 3, .* are of version 4"):
        check_version(asked, 4)
