"""Release on a real Kafka: every step, and every step again."""

import json
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from infra.artifacts import fetch_artifact
from infra.launch.stack import Stack
from producers.release import platform, publish
from producers.release.desk import Unknown
from producers.release.intake import Refused
from producers.release.platform import PoolShape
from producers.release.publish import NotApproved, NotDrained
from schemas.adapters import AdapterDrained
from schemas.keys import KeyRole
from schemas.signing import SigningKey
from schemas.tenants import TenantConfigured, TenantState
from schemas.topics import ADAPTERS, ALIASES, POOLS
from tests.release_files import filled, good_tensors, tensor_name, write_tensors
from tests.release_house import House, announce, house_on
from tests.world import key_of

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

_names = count(1)


@pytest.fixture
async def house(stack: Stack, tmp_path: Path) -> AsyncIterator[House]:
    async with house_on(stack, tmp_path) as made:
        yield made


async def test_a_base_is_added_once_with_a_zero_adapter_that_may_be_served(house: House) -> None:
    desk, base = house.desk, house.base
    before = dict(desk.registry.positions)
    again = await platform.add_base(desk, house.folder / "base", base.manifest.name, rank=2)
    assert again == base
    assert desk.registry.positions == before
    assert desk.registry.admission_problem(base.zero_adapter) is None
    zero = desk.adapter(base.zero_adapter).manifest
    assert zero is not None
    place = await fetch_artifact(desk.objects, zero, house.folder / "cache")
    assert place.name == base.zero_adapter.removeprefix("sha256:")


async def test_an_adapter_goes_from_a_directory_to_an_alias(house: House) -> None:
    manifest = await publish.submit(house.desk, house.submission())
    assert house.desk.adapter(manifest.digest).state == "submitted"
    assert json.loads(await house.desk.objects.get(manifest.digest)) == manifest.model_dump(mode="json")
    await house.report(manifest.digest)
    await publish.approve(house.desk, manifest.digest)
    assert house.desk.registry.admission_problem(manifest.digest) is None
    assert house.desk.registry.aliases[house.tenant, "support"].stable == manifest.digest


async def test_every_step_may_be_repeated_and_appends_nothing_more(house: House) -> None:
    submission = house.submission()
    digest = (await publish.submit(house.desk, submission)).digest
    await house.report(digest)
    await publish.approve(house.desk, digest)
    before = {topic: house.desk.registry.positions[topic] for topic in (ADAPTERS.name, ALIASES.name)}
    assert (await publish.submit(house.desk, submission)).digest == digest
    await publish.approve(house.desk, digest)
    assert {topic: house.desk.registry.positions[topic] for topic in before} == before


async def test_two_tenants_with_the_same_files_have_two_digests(house: House) -> None:
    submission = house.submission()
    other = f"other-{next(_names)}"
    await platform.add_tenant(house.desk, house.stack.file, TenantConfigured(tenant=other, configured_by="tests"))
    first = await publish.submit(house.desk, submission)
    second = await publish.submit(house.desk, replace(submission, tenant=other))
    assert first.files == second.files
    assert first.digest != second.digest


async def test_the_alias_moves_with_a_higher_version(house: House) -> None:
    for version, value in enumerate((0.25, 0.5), start=1):
        digest = await house.approved(value)
        pointed = house.desk.registry.aliases[house.tenant, "support"]
        assert (pointed.stable, pointed.alias_version) == (digest, version)


async def test_a_refused_adapter_leaves_no_record_and_names_every_problem(house: House) -> None:
    submission = house.submission()
    nan = tensor_name("self_attn.q_proj", "A")
    write_tensors(submission.directory, {**good_tensors(), nan: filled((2, 8), float("nan"))})
    before = house.desk.registry.positions[ADAPTERS.name]
    with pytest.raises(Refused, match=f"- tensor {nan}: it holds NaN"):
        await publish.submit(house.desk, submission)
    assert house.desk.registry.positions[ADAPTERS.name] == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": "sha256:" + "0" * 64}, "the registry has no base"),
        ({"base": "../base"}, "the registry has no base"),
        ({"tenant": "nobody"}, "there is no tenant 'nobody'"),
        ({"tenant": "No Body"}, "a tenant is 1 to 40"),
        ({"alias": "../x"}, "an alias is a letter or digit"),
        ({"directory": Path("/nowhere")}, "/nowhere cannot be read as a directory"),
        ({"evaluation_report": Path("/nowhere")}, "nowhere is missing, a link or no regular file"),
    ],
)
async def test_a_submission_with_a_wrong_name_is_refused(house: House, changes: dict[str, object], said: str) -> None:
    with pytest.raises(Exception, match=said):
        await publish.submit(house.desk, replace(house.submission(), **changes))  # type: ignore[arg-type]


