"""Redis: one client, built so that no call is ever made twice or waits without a bound."""

import asyncio
from functools import cached_property
from typing import Any, Final, cast

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from infra.lane import Lane, Trips, server_left
from infra.settings import BadSettings, RedisSettings

CONNECTIONS_MAX = 32
# A ledger call takes well under a millisecond; what takes longer than this is answered by nobody.
SOCKET_TIMEOUT_S = 2.0
POOL_WAIT_S = 5.0
TLS: Final = "rediss://"
# `redis+cluster://host:port,host:port`: nodes to ask which of them is the primary of a key.
CLUSTER: Final = "redis+cluster://"
CLUSTER_TLS: Final = "rediss+cluster://"
_NO_ANSWER = (exceptions.ConnectionError, exceptions.TimeoutError)


class Client(Redis):
    """A client that gives every command a connection of its own, and has a lane for calls that share one."""

    @cached_property
    def lane(self) -> Lane | Trips:
        return Lane(self.connection_pool)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.lane.close()
        await super().aclose(close_connection_pool)


def connect(settings: RedisSettings) -> Client:
    """A client that has not connected yet. The caller closes it. Raises BadSettings.

    Client retries are off: a call that timed out may have happened, and only the ledger knows how to ask again.
    """
    secure = settings.url.startswith((TLS, CLUSTER_TLS))
    if settings.ca_file and not secure:
        raise BadSettings(f"a CA file is for {TLS} and {CLUSTER_TLS} alone: without TLS nobody would look at it")
    if settings.url.startswith((CLUSTER, CLUSTER_TLS)):
        # No Redis by type, but it takes every call that is made here.
        return cast("Client", _cluster(settings, secure))
    pool = BlockingConnectionPool.from_url(
        settings.url,
        username=settings.username,
        password=settings.password,
        max_connections=CONNECTIONS_MAX,
        timeout=POOL_WAIT_S,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
        **({"ssl_ca_certs": str(settings.ca_file)} if settings.ca_file else {}),
    )
    pool.connection_class = _opened_anew(pool.connection_class)
    return cast("Client", Client.from_pool(pool))


class _Connection(AbstractConnection):
    """One whose server has left is opened anew before a call: of what is sent to nobody, nobody knows what became.

    A pool asks for a connection to be made, which is none here if there is one; a node of a cluster asks whether one
    should be made again.
    """

    async def connect(self) -> None:
        if self.should_reconnect():
            await self.disconnect()
        await super().connect()  # type: ignore[no-untyped-call]

    def should_reconnect(self) -> bool:
        left = self.is_connected and server_left(self)
        return left or bool(super().should_reconnect())  # type: ignore[no-untyped-call]


class _PlainConnection(_Connection, Connection):
    pass


class _SecureConnection(_Connection, SSLConnection):
    pass


def _opened_anew(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """In place of what the library chose by the URL's scheme, so that nothing without TLS takes the place of TLS.

    A connection within the machine stays as it is: its pool looks whether the server has left.
    """
    kinds: dict[type[AbstractConnection], type[_Connection]] = {
        Connection: _PlainConnection,
        SSLConnection: _SecureConnection,
    }
    return kinds.get(kind, kind)


def _cluster(settings: RedisSettings, secure: bool) -> RedisCluster:
    addresses = settings.url.partition("://")[2].strip("/").split(",")
    hosts = [address.rpartition(":") for address in addresses]
    return _Cluster(
        startup_nodes=[ClusterNode(host, int(port)) for host, _, port in hosts],
        username=settings.username,
        password=settings.password,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        ssl=secure,
        ssl_ca_certs=str(settings.ca_file) if settings.ca_file else None,
    )


class _Cluster(RedisCluster):
    """Closes every node that it ever knew: the library forgets one that left the cluster with its connections open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Not an option of the library's; it makes further nodes with what is written here.
        kind = _opened_anew(self.connection_kwargs["connection_class"])
        self.connection_kwargs["connection_class"] = kind
        for node in self.nodes_manager.startup_nodes.values():
            node.connection_class = cast("type[Connection]", kind)
        self._known: dict[int, ClusterNode] = {}

    @cached_property
    def lane(self) -> Trips:
        return Trips(self)

    def remember(self) -> None:
        """Before every call, so that a node is known before the cluster may lose it."""
        nodes = self.nodes_manager
        self._known |= {id(node): node for node in (*nodes.nodes_cache.values(), *nodes.startup_nodes.values())}

    async def aclose(self) -> None:
        known = list(self._known.values())
        self._known.clear()
        await super().aclose()
        await asyncio.gather(*(node.disconnect() for node in known), return_exceptions=True)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        self.remember()
        try:
            return await super().execute_command(*args, **kwargs)
        except exceptions.ReadOnlyError:
            # A primary until a moment ago, of a command without a key: the next call asks who it is now.
            await self.aclose()
            raise
        except exceptions.RedisClusterException as error:
            # No error of Redis by type: none of its nodes answered.
            raise exceptions.RedisError(str(error)) from error

    def pipeline(self, transaction: Any | None = None, shard_hint: Any | None = None) -> "_Pipeline":  # noqa: ARG002
        return _Pipeline(self, transaction)  # type: ignore[abstract]


class _Pipeline(ClusterPipeline):
    """Calls of one trip. Where the primary does not answer, the next trip asks who is the primary now.

    The library does that only together with a retry. A call that was sent to another than the primary was refused by
    it, so that following the redirection makes no call twice.
    """

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        assert isinstance(self.cluster_client, _Cluster)
        self.cluster_client.remember()
        try:
            answers = await super().execute(raise_on_error, allow_redirections)
        except _NO_ANSWER:
            await self.cluster_client.aclose()
            raise
        except exceptions.RedisClusterException as error:
            await self.cluster_client.aclose()
            raise exceptions.RedisError(str(error)) from error
        if any(isinstance(answer, _NO_ANSWER) for answer in answers):
            await self.cluster_client.aclose()
        return answers
