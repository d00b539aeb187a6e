"""A single Redis with one user per role: configuration, users, and the process to start."""

from hashlib import sha256
from pathlib import Path
from typing import Final

from infra.files import write_private
from infra.launch.plan import PortOpens, ProcessSpec

# All ledger keys carry one hash tag (ledger/keys.py), so that one function call may touch any of them.
LEDGER_KEYS: Final = "{switchyard}:*"
# A function's commands are checked against its caller's rights, so that a caller has exactly what the functions call.
# Emptying the books (SCAN, UNLINK) and loading functions are the administrator's.
LEDGER_COMMANDS: Final = (
    "get", "hdel", "hget", "hgetall", "hincrby", "hmget", "hset", "info", "pexpire", "pexpireat", "set", "time",
    "zadd", "zcard", "zrange", "zrem",
)  # fmt: skip
CALLS: Final = ("fcall", "fcall_ro", "ping", "hello")
LEDGER_ROLES: Final = ("router", "worker", "settler")
CONFIGURATION: Final = """\
bind 127.0.0.1
port {port}
dir {data}
aclfile {users}
appendonly yes
appendfsync everysec
save ""
daemonize no
maxmemory-policy noeviction
"""


def redis_spec(folder: Path, port: int, passwords: dict[str, str]) -> ProcessSpec:
    """Write Redis's configuration and users, and say how to run it. `passwords` holds `admin`'s and each role's."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    allowed = " ".join(f"+{command}" for command in (*CALLS, *LEDGER_COMMANDS))
    users = [
        "user default off",
        f"user admin on #{_hash(passwords['admin'])} ~* &* +@all",
        *(f"user {role} on #{_hash(passwords[role])} ~{LEDGER_KEYS} {allowed}" for role in LEDGER_ROLES),
    ]
    write_private(folder / "users.acl", "".join(f"{user}\n" for user in users).encode())
    text = CONFIGURATION.format(port=port, data=data, users=folder / "users.acl")
    write_private(folder / "redis.conf", text.encode())
    return ProcessSpec(
        name="redis", argv=("redis-server", str(folder / "redis.conf")), folder=folder, ready=PortOpens(port)
    )


def _hash(password: str) -> str:
    return sha256(password.encode()).hexdigest()
