"""Who kept whom company in an engine's steps."""

from consumers.engines.protocol import Delta, EngineRequest
from consumers.engines.steps import Steps
from schemas.service import Batch

TOKEN = Delta(text="a", token_ids=(1,))


def begun(*request_ids: str) -> Steps:
    """Each under a digest of its first letter."""
    steps = Steps()
    for request_id in request_ids:
        steps.begin(
            EngineRequest(request_id=request_id, digest=request_id[0], prompt_ids=(1,), max_tokens=9, cache_salt="salt")
        )
    return steps


def batch_of(steps: Steps, request_id: str) -> Batch | None:
    _, item = steps.numbered((request_id, TOKEN))
    assert isinstance(item, Delta)
    return item.batch


def test_a_delta_of_several_steps_names_the_first_of_them() -> None:
    steps = begun("a1", "a2", "b1")
    steps.count(["a1", "b1"])
    steps.count(["a1", "a2", "b1"])
    assert batch_of(steps, "a1") == Batch(number=1, rows=2, adapters=2)
    assert batch_of(steps, "a2") == Batch(number=2, rows=3, adapters=2)
    assert batch_of(steps, "a1") is None


def test_who_had_no_token_of_a_step_is_not_of_its_company_and_waits_for_his_own() -> None:
    steps = begun("a1", "b1")
    ((_, first), (_, none)) = steps.number([("a1", TOKEN), ("b1", Delta(text="", token_ids=()))])
    assert isinstance(first, Delta)
    assert isinstance(none, Delta)
    assert (first.batch, none.batch) == (Batch(number=1, rows=1, adapters=1), None)
    steps.count(["b1"])
    assert batch_of(steps, "b1") == Batch(number=2, rows=1, adapters=1)


def test_who_ended_is_nobodys_company_and_is_forgotten() -> None:
    steps = begun("a1", "b1", "b2")
    steps.end("a1")
    steps.count(["a1", "b1"])
    assert batch_of(steps, "b1") == Batch(number=1, rows=1, adapters=1)
    steps.count(["b2"])
    for request_id in ("b1", "b2"):
        steps.end(request_id)
    assert not steps._digests
    assert not steps._waiting
    assert not steps._batches
