"""Stop strings, however the text is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from consumers.engines.text import Stops

PIECES = st.lists(st.text("ab ", max_size=4), min_size=1, max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watch = Stops(stops)
    text = ""
    for at, piece in enumerate(pieces):
        text += watch.push(piece, last=at == len(pieces) - 1)
        if watch.met:
            break
    return text, watch.met


@given(PIECES, STOPS)
def test_no_stop_string_is_ever_shown(pieces: list[str], stops: list[str]) -> None:
    text, _ = shown(pieces, stops)
    assert not any(stop in text for stop in stops)


@given(PIECES, STOPS)
def test_what_is_shown_is_the_beginning_of_the_text(pieces: list[str], stops: list[str]) -> None:
    text, met = shown(pieces, stops)
    whole = "".join(pieces)
    assert whole.startswith(text)
    assert met == any(stop in whole for stop in stops)
    assert met or text == whole


def test_text_is_held_back_only_while_it_may_become_a_stop() -> None:
    watch = Stops(["END"])
    assert watch.push("so E", last=False) == "so "
    assert watch.push("N", last=False) == ""
    assert watch.push("O", last=False) == "ENO"
