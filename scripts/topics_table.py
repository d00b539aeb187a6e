"""`python -m scripts.topics_table [--check]`: write docs/topics.md, the topic catalogue as a table, or compare it."""

import sys
from collections.abc import Iterable
from pathlib import Path

from schemas.topics import DAY_MS, FOR_EVER, HOUR_MS, TOPICS, YEAR_MS, Role, Topic

TARGET = Path(__file__).parents[1] / "docs" / "topics.md"
HEAD = """\
# Topics

Made from `schemas/topics.py` by `python -m scripts.topics_table`. The broker's settings and everyone's rights are made
from the same catalogue; `asyncapi.yaml` beside this page has every record and header.

| topic | about | key | records | written by | read by | partitions | kept |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def rendered() -> str:
    return HEAD + "".join(f"| {' | '.join(_cells(topic))} |\n" for topic in TOPICS)


def _cells(topic: Topic) -> tuple[str, ...]:
    records = ", ".join(kind.type_name() for kind in topic.records) or "the refused bytes"
    name = f"`{topic.name}`"
    return (
        name,
        topic.about,
        topic.key,
        records,
        _roles(topic.writers),
        _roles(topic.readers),
        str(topic.partitions),
        _kept(topic.retention_ms),
    )


def _roles(roles: Iterable[Role]) -> str:
    named = set(roles)
    services = set(Role) - {Role.TENANT}
    return "every service" if named == services else ", ".join(sorted(role.value for role in named))


def _kept(milliseconds: int) -> str:
    if milliseconds == FOR_EVER:
        return "for ever"
    for unit, name in ((YEAR_MS, "year"), (DAY_MS, "day"), (HOUR_MS, "hour")):
        count, rest = divmod(milliseconds, unit)
        if count and not rest:
            return f"{count} {name}{'s' if count > 1 else ''}"
    return f"{milliseconds} ms"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        fresh = TARGET.exists() and TARGET.read_text() == rendered()
        print("fresh" if fresh else f"{TARGET} is stale, run `python -m scripts.topics_table`")
        return 0 if fresh else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(rendered())
    print(f"written: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
