"""A single Redis with one user per role: configuration, users, and the process to start."""

from hashlib import sha256
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from infra.files import write_private
from infra.launch.plan import REPOSITORY, PortOpens, ProcessSpec

# What each user may call is told by the ledger, beside its functions: a function's own commands are checked against
# its caller's rights. Read as a file, because this room knows no ledger.
RIGHTS: Final = REPOSITORY / "ledger/functions/acl.json"
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


class Rights(BaseModel):
    """The rights of Redis's users: the keys of all, the commands of each, and what all need to find a key's primary."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    keys: tuple[str, ...]
    users: dict[str, tuple[str, ...]]
    cluster: tuple[str, ...]


def rights() -> Rights:
    return Rights.model_validate_json(RIGHTS.read_bytes())


def redis_users() -> tuple[str, ...]:
    """Who may log in: the administrator and every role that calls the ledger."""
    return ("admin", *rights().users)


def redis_spec(folder: Path, port: int, passwords: dict[str, str], cluster: bool = False) -> ProcessSpec:
    """Write Redis's configuration and users, and say how to run it. `passwords` holds one for each of `redis_users`.

    A node of a cluster lets every user ask which node has a key.
    """
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    granted = rights()
    more = granted.cluster if cluster else ()
    keys = " ".join(granted.keys)
    users = [
        # Nobody can log in as it; but Redis reads its own append-only file back as this user.
        "user default off resetpass ~* &* +@all",
        f"user admin on #{_hash(passwords['admin'])} ~* &* +@all",
        *(
            f"user {role} on #{_hash(passwords[role])} {keys} {' '.join([*commands, *more])}"
            for role, commands in granted.users.items()
        ),
    ]
    write_private(folder / "users.acl", "".join(f"{user}\n" for user in users).encode())
    text = CONFIGURATION.format(port=port, data=data, users=folder / "users.acl")
    write_private(folder / "redis.conf", text.encode())
    return ProcessSpec(
        name="redis", argv=("redis-server", str(folder / "redis.conf")), folder=folder, ready=PortOpens(port)
    )


def _hash(password: str) -> str:
    return sha256(password.encode()).hexdigest()
