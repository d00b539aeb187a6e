"""`python -m schemas.export [--check]`: write each record's JSON Schema to schemas/json, or compare."""

import json
import sys
from pathlib import Path

from schemas.record import Record
from schemas.topics import TOPICS

DIRECTORY = Path(__file__).parent / "json"


def all_records() -> dict[str, type[Record]]:
    return {kind.type_name(): kind for topic in TOPICS for kind in topic.records}


def rendered() -> dict[str, str]:
    """File name to text, for every record of the catalogue."""
    return {
        f"{name}.v{kind.model_fields['version'].default}.json": json.dumps(
            kind.model_json_schema(mode="validation"), indent=2, sort_keys=True, ensure_ascii=False
        )
        + "\n"
        for name, kind in sorted(all_records().items())
    }


def stale(directory: Path = DIRECTORY) -> list[str]:
    """Names of files that are missing, differ, or belong to no record."""
    wanted = rendered()
    found = {path.name: path.read_text() for path in directory.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        names = stale()
        if names:
            print("stale schemas, run `python -m schemas.export`: " + ", ".join(names))
        return 1 if names else 0
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.json"):
        path.unlink()
    for name, text in rendered().items():
        (DIRECTORY / name).write_text(text)
    print(f"{len(rendered())} schemas written to {DIRECTORY}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
