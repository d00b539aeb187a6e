"""Law: the fast way to canonical bytes writes what RFC 8785's reference implementation writes."""

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.digest import canonical

numbers = (
    st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-10, 10)
    | st.integers(-(10**6), 10**6).map(float)
    | st.decimals(-1000, 1000, places=3).map(float)
)
names = st.text(st.characters(max_codepoint=126), max_size=4) | st.text(max_size=4)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=500)
@given(values)
def test_canonical_bytes_are_those_of_the_reference_implementation(value: object) -> None:
    assert canonical(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [1.0, -0.0, 0.0, 1e-4, 9.99e-5, 1e-7, 1e15, 1e16, 1e21, 2.0**53, 0.1, 1 / 3, 5e-324])
def test_numbers_are_written_as_ecmascript_writes_them(number: float) -> None:
    assert canonical([number, -number]) == rfc8785.dumps([number, -number])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53, "\ud800", {1: 2}, b"bytes"])
def test_what_json_cannot_say_has_no_canonical_bytes(value: object) -> None:
    with pytest.raises(rfc8785.CanonicalizationError):
        canonical(value)
