"""Topics, users and ACLs, made from the catalogue. Every step may be repeated.

confluent-kafka's admin client, because aiokafka's has neither users nor ACLs.
"""

import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from infra.settings import KafkaSettings, StackFile
from schemas.errors import InvalidName, SwitchyardError
from schemas.ids import parse_tenant
from schemas.topics import EVERY_SERVICE, PER_POOL, PER_TENANT, SINGLE, TOPICS, Role, Topic, requests_group

CALL_SECONDS_MAX: Final = 20.0
# A broker obeys a new user or ACL once it has read it back from its own metadata log: some milliseconds.
VISIBLE_SECONDS_MAX: Final = 10.0
MECHANISM: Final = ScramMechanism.SCRAM_SHA_512
SCRAM_ITERATIONS: Final = 4096
LOGIN_SECONDS_MAX: Final = 2.0
PASSWORD_BYTES: Final = 24
# Only what is critical: a connection closed or refused shows as the failed call that it matters to.
LIBRDKAFKA_LOG_LEVEL: Final = 2
# A tenant of such a name would be this user, or own the consumer groups of it.
RESERVED_NAMES: Final = frozenset({*(role.value for role in Role), "admin", "broker", "controller"})


class ProvisioningFailed(SwitchyardError):
    """Kafka did not make what was asked of it."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """One thing that one user may do to one resource, or to all whose names begin with `name`."""

    user: str
    resource: ResourceType
    name: str
    operation: AclOperation
    prefixed: bool = False

    def binding(self) -> AclBinding:
        pattern = ResourcePatternType.PREFIXED if self.prefixed else ResourcePatternType.LITERAL
        return AclBinding(
            self.resource, self.name, pattern, f"User:{self.user}", "*", self.operation, AclPermissionType.ALLOW
        )


def grants_of_role(role: Role) -> frozenset[Grant]:
    """What one service may do, by the catalogue. Reading and writing imply describing."""
    granted = {
        Grant(user=role.value, resource=ResourceType.TOPIC, name=topic.prefix or topic.name, operation=operation,
              prefixed=topic.prefix is not None)
        for topic in TOPICS
        for operation, roles in ((AclOperation.WRITE, topic.writers), (AclOperation.READ, topic.readers))
        if role in roles
    }  # fmt: skip
    granted.add(
        Grant(user=role.value, resource=ResourceType.GROUP, name=role.value, operation=AclOperation.READ, prefixed=True)
    )
    if role in {Role.ROUTER, Role.OPERATOR}:
        # Who is there: a worker counts as ready while it is in its pool's group, and `pool list` says so.
        granted.add(
            Grant(user=role.value, resource=ResourceType.GROUP, name=requests_group(""),
                  operation=AclOperation.DESCRIBE, prefixed=True)
        )  # fmt: skip
    if role in {Role.ROUTER, Role.WORKER}:
        granted |= {
            Grant(
                user=role.value,
                resource=ResourceType.TRANSACTIONAL_ID,
                name=f"{role}.",
                operation=operation,
                prefixed=True,
            )
            for operation in (AclOperation.WRITE, AclOperation.DESCRIBE)
        }
    return frozenset(granted)


def grants_of_tenant(tenant: str) -> frozenset[Grant]:
    """Exactly its own topics, by their whole names: a prefix could match another tenant's."""
    granted = {
        Grant(user=tenant, resource=ResourceType.TOPIC, name=topic.of(tenant), operation=operation)
        for topic in PER_TENANT
        for operation, roles in ((AclOperation.WRITE, topic.writers), (AclOperation.READ, topic.readers))
        if Role.TENANT in roles
    }
    # A tenant's name holds no dot, so no other tenant's begins with this one and a dot.
    group = Grant(
        user=tenant, resource=ResourceType.GROUP, name=f"{tenant}.", operation=AclOperation.READ, prefixed=True
    )
    return frozenset(granted | {group})


def parse_new_tenant(name: str) -> str:
    """A tenant name that is no service's. Raises InvalidName."""
    if parse_tenant(name) in RESERVED_NAMES:
        raise InvalidName(f"{name!r} is the name of a part of Switchyard; take another for a tenant")
    return name


