"""The gate's verdict."""

import pytest

from consumers.gate.checks import QUESTIONS, Trial, judge

DIGEST = "sha256:" + "a" * 64
SAME = [(1, 2)] * len(QUESTIONS)


@pytest.mark.parametrize("changed", range(1, len(QUESTIONS) + 1))
def test_an_adapter_that_changes_an_answer_passes(changed: int) -> None:
    answers = [(9, 9)] * changed + SAME[changed:]
    report = judge(DIGEST, "engine", Trial(answers=answers, base_answers=SAME))
    assert (report.passed, report.differing, report.problems) == (True, changed, ())


def test_an_adapter_without_effect_fails_with_a_sentence() -> None:
    report = judge(DIGEST, "engine", Trial(answers=SAME, base_answers=SAME))
    assert not report.passed
    assert "no effect" in report.problems[0]


def test_an_adapter_that_does_not_load_fails_with_the_engines_words() -> None:
    report = judge(DIGEST, "engine", Trial(problems=("the engine refused to load it: shape",)))
    assert (report.passed, report.problems) == (False, ("the engine refused to load it: shape",))
