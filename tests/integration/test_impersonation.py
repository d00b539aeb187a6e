"""`switchyard tenant impersonate` where Kafka does not let the operator write the audit: nothing to act with."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
from confluent_kafka.admin import AclBinding, AclBindingFilter, AclOperation, AdminClient, ResourceType

from infra.kafka.tail import end_offsets, read_range
from infra.launch.stack import Stack
from infra.provision import Grant
from schemas.audit import AUDIT_RECORDS, ImpersonationGranted
from schemas.record import decode_one_of
from schemas.topics import AUDIT, Role
from tests.integration.test_release_cli import Shell

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 15.0
RIGHT = Grant(user=Role.OPERATOR, resource=ResourceType.TOPIC, name=AUDIT.name, operation=AclOperation.WRITE).binding()


def exactly(binding: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype, binding.name, binding.resource_pattern_type, binding.principal, binding.host,
        binding.operation, binding.permission_type,
    )  # fmt: skip


@contextmanager
def without(stack: Stack, right: AclBinding) -> Iterator[None]:
    """A stack on which nobody has this right."""
    admin = AdminClient(stack.kafka("admin").librdkafka())

    def until(there: bool) -> None:
        deadline = monotonic() + WAIT_S
        while bool(admin.describe_acls(exactly(right)).result(WAIT_S)) is not there:
            assert monotonic() < deadline
            sleep(0.01)

    until(there=True)
    (gone,) = admin.delete_acls([exactly(right)]).values()
    assert gone.result(WAIT_S) == [right]
    try:
        until(there=False)
        yield
    finally:
        (again,) = admin.create_acls([right]).values()
        again.result(WAIT_S)
        until(there=True)


def issued(stack: Stack, tenant: str) -> list[ImpersonationGranted]:
    async def read() -> list[ImpersonationGranted]:
        settings, found = stack.kafka(Role.AUDITOR), []
        for partition in await end_offsets(settings, AUDIT.name):
            async for where in read_range(settings, AUDIT.name, partition):
                record = decode_one_of(AUDIT_RECORDS, where.value)
                if isinstance(record, ImpersonationGranted) and record.impersonation.tenant == tenant:
                    found.append(record)
        return found

    return asyncio.run(read())


def test_a_grant_that_the_audit_cannot_be_told_of_is_written_nowhere(
    stack: Stack, tenant: Callable[[], str], tmp_path: Path
) -> None:
    shell, name, path = Shell(stack.file.home), tenant(), tmp_path / "grant.json"
    shell.said("tenant", "add", name)
    asked = ("tenant", "impersonate", name, "--reason", "ticket 7")
    with without(stack, RIGHT):
        for out in ((), ("--out", path)):
            refused = shell.run(*asked, *out)
            assert (refused.exit_code, refused.stdout) == (1, "")
            assert refused.stderr.startswith("Error: no grant was made: the audit did not take its record: ")
            assert "TopicAuthorizationFailed" in refused.stderr
    assert not path.exists()
    assert issued(stack, name) == []

    shell.said(*asked, "--out", path)
    (record,) = issued(stack, name)
    assert record.impersonation.grant_id in path.read_text()
