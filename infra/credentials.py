"""Which stack a command talks to, and as whom."""

import os
from pathlib import Path

from infra.settings import PREFIX, BadSettings, KafkaSettings, NoStack, StackFile, home_directory, read


def use_home(home: Path) -> None:
    """Make every later `home_directory()` of this program, and of those it starts, this one."""
    os.environ[f"{PREFIX}HOME"] = str(home.absolute())


def kafka_as(user: str) -> KafkaSettings:
    """How a role or a tenant reaches Kafka: by SWITCHYARD_KAFKA_* where they are that user's, else by the stack here.

    Raises NoStack, BadSettings.
    """
    try:
        given = read(KafkaSettings)
    except BadSettings:
        given = None
    if given is not None and given.username == user:
        return given
    try:
        return StackFile.load(home_directory()).kafka(user)
    except NoStack as error:
        raise NoStack(
            f"no stack runs in {home_directory()}. Start one with: switchyard up. To use another Kafka, set "
            f"{PREFIX}KAFKA_BOOTSTRAP, {PREFIX}KAFKA_USERNAME (here {user}) and {PREFIX}KAFKA_PASSWORD"
        ) from error