class Provisioner:
    """Makes topics, users and ACLs as the administrator. Calls block: use it from set-up code and commands."""

    def __init__(self, admin: KafkaSettings, replicas: int = 1) -> None:
        self._admin = admin
        self._client = _client_of(admin)
        self._replicas = replicas

    def add_services(self, passwords: dict[str, str]) -> None:
        """The single topics, and a user with its ACLs per service role. `passwords` holds one per role."""
        self._make_topics({topic.name: topic for topic in SINGLE})
        self._make_users({role.value: passwords[role.value] for role in EVERY_SERVICE})
        self._make_grants(grant for role in EVERY_SERVICE for grant in grants_of_role(role))

    def add_pool(self, pool: str, partitions: int | None = None) -> None:
        """A pool's topics; `partitions` replaces the catalogue's number for its requests."""
        self._make_topics({topic.of(pool): topic for topic in PER_POOL}, partitions)

    def add_tenant(self, tenant: str, password: str | None = None) -> str:
        """A tenant's topics, user and ACLs. Returns the password, a new one unless it was given."""
        password = password or new_password()
        self._make_topics({topic.of(parse_new_tenant(tenant)): topic for topic in PER_TENANT})
        self._make_users({tenant: password})
        self._make_grants(grants_of_tenant(tenant))
        return password

    def remove_tenant(self, tenant: str) -> None:
        """Take a tenant's user and ACLs away. What it has connected loses its rights; it cannot connect again."""
        user = parse_new_tenant(tenant)
        if self._users_exist([user]):
            _settle(self._client.alter_user_scram_credentials([UserScramCredentialDeletion(user, MECHANISM)]))
        _settle(self._client.delete_acls([_acls_of(f"User:{user}")]))
        _until(lambda: not self._users_exist([user]) and not self._acls(f"User:{user}"))

    def rotate_tenant(self, tenant: str, password: str) -> None:
        """Replace a tenant's password. Returns when the new one opens a connection, so the old one opens none."""
        user = parse_new_tenant(tenant)
        self._make_users({user: password})
        _until(lambda: _logs_in(self._admin.model_copy(update={"username": user, "password": password})))

    def _make_topics(self, wanted: dict[str, Topic], partitions: int | None = None) -> None:
        known = self._client.list_topics(timeout=CALL_SECONDS_MAX).topics
        counts = {
            name: partitions if partitions is not None and topic.partitions > 1 else topic.partitions
            for name, topic in wanted.items()
        }
        missing = [
            NewTopic(name, counts[name], self._replicas, config=topic.config())
            for name, topic in wanted.items()
            if name not in known
        ]
        growing = [
            NewPartitions(name, counts[name])
            for name in wanted
            if name in known and len(known[name].partitions) < counts[name] and name != "audit"
        ]
        if missing:
            _settle(self._client.create_topics(missing))
        if growing:
            _settle(self._client.create_partitions(growing))
        present = {name: topic for name, topic in wanted.items() if name in known}
        if present:
            _settle(self._client.incremental_alter_configs([_config(*item) for item in present.items()]))

    def _make_users(self, passwords: dict[str, str]) -> None:
        scram = ScramCredentialInfo(MECHANISM, SCRAM_ITERATIONS)
        changes = [UserScramCredentialUpsertion(user, scram, password.encode()) for user, password in passwords.items()]
        _settle(self._client.alter_user_scram_credentials(changes))
        _until(lambda: self._users_exist(list(passwords)))

    def _users_exist(self, users: list[str]) -> bool:
        futures = self._client.describe_user_scram_credentials(users)
        return all(future.exception(CALL_SECONDS_MAX) is None for future in futures.values())

    def _make_grants(self, grants: Iterable[Grant]) -> None:
        bindings = [grant.binding() for grant in grants]
        _settle(self._client.create_acls(bindings))
        _until(lambda: set(bindings) <= set(self._acls()))

    def _acls(self, principal: str | None = None) -> list[AclBinding]:
        return list(self._client.describe_acls(_acls_of(principal)).result(CALL_SECONDS_MAX))


def add_tenant_to(stack: StackFile, tenant: str) -> StackFile:
    """A tenant on a running stack; its password is kept in the stack's file. May be repeated."""
    password = Provisioner(stack.kafka("admin")).add_tenant(tenant, stack.kafka_users.get(parse_new_tenant(tenant)))
    return StackFile.change(stack.home, lambda file: file.with_user(tenant, password))


def remove_tenant_from(stack: StackFile, tenant: str) -> StackFile:
    """No user, no rights and no kept password any more, so that adding it again makes a new one. May be repeated."""
    Provisioner(stack.kafka("admin")).remove_tenant(tenant)
    return StackFile.change(stack.home, lambda file: file.without_user(tenant))


def rotate_tenant_on(stack: StackFile, tenant: str) -> StackFile:
    """A new password for a tenant's user. Kept first: a crash leaves one to give Kafka again, and none that is lost."""
    password = new_password()
    changed = StackFile.change(stack.home, lambda file: file.with_user(parse_new_tenant(tenant), password))
    Provisioner(stack.kafka("admin")).rotate_tenant(tenant, password)
    return changed


def new_password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


def _client_of(user: KafkaSettings) -> AdminClient:
    return AdminClient({**user.librdkafka(), "log_level": LIBRDKAFKA_LOG_LEVEL})


def _logs_in(user: KafkaSettings) -> bool:
    try:
        _client_of(user).list_topics(timeout=LOGIN_SECONDS_MAX)
    except KafkaException:
        return False
    return True


def _acls_of(principal: str | None) -> AclBindingFilter:
    """Every ACL of one user, or of all."""
    return AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, principal, None, AclOperation.ANY, AclPermissionType.ANY
    )


def _config(name: str, topic: Topic) -> ConfigResource:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in topic.config().items()
    ]
    return ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=entries)


def _settle(futures: dict[Any, Future[Any]]) -> None:
    """Wait for every answer. `Any` because each call has keys of its own kind. Raises ProvisioningFailed."""
    for asked, future in futures.items():
        try:
            future.result(CALL_SECONDS_MAX)
        except KafkaException as error:
            raise ProvisioningFailed(f"Kafka refused {asked}: {error.args[0].str()}") from error


def _until(true: Callable[[], bool]) -> None:
    deadline = monotonic() + VISIBLE_SECONDS_MAX
    while not true():
        if monotonic() > deadline:
            raise ProvisioningFailed("a change of a user or ACL did not take effect")
        sleep(0.02)
