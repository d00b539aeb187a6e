"""Redis: one client, built so that no call is ever made twice or waits without a bound."""

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from infra.settings import RedisSettings

CONNECTIONS_MAX = 32
# A ledger call takes well under a millisecond; what takes longer than this is answered by nobody.
SOCKET_TIMEOUT_S = 2.0
POOL_WAIT_S = 5.0


def connect(settings: RedisSettings) -> Redis:
    """A client that has not connected yet. The caller closes it.

    Client retries are off: a call that timed out may have happened, and only the ledger knows how to ask again.
    """
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
    )
    return Redis.from_pool(pool)
