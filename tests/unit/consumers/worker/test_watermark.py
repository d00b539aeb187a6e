"""Memory near its limit lowers the rows, step by step, and gives them back when there is room again."""

from consumers.engines.memory import Memory, Sizes
from consumers.worker.watermark import REPORT_AGE_MAX_MS, Watermark, is_news
from schemas.memory import MemoryReport


def memory(process: int) -> Memory:
    return Memory(
        host_is_device=True,
        base_weights=0,
        slots=0,
        slots_used=0,
        host_cache=0,
        workspace=process,
        kv_cache=0,
        fragmentation=0,
        process=process,
        limit=100,
    )


def test_rows_are_halved_above_the_high_mark_and_doubled_below_the_low_one() -> None:
    mark = Watermark(rows_max=16, rows=16)
    assert [mark.look(memory(process)) for process in (50, 90, 95, 85, 99, 99, 99, 85)] == [16, 8, 4, 4, 2, 1, 1, 1]
    assert [mark.look(memory(process)) for process in (80, 79, 81, 10, 10, 10)] == [2, 4, 4, 8, 16, 16]


def test_a_shape_is_predicted_by_the_table_until_it_was_measured() -> None:
    sizes = Sizes(per_rank={"q_proj": 10, "v_proj": 20})
    assert sizes.predicted(4, ("q_proj",)) == 40
    assert sizes.predicted(4, ()) == sizes.predicted(4, ("v_proj", "q_proj")) == 120
    assert sizes.predicted(1, ("unknown",)) == 20
    sizes.learn(4, ("v_proj", "q_proj"), 118)
    sizes.learn(4, ("q_proj", "v_proj"), 110)
    assert sizes.predicted(4, ("q_proj", "v_proj")) == 118
    assert sizes.whole(4, ("q_proj", "v_proj")) == 120


def test_a_report_is_written_when_it_says_something_else_or_the_last_one_is_old() -> None:
    written = MemoryReport(
        worker="w",
        engine="fake",
        base=f"sha256:{0:064}",
        at_ms=1000,
        rows=4,
        rows_max=4,
        unexplained=0,
        slot_bytes=10,
        bytes_per_rank={},
        adapters=(),
        **vars(memory(50)),
    )
    assert is_news(written, None)
    assert not is_news(written.model_copy(update={"at_ms": 1000 + REPORT_AGE_MAX_MS - 1}), written)
    assert is_news(written.model_copy(update={"at_ms": 1000 + REPORT_AGE_MAX_MS}), written)
    assert is_news(written.model_copy(update={"at_ms": 3000, "rows": 2}), written)
