"""The completion map: what a former owner finished is not run again, what it did not is."""

from hypothesis import given
from hypothesis import strategies as st

from infra.kafka.completions import MAP_BYTES_MAX, Completions, decode


def test_nothing_is_committed_past_a_running_job() -> None:
    completions = Completions(5)
    for offset in (5, 6, 7):
        assert completions.read(offset)
    completions.finish(6)
    completions.finish(7)
    assert (completions.watermark, completions.encode()) == (5, "1-2")
    completions.finish(5)
    assert (completions.watermark, completions.encode()) == (8, "")


def test_a_new_owner_skips_what_was_finished_and_runs_the_rest() -> None:
    completions = decode(5, "1-2,4-4")
    assert [offset for offset in range(5, 12) if completions.read(offset)] == [5, 8, 10, 11]
    assert completions.watermark == 5


def test_offsets_without_a_record_do_not_hold_the_watermark_back() -> None:
    completions = Completions(0)
    completions.read(3)
    completions.finish(3)
    assert completions.watermark == 4


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 200))
def test_after_any_crash_every_offset_is_finished_exactly_once(order: list[int], crash_at: int) -> None:
    first = Completions(0)
    total = 201
    for offset in range(total):
        first.read(offset)
    done = order[:crash_at]
    for offset in done:
        first.finish(offset)
    second = decode(first.watermark, first.encode())
    again = [offset for offset in range(first.watermark, total) if second.read(offset)]
    assert set(again) == set(range(total)) - set(done)


def test_a_map_never_outgrows_what_kafka_takes() -> None:
    completions = Completions(0, set(range(1, 20_000, 2)))
    completions.read(0)
    encoded = completions.encode()
    assert len(encoded) <= MAP_BYTES_MAX
    assert decode(0, encoded).read(1) is False
