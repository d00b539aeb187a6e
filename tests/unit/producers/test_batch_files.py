"""A batch's files: the input is checked whole and never held, the results survive a kill at any byte."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import batch_files
from producers.batch_files import BatchRefused, Input, Results, State

STATE = State(input="sha256:" + "0" * 64, tenant="acme", errors=Path("err"), replies={0: 5})


def line(custom_id: str, content: str = "x") -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def answer(number: int) -> dict[str, object]:
    body = {"usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    request_id = STATE.job_id(number)
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": f"c{number}", "response": response, "error": None}


def results(folder: Path) -> Results:
    return Results(folder / "out", folder / "err", STATE)


def test_every_line_is_either_good_or_bad_and_good_ones_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("\n".join([line("a"), "", line("ü"), "junk", line("a"), line("last")]))
    found = Input.scan(path)
    assert (found.lines, sorted(found.good), [origin.number for origin, _ in found.bad]) == (6, [1, 3, 6], [2, 4, 5])
    assert found.job(found.good[3], "j").messages is not None
    assert found.digest == Input.scan(path).digest


def test_a_line_that_is_too_long_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "in"
    limit = batch_files.LINE_BYTES_MAX
    path.write_text("\n".join([line("a"), "x" * (3 * limit), "y" * (limit - 1), line("b"), line("c", "z" * (1 << 20))]))
    found = Input.scan(path)
    assert sorted(found.good) == [1, 4]
    assert str(found.bad[0][1]) == f"the line has {3 * limit + 1} bytes; at most {limit} are taken"
    assert "bytes" in str(found.bad[2][1])
    assert found.job(found.good[4], "j").alias == "m"


def test_a_file_with_too_many_lines_is_refused_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "LINES_MAX", 2)
    path = tmp_path / "in"
    path.write_text("a\nb\nc\n")
    with pytest.raises(BatchRefused, match="split it"):
        Input.scan(path)


def test_an_input_that_changes_while_it_is_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(line("a"))
    found = Input.scan(path)
    path.write_text(line("b"))
    with pytest.raises(BatchRefused, match="line 1"):
        found.job(found.good[1], "j")


@given(cut=st.integers(0, 2_000))
def test_whatever_byte_a_kill_cut_at_whole_lines_stay_and_the_rest_goes(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    first = results(folder)
    for number in range(1, 6):
        first.add(number, True, answer(number))
    first.close()
    whole = (folder / "out").read_bytes()
    (folder / "out").write_bytes(whole[:cut])
    again = results(folder)
    kept = whole[:cut].count(b"\n")
    assert again.done == set(range(1, kept + 1))
    assert (again.completed, again.usage.prompt_tokens) == (kept, 2 * kept)
    for number in sorted(set(range(1, 6)) - again.done):
        again.add(number, True, answer(number))
    again.close()
    assert (folder / "out").read_bytes() == whole


def test_results_are_held_by_one_program_alone(tmp_path: Path) -> None:
    held = results(tmp_path)
    with pytest.raises(BatchRefused, match="another program"):
        results(tmp_path)
    held.close()
    results(tmp_path).close()


def test_foreign_or_doubled_lines_in_a_result_file_are_refused(tmp_path: Path) -> None:
    for content in ('{"id": "batch_req_other-1"}\n', "[]\n", "{}\n", "junk\n", 2 * (json.dumps(answer(1)) + "\n")):
        (tmp_path / "out").write_text(content)
        with pytest.raises(BatchRefused):
            results(tmp_path)


def test_the_same_input_run_later_has_other_job_ids(tmp_path: Path) -> None:
    later = STATE.model_copy(update={"replies": {0: 9}})
    assert later.job_id(1) != STATE.job_id(1)
    assert STATE.number_of(STATE.job_id(12)) == 12
    for foreign in (later.job_id(1), "12", STATE.prefix, STATE.prefix + "1x", STATE.prefix + "²"):
        assert STATE.number_of(foreign) is None
    STATE.save(tmp_path / "out")
    assert State.load(tmp_path / "out") == STATE
    State.path(tmp_path / "out").write_text("{}")
    with pytest.raises(BatchRefused):
        State.load(tmp_path / "out")
