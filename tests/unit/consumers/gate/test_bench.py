"""The gate at work on a fake engine that can be told to fail."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from consumers.engines import protocol
from consumers.engines.fake import FakeEngine, Faults
from consumers.engines.protocol import Engine
from consumers.engines.select import describe
from consumers.gate import app
from consumers.gate.app import Gate
from consumers.gate.bench import CannotTry, TrialBench
from consumers.gate.checks import QUESTIONS, Trial
from infra.clock import SystemClock
from infra.kafka.publisher import Publisher
from infra.kafka.tail import Tail
from infra.metrics import Metrics
from infra.objects import FileObjects
from infra.process import Process
from infra.settings import EngineSettings, ProcessSettings
from schemas.adapters import AdapterGated, AdapterManifest, BaseAdded
from schemas.keys import KeyRevoked, KeyRole
from schemas.record import Coordinates, Record
from schemas.signing import SigningKey
from schemas.topics import ADAPTERS, KEYS
from tests.factories import (
    KEYS_OF_ROLE,
    approved,
    make_base,
    make_manifest,
    make_registry,
    pool_of,
    published,
    submitted,
    zero_of,
)

KEY, NEXT_KEY = KEYS_OF_ROLE[KeyRole.GATE], SigningKey.generate("gate-2", KeyRole.GATE)
REVOKED = KeyRevoked(key_id=KEY.key_id, reason="leaked")


class Trials:
    """A bench over a registry with one base, one pool and these adapters, whose files are stored."""

    def __init__(self, folder: Path, faults: Faults, names: tuple[str, ...] = ("adapter",)) -> None:
        self.faults = faults
        self.engines: list[Engine] = []
        self.base: BaseAdded = make_base()
        self.zero = zero_of(self.base)
        self.adapters = [make_manifest(self.base.base, self.base.manifest.tokenizer, name=name) for name in names]
        self.objects = FileObjects(folder / "objects")
        entries = [("adapters", self.base.base, self.base), approved(self.zero), pool_of(self.base.base)]
        self.registry = make_registry([published(KEY), *entries, *map(submitted, self.adapters)])
        settings = EngineSettings(kind="fake", step_ms=0)
        self.bench = TrialBench(settings, self.registry, self.objects, folder / "cache", self._make)

    def tell(self, topic: str, record: Record) -> Coordinates:
        """Append a record that the registry folds at once."""
        offset = self.registry.positions.get(topic, 0)
        self.registry.apply(topic, offset, record.encode())
        return Coordinates(topic=topic, partition=0, offset=offset)

    async def store(self) -> None:
        for name in ("zero", "adapter", "other"):
            await self.objects.put(name.encode())

    def _make(self, kind: protocol.EngineKind, settings: protocol.EngineSettings) -> Engine:
        engine = FakeEngine(describe(kind, settings), settings, self.faults)
        self.engines.append(engine)
        return engine

    @property
    def resident(self) -> frozenset[str]:
        return self.engines[-1].resident()


async def make_trials(folder: Path, faults: Faults | None = None, names: tuple[str, ...] = ("adapter",)) -> Trials:
    trials = Trials(folder, faults or Faults(), names)
    await trials.store()
    return trials


async def test_an_adapter_is_asked_beside_the_base_and_taken_out_again(tmp_path: Path) -> None:
    trials = await make_trials(tmp_path)
    trial = await trials.bench.try_adapter(trials.adapters[0])
    assert trial.problems == ()
    assert len(trial.answers) == len(trial.base_answers) == len(QUESTIONS)
    assert all(own != base for own, base in zip(trial.answers, trial.base_answers, strict=True))
    assert trials.resident == {trials.zero.digest}
    await trials.bench.stop()


async def test_one_engine_serves_trials_of_one_base_until_it_is_stopped(tmp_path: Path) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    for manifest in trials.adapters:
        await trials.bench.try_adapter(manifest)
    assert len(trials.engines) == 1
    await trials.bench.stop()
    assert not trials.bench.started
    assert trials.bench.engine_id == "fake 1"


async def test_an_adapter_that_does_not_load_is_a_problem_of_its_own(tmp_path: Path) -> None:
    trials = await make_trials(tmp_path)
    trials.faults.load_fails.add(trials.adapters[0].digest)
    trial = await trials.bench.try_adapter(trials.adapters[0])
    assert "the engine refused to load it" in trial.problems[0]
    assert trials.resident == {trials.zero.digest}
    await trials.bench.stop()


async def test_an_adapter_that_corrupts_its_answers_fails_and_the_engine_goes_on(tmp_path: Path) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    trials.faults.corrupts.add(trials.adapters[0].digest)
    trial = await trials.bench.try_adapter(trials.adapters[0])
    assert trial.problems == ("the engine failed under it: corrupted",)
    assert (await trials.bench.try_adapter(trials.adapters[1])).problems == ()
    assert len(trials.engines) == 1
    await trials.bench.stop()


async def test_stored_files_that_are_gone_or_changed_fail_the_adapter(tmp_path: Path) -> None:
    trials = Trials(tmp_path, Faults())
    await trials.objects.put(b"zero")
    trial = await trials.bench.try_adapter(trials.adapters[0])
    assert "the stored files are not those of the manifest" in trial.problems[0]
    await trials.bench.stop()


async def test_a_base_without_a_pool_cannot_be_tried(tmp_path: Path) -> None:
    trials = await make_trials(tmp_path)
    trials.registry.pools.clear()
    with pytest.raises(CannotTry, match="no pool serves base"):
        await trials.bench.try_adapter(trials.adapters[0])


class Log:
    """A topic of reports that the registry folds at once. It stops the gate after so many, or that many looks."""

    def __init__(self, trials: Trials, stop: Callable[[], None], reports: int, looks: int) -> None:
        self.reports: list[AdapterGated] = []
        self._trials = trials
        self._stop = stop
        self._reports_left = reports
        self._looks_left = looks

    async def publish(self, topic: str, key: str, record: Record, subject: str) -> Coordinates:
        assert isinstance(record, AdapterGated)
        assert key == subject == record.adapter
        where = self._trials.tell(topic, record)
        self.reports.append(record)
        self._reports_left -= 1
        if not self._reports_left:
            self._stop()
        return where

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        del timeout_s
        self._looks_left -= 1
        if not self._looks_left:
            self._stop()
        await asyncio.sleep(0)
        return condition()


async def run_gate(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, reports: int = 0, looks: int = 0, key: SigningKey | None = None
) -> tuple[list[AdapterGated], str | None]:
    """Run a gate for so many reports, or until it found nothing to do that often. Its reports, and its problem then."""
    monkeypatch.setattr(app, "RETRY_S", 0.0)
    settings = ProcessSettings(name="gate", home=Path())
    process = Process(name="gate", settings=settings, clock=SystemClock(), metrics=Metrics())
    log = Log(trials, process.stopping.set, reports, looks)
    gate = Gate(trials.registry, cast("Tail", log), cast("Publisher", log), trials.bench, key or KEY)
    async with asyncio.timeout(20):
        await gate.run(process)
    await trials.bench.stop()
    return log.reports, gate.problem


async def gated(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> list[AdapterGated]:
    """Run a gate until every adapter has its report."""
    reports, _ = await run_gate(trials, monkeypatch, reports=len(trials.adapters))
    return reports


def digests(manifests: list[AdapterManifest]) -> list[str]:
    return [manifest.digest for manifest in manifests]


async def test_every_submitted_adapter_gets_one_signed_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    reports = await gated(trials, monkeypatch)
    assert [report.adapter for report in reports] == digests(trials.adapters)
    assert all(report.report.passed for report in reports)


async def test_an_adapter_under_which_the_engine_dies_is_refused_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    deadly, harmless = digests(trials.adapters)
    trials.faults.load_fails.add(deadly)
    trials.faults.remove_fails.add(deadly)
    reports = await gated(trials, monkeypatch)
    assert [(report.adapter, report.report.passed) for report in reports] == [(harmless, True), (deadly, False)]
    assert "the engine died under it" in reports[1].report.problems[0]
    assert len(trials.engines) >= app.DEATHS_MAX


async def test_a_gate_whose_key_was_revoked_or_never_published_tries_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = await make_trials(tmp_path)
    reports, problem = await run_gate(trials, monkeypatch, looks=3, key=NEXT_KEY)
    assert problem is not None
    assert problem.startswith("the signing key gate-2 is not published, or was revoked: make the next one with `switch")
    trials.tell(KEYS.name, REVOKED)
    later, problem = await run_gate(trials, monkeypatch, looks=3)
    assert problem is not None
    assert "gate-1" in problem
    assert "`switchyard key rotate gate`" in problem
    assert not reports
    assert not later
    assert not trials.engines


async def test_a_key_that_is_revoked_during_a_trial_signs_no_report_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = await make_trials(tmp_path)
    tried = trials.bench.try_adapter

    async def revoked_meanwhile(manifest: AdapterManifest) -> Trial:
        trials.tell(KEYS.name, REVOKED)
        return await tried(manifest)

    monkeypatch.setattr(trials.bench, "try_adapter", revoked_meanwhile)
    reports, problem = await run_gate(trials, monkeypatch, looks=3)
    assert not reports
    assert problem is not None
    assert len(trials.engines) == 1


async def test_what_was_reported_on_under_a_revoked_key_is_tried_again_under_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    before = await gated(trials, monkeypatch)
    _, problem = await run_gate(trials, monkeypatch, looks=3)
    assert problem is None
    topic, _, key = published(NEXT_KEY)
    trials.tell(topic, key)
    trials.tell(topic, REVOKED)
    # The first has a report by the next key already, from another gate.
    first, second = digests(trials.adapters)
    report = before[0].report
    again = AdapterGated(adapter=first, report=report, key_id="gate-2", signature=NEXT_KEY.sign(report))
    trials.tell(ADAPTERS.name, again)
    reports, problem = await run_gate(trials, monkeypatch, reports=1, key=NEXT_KEY)
    assert [(gated.adapter, gated.key_id) for gated in reports] == [(second, "gate-2")]
    assert await run_gate(trials, monkeypatch, looks=3, key=NEXT_KEY) == ([], None)


async def test_a_report_that_was_copied_or_forged_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = await make_trials(tmp_path, names=("adapter", "other"))
    first, second = digests(trials.adapters)
    before = {report.adapter: report for report in await gated(trials, monkeypatch)}
    trials.tell(ADAPTERS.name, before[second].model_copy(update={"adapter": first}))
    assert trials.registry.report_problem(first) == "it is about another adapter"
    failed = before[second].report.model_copy(update={"passed": False})
    trials.tell(ADAPTERS.name, before[second].model_copy(update={"report": failed}))
    assert [report.adapter for report in await gated(trials, monkeypatch)] == [first, second]
