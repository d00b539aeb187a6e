"""A grant to act in a tenant's name: the audit knows of it before anybody has it, or there is none."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from infra.clock import SystemClock
from infra.kafka.clients import KafkaError, KafkaTimeout
from infra.kafka.publisher import Publisher, partition_for
from infra.kafka.records import Outgoing
from infra.kafka.tail import Tail
from infra.keys import keep_key
from infra.objects import open_objects
from infra.settings import KafkaSettings, KeySettings, ObjectSettings
from producers.release.desk import Desk, Unknown
from producers.release.impersonate import NotAudited, impersonate
from producers.release.platform import KeyNotBelieved
from schemas.audit import AUDIT_RECORDS, AuditRecord, ImpersonationGranted, WriterClosed
from schemas.errors import InvalidRecord
from schemas.keys import KeyRevoked, KeyRole
from schemas.record import Coordinates, decode_one_of
from schemas.topics import AUDIT, KEYS
from tests.factories import KEYS_OF_ROLE, Entry, make_registry, make_world

KAFKA = KafkaSettings(bootstrap="nowhere:1", username="operator", password="secret")
NOW_MS = 1_000_000
KEY = KEYS_OF_ROLE[KeyRole.ADMIN]


class Paper(Publisher):
    """Keeps what it is given, or refuses it once so many records are there."""

    def __init__(self, refusal: Exception | None = None, takes: int = 0) -> None:
        super().__init__(KAFKA, "operator-test", SystemClock())
        self.given: list[Outgoing] = []
        self._refusal = refusal
        self._takes = takes

    async def partitions_of(self, topic: str) -> int:
        assert topic == AUDIT.name
        return AUDIT.partitions

    async def enqueue(self, record: Outgoing) -> "asyncio.Future[object]":
        if self._refusal is not None and len(self.given) >= self._takes:
            raise self._refusal
        self.given.append(record)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_result(Coordinates(topic=record.topic, partition=record.partition or 0, offset=len(self.given)))
        return future

    def told(self) -> list[AuditRecord]:
        return [decode_one_of(AUDIT_RECORDS, outgoing.value) for outgoing in self.given]


def desk_of(folder: Path, paper: Paper, *more: Entry) -> Desk:
    """A desk with the admin's key at which only the operator's paper lies."""
    keys = KeySettings(directory=folder / "keys")
    keep_key(keys, KEY)
    return Desk(
        registry=make_registry([*make_world(), *more]),
        view=cast("Tail", None),
        release=cast("Publisher", None),
        operator=paper,
        objects=open_objects(ObjectSettings(directory=folder)),
        keys=keys,
        actor="eve",
    )


async def test_the_audit_is_told_who_may_act_for_whom_why_and_until_when_and_nothing_to_use_it_with(
    tmp_path: Path,
) -> None:
    paper = Paper()
    grant = await impersonate(desk_of(tmp_path, paper), "acme", " ticket 7 ", NOW_MS, 60_000)

    granted, closed = paper.told()
    assert isinstance(granted, ImpersonationGranted)
    assert granted.impersonation == grant.impersonation
    assert granted.impersonation.model_dump(exclude={"grant_id"}) == {
        "tenant": "acme", "admin": "eve", "reason": "ticket 7", "granted_at_ms": NOW_MS,
        "expires_at_ms": NOW_MS + 60_000, "key_id": KEY.key_id,
    }  # fmt: skip
    first = paper.given[0]
    assert (first.topic, first.key, first.partition) == ("audit", b"tenant/acme", partition_for("tenant/acme", 8))
    assert grant.signature
    parts = [grant.signature, *grant.signature.split(".")]
    said = b"".join(outgoing.value or b"" for outgoing in paper.given)
    assert not [part for part in parts if part and part.encode() in said]
    # A life of its own that says that nothing follows, so that a replay finds no writer left open.
    assert isinstance(closed, WriterClosed)
    assert (granted.writer_seq, closed.writer_seq, granted.writer) == (0, 1, closed.writer)
    assert paper.given[1].partition == first.partition


async def test_every_grant_has_an_id_of_its_own(tmp_path: Path) -> None:
    paper = Paper()
    desk = desk_of(tmp_path, paper)
    grants = [await impersonate(desk, "acme", "ticket 7", NOW_MS, 60_000) for _ in range(2)]
    ids = [record.impersonation.grant_id for record in paper.told() if isinstance(record, ImpersonationGranted)]
    assert ids == [grant.impersonation.grant_id for grant in grants]
    assert len(set(ids)) == 2
    assert len({record.writer for record in paper.told()}) == 2


@pytest.mark.parametrize("takes", [0, 1])
@pytest.mark.parametrize("refusal", [KafkaTimeout("Kafka did not answer"), KafkaError("not allowed")])
async def test_without_its_record_in_the_audit_there_is_no_grant(
    tmp_path: Path, refusal: Exception, takes: int
) -> None:
    with pytest.raises(NotAudited, match=f"^no grant was made: the audit did not take its record: .*{refusal}"):
        await impersonate(desk_of(tmp_path, Paper(refusal, takes)), "acme", "ticket 7", NOW_MS, 60_000)


async def test_what_is_refused_is_not_told_as_granted(tmp_path: Path) -> None:
    paper = Paper()
    desk = desk_of(tmp_path, paper)
    with pytest.raises(Unknown):
        await impersonate(desk, "nobody", "ticket 7", NOW_MS, 60_000)
    with pytest.raises(InvalidRecord, match="reason"):
        await impersonate(desk, "acme", "  ", NOW_MS, 60_000)
    revoked = (KEYS.name, KEY.key_id, KeyRevoked(key_id=KEY.key_id, reason="lost"))
    with pytest.raises(KeyNotBelieved):
        await impersonate(desk_of(tmp_path, paper, revoked), "acme", "ticket 7", NOW_MS, 60_000)
    assert not paper.given
