"""The laws of the ledger, on the fold, for any order of calls and any passing of time."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ledger.answers import (
    MEMORY_MS,
    Admission,
    Begun,
    BegunCancelled,
    Closed,
    Decision,
    Flagged,
    Granted,
    Settled,
    TakenBack,
)
from ledger.keys import member_of
from ledger.quota import Books
from schemas.jobs import JobClass
from schemas.record import Coordinates
from tests.fakes_ledger import START_MS, USED, at, make_admission, make_decision

CONCURRENCY_MAX = 3
WINDOW_MAX = 4
GRACE_MS = 50

tenants = st.sampled_from(["acme", "globex", "initech"])
numbers = st.integers(1, 8)


class LedgerLaws(RuleBasedStateMachine):
    """Calls in any order; what each job was told is kept beside the books and compared."""

    @initialize()
    def begin_empty(self) -> None:
        self.books = Books()
        self.books.raise_epoch(0)
        self.books.open()
        self.now_us = START_MS * 1000
        self.decisions: dict[str, Decision] = {}
        self.granted: dict[str, Granted] = {}
        self.attempts: dict[str, int] = {}
        self.places: dict[str, Coordinates] = {}
        self.settled: set[str] = set()
        self.taken_back: set[str] = set()

    def ask(self, tenant: str, number: int, partition: int, job_class: JobClass) -> Admission:
        expires_at_ms = self.now_us // 1000 + 100
        decision = make_decision(tenant, job_class=job_class, partition=partition, expires_at_ms=expires_at_ms)
        return replace(
            make_admission(f"job-{number}", decision, concurrency_max=CONCURRENCY_MAX, window_max=WINDOW_MAX),
            grace_ms=GRACE_MS,
        )

    @rule(tenant=tenants, number=numbers, partition=st.integers(0, 1), job_class=st.sampled_from(JobClass))
    def admit(self, tenant: str, number: int, partition: int, job_class: JobClass) -> None:
        ask = self.ask(tenant, number, partition, job_class)
        member = member_of(tenant, ask.job_id)
        answer = self.books.admit(ask, self.now_us)
        assert not isinstance(answer, Closed)
        assert isinstance(answer, TakenBack) == (member in self.taken_back and member not in self.settled)
        if isinstance(answer, Granted):
            first = self.granted.setdefault(member, answer)
            assert replace(answer, repeated=False) == replace(first, repeated=False)

    @rule(tenant=tenants, number=numbers, place=st.integers(0, 1), life=st.integers(0, 3))
    def begin(self, tenant: str, number: int, place: int, life: int) -> None:
        member = member_of(tenant, f"job-{number}")
        request = at("requests.main", place)
        answer = self.books.begin(member, request, f"7.{life}", self.now_us)
        if isinstance(answer, Begun | BegunCancelled):
            assert member in self.granted
            assert member not in self.settled
            assert answer.attempt > self.attempts.get(member, 0)
            assert self.places.setdefault(member, request) == request
            self.attempts[member] = answer.attempt
        if isinstance(answer, Begun):
            assert answer.crashes < answer.attempt

    @rule(tenant=tenants, number=numbers)
    def hand_over(self, tenant: str, number: int) -> None:
        member = member_of(tenant, f"job-{number}")
        place = self.places.get(member, at())
        first = self.books.hand_over(member, place, self.attempts.get(member, 0), self.now_us)
        assert not (first and self.books.hand_over(member, place, self.attempts[member], self.now_us))

    @rule(tenant=tenants, number=numbers)
    def cancel(self, tenant: str, number: int) -> None:
        member = member_of(tenant, f"job-{number}")
        answer = self.books.cancel(member, MEMORY_MS, self.now_us)
        assert isinstance(answer, Flagged) == (member in self.granted and member not in self.settled)
        if member not in self.granted and member not in self.settled:
            self.taken_back.add(member)

    @rule(tenant=tenants, number=numbers)
    def settle(self, tenant: str, number: int) -> None:
        member = member_of(tenant, f"job-{number}")
        ingress = self.granted[member].ingress if member in self.granted else at()
        answer = self.books.settle(member, ingress, USED, MEMORY_MS, self.now_us)
        assert answer == Settled(repeated=member in self.settled)
        self.settled.add(member)

    @rule(milliseconds=st.integers(1, 200))
    def pass_time(self, milliseconds: int) -> None:
        self.now_us += milliseconds * 1000

    @invariant()
    def no_quota_is_overshot(self) -> None:
        status = Books(rows=dict(self.books.rows), epoch=1, is_open=True).status(self.now_us)
        assert all(count <= CONCURRENCY_MAX for count in status.tenants.values())
        assert all(count <= WINDOW_MAX for count in status.windows.values())
        assert sum(status.references.values()) == sum(status.tenants.values()) == status.leases

    @invariant()
    def no_lease_outlives_its_time_or_its_settlement(self) -> None:
        books = Books(rows=dict(self.books.rows), epoch=1, is_open=True)
        books.status(self.now_us)
        for member, row in books.rows.items():
            assert not row.held or (row.lease_us > self.now_us and member not in self.settled)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.now_us += (100 + GRACE_MS) * 1000
            assert self.books.status(self.now_us).leases == 0


TestLedgerLaws = LedgerLaws.TestCase
TestLedgerLaws.settings = settings(max_examples=150, stateful_step_count=50)