async def test_nothing_is_approved_without_a_passed_and_signed_report(house: House) -> None:
    digest = (await publish.submit(house.desk, house.submission())).digest
    with pytest.raises(NotApproved, match="has not reported"):
        await publish.approve(house.desk, digest)
    await house.report(digest, key=SigningKey.generate("gate-1", KeyRole.GATE))
    with pytest.raises(NotApproved, match="not believed: the signature does not match"):
        await publish.approve(house.desk, digest)
    await house.report(digest, key=key_of(house.stack, KeyRole.ROUTE))
    with pytest.raises(NotApproved, match="not believed"):
        await publish.approve(house.desk, digest)
    await house.report(digest, passed=False)
    with pytest.raises(NotApproved, match="- no effect"):
        await publish.approve(house.desk, digest)
    assert not house.desk.adapter(digest).serves


async def test_only_a_whole_digest_names_an_adapter(house: House) -> None:
    digest = await house.approved()
    for name in (digest[:20], digest.removeprefix("sha256:"), digest.upper(), "support", f"{digest}\n"):
        with pytest.raises(Exception, match="a digest is 'sha256:' and 64 hex digits"):
            await publish.approve(house.desk, name)
    with pytest.raises(Unknown):
        await publish.revoke(house.desk, "sha256:" + "0" * 64, "tests")


async def test_a_revocation_waits_for_the_receipt_of_every_worker_of_the_base(house: House) -> None:
    digest = await house.approved()
    await announce(house, "silent", partitions=(0,))
    with pytest.raises(NotDrained, match="no receipt yet from silent"):
        await publish.revoke(house.desk, digest, "tests", wait_seconds=0.2)
    assert house.desk.adapter(digest).state == "revoked"
    receipt = AdapterDrained(adapter=digest, worker="silent", engine="fake", was_resident=True, aborted_jobs=0)
    await house.desk.append(ADAPTERS.name, digest, receipt)
    assert await publish.revoke(house.desk, digest, "tests", wait_seconds=5) == ("silent",)


async def test_a_silent_worker_is_not_waited_for_once_others_own_its_partitions(house: House) -> None:
    digest = await house.approved()
    await announce(house, "dead", partitions=(0,))
    await announce(house, "heir", partitions=(0,))
    receipt = AdapterDrained(adapter=digest, worker="heir", engine="fake", was_resident=False, aborted_jobs=0)
    await house.desk.append(ADAPTERS.name, digest, receipt)
    assert await publish.revoke(house.desk, digest, "tests", wait_seconds=5) == ("heir",)


async def test_a_bases_zero_adapter_cannot_be_revoked(house: House) -> None:
    """Without it no worker of the base would start again."""
    zero = next(iter(house.desk.registry.bases.values())).zero_adapter
    with pytest.raises(publish.NotRevocable):
        await publish.revoke(house.desk, zero, "tests")
    assert house.desk.adapter(zero).revoked is None


async def test_a_revoked_adapter_stays_revoked(house: House) -> None:
    digest = await house.approved()
    await publish.revoke(house.desk, digest, "it lies")
    for step in (publish.approve(house.desk, digest), publish.submit(house.desk, house.submission())):
        with pytest.raises(NotApproved, match="was revoked, which is for ever: it lies"):
            await step


async def test_a_removed_tenant_loses_its_adapters(house: House) -> None:
    digest = await house.approved()
    assert await platform.remove_tenant(house.desk, house.stack.file, house.tenant) == (digest,)
    assert house.desk.registry.tenants[house.tenant].state is TenantState.REMOVED
    assert house.desk.adapter(digest).state == "revoked"
    with pytest.raises(Unknown, match="there is no tenant"):
        await publish.submit(house.desk, house.submission())


async def test_an_adapter_beyond_what_its_tenant_may_have_is_refused_by_limit(house: House) -> None:
    tenant = house.desk.tenant(house.tenant)
    small = tenant.model_copy(update={"adapter_bytes_max": 10, "adapter_rank_max": 1})
    await platform.add_tenant(house.desk, house.stack.file, small)
    with pytest.raises(Refused, match=r"bytes: \d+; an adapter of this tenant may have 10\n- rank: \d+;"):
        await publish.submit(house.desk, house.submission())


async def test_a_pool_is_held_to_its_base_and_never_shrinks(house: House) -> None:
    admin = house.stack.kafka("admin")
    for rank_max, context_max, partitions, said in (
        (4, 129, 1, "takes 128 tokens"),
        (1, 128, 1, "zero adapter of rank 2"),
        (4, 128, 2, None),
        (4, 128, 1, "Kafka never takes one away"),
    ):
        shape = PoolShape(rank_max=rank_max, context_max=context_max, partitions=partitions)
        call = platform.set_pool(house.desk, admin, house.tenant, house.base.base, shape)
        if said is None:
            assert (await call).partitions == partitions
            continue
        with pytest.raises(platform.BadPool, match=said):
            await call
    assert house.desk.registry.positions[POOLS.name] >= 2


async def test_keys_that_are_there_are_kept_and_one_that_is_not_believed_is_named(house: House) -> None:
    assert set((await platform.init_keys(house.desk)).values()) == {False}
    for role in KeyRole:
        assert stat.S_IMODE(house.desk.keys.path(role).stat().st_mode) == 0o600
    newest = house.desk.keys.key_id(KeyRole.GATE)
    house.desk.registry.published.pop(newest)
    with pytest.raises(platform.KeyNotBelieved, match=rf"{newest}\.pem is there"):
        await platform.init_keys(house.desk)
