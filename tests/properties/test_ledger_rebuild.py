"""The law of the rebuild: what the log folds into is what the ledger held when nothing moved."""

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.answers import MEMORY_MS, Begun, BegunCancelled, CancelRemembered, Flagged, Granted, Refused
from ledger.fold import LogFold
from ledger.keys import member_of
from ledger.quota import Books
from ledger.rebuild import differences
from schemas.audit import CancelRequested, Rejected
from schemas.ids import JobId
from schemas.record import Record
from tests.fakes_ledger import (
    START_MS,
    USED,
    at,
    make_admission,
    make_admitted,
    make_decision,
    make_refusal,
    make_started,
    make_usage,
)

STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "refuse", "begin", "cancel", "settle", "wait"]), st.integers(1, 6)), max_size=60
)


@dataclass
class System:
    """Router, worker and settler in a few lines: each call is followed by the record that the log gets for it."""

    books: Books = field(default_factory=Books)
    log: list[tuple[Record, int]] = field(default_factory=list)
    now_us: int = START_MS * 1000

    def __post_init__(self) -> None:
        self.books.raise_epoch(0)
        self.books.open()
        decision = make_decision(expires_at_ms=START_MS + 200)
        self.asks = {f"job-{n}": make_admission(f"job-{n}", decision, concurrency_max=4) for n in range(1, 7)}
        self.granted: dict[str, Granted] = {}

    def append(self, record: Record) -> None:
        self.log.append((record, self.now_us // 1000))

    def admit(self, job_id: JobId) -> None:
        answer = self.books.admit(self.asks[job_id], self.now_us)
        if isinstance(answer, Granted):
            self.granted[job_id] = answer
            self.append(make_admitted(self.asks[job_id], answer.admitted_at_us, answer.epoch))

    def refuse(self, job_id: JobId) -> None:
        refusal = replace(make_refusal(job_id), body_hash=self.asks[job_id].body_hash)
        answer = self.books.refuse(refusal, self.now_us)
        if isinstance(answer, Refused):
            self.append(
                Rejected(
                    tenant="acme", job_id=job_id, body_hash=refusal.body_hash, ingress=answer.ingress,
                    reason=answer.reason,
                )
            )  # fmt: skip

    def begin(self, job_id: JobId) -> None:
        request = at("requests.main", int(job_id[-1]))
        answer = self.books.begin(member_of("acme", job_id), request, "7.0", self.now_us)
        if isinstance(answer, Begun):
            self.append(make_started(self.asks[job_id], answer.attempt, request))
        if isinstance(answer, BegunCancelled):
            self.settle(job_id)

    def cancel(self, job_id: JobId) -> None:
        answer = self.books.cancel(member_of("acme", job_id), MEMORY_MS, self.now_us)
        if isinstance(answer, Flagged | CancelRemembered):
            identity = answer.decision.identity if isinstance(answer, Flagged) else None
            self.append(CancelRequested(tenant="acme", job_id=job_id, identity=identity, ingress=at("cancel.acme")))

    def settle(self, job_id: JobId) -> None:
        if job_id in self.granted:
            self.append(make_usage(self.asks[job_id]))
            self.books.settle(member_of("acme", job_id), self.granted[job_id].ingress, USED, MEMORY_MS, self.now_us)

    def wait(self, _: JobId) -> None:
        self.now_us += 20_000


@given(steps=STEPS, shuffler=st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_the_log_folded_in_any_order_and_twice_is_what_the_ledger_holds(
    steps: list[tuple[str, int]], shuffler: Random
) -> None:
    system, fold = System(), LogFold()
    for step, number in steps:
        getattr(system, step)(f"job-{number}")
    shuffled = system.log * 2
    shuffler.shuffle(shuffled)
    for record, at_ms in shuffled:
        fold.apply(record, at_ms)
    system.books.status(system.now_us)
    folded = fold.rows(system.now_us)
    assert differences(system.books.rows, folded, system.now_us) == []
    assert {member for member, row in folded.items() if row.held} == {
        member for member, row in system.books.rows.items() if row.held
    }
