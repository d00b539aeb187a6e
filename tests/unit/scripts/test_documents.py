"""The committed documents are what the code says, and the AsyncAPI document leaves nothing out."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from infra.kafka.records import ECHOED
from schemas import topics
from schemas.topics import TOPICS, Role
from scripts import asyncapi, topics_table


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(asyncapi.rendered())
    return found


def references(value: Any) -> Iterator[str]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for child in children:
        yield from references(child)


def resolved(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_the_committed_documents_are_fresh() -> None:
    assert asyncapi.TARGET.read_text() == asyncapi.rendered(), "run: python -m scripts.asyncapi"
    assert topics_table.TARGET.read_text() == topics_table.rendered(), "run: python -m scripts.topics_table"


def test_every_topic_and_record_is_listed_with_its_readers_and_writers(document: dict[str, Any]) -> None:
    by_address = {channel["address"]: channel for channel in document["channels"].values()}
    assert set(by_address) == {topic.name for topic in TOPICS}
    for topic in TOPICS:
        names = {kind.type_name() for kind in topic.records} or {"DeadLetter"}
        assert set(by_address[topic.name]["messages"]) == names
    roles = {tuple(found["x-roles"]) for found in document["operations"].values()}
    assert len(document["operations"]) == 2 * len(TOPICS)
    assert {role for found in roles for role in found} == {role.value for role in Role}


def test_every_header_that_is_written_or_echoed_is_listed(document: dict[str, Any]) -> None:
    messages = document["components"]["messages"]
    dead = {value for name, value in vars(topics).items() if name.startswith("DLQ_")}
    assert set(messages["DeadLetter"]["headers"]["properties"]) == dead
    for name, message in messages.items():
        if name != "DeadLetter":
            headers = message["headers"]["properties"]
            assert {"ce_id", "ce_type", "ce_source", "ce_subject", "ce_time", "ce_specversion"} <= set(headers)
            assert headers["ce_type"]["const"].startswith(f"switchyard.{name}.v")
    assert set(messages["JobCompleted"]["headers"]["properties"]) >= ECHOED


def test_references_lead_somewhere_and_payloads_are_schemas(document: dict[str, Any]) -> None:
    for reference in set(references(document)):
        resolved(document, reference)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for channel in document["channels"].values():
        assert ("{" in channel["address"]) == ("parameters" in channel)


def test_a_payload_schema_takes_what_the_record_writes(document: dict[str, Any]) -> None:
    record = {"job_id": "j", "alias": "a", "prompt": "x"}
    schema = {"$ref": "#/components/schemas/JobSubmitted", "components": document["components"]}
    Draft202012Validator(schema).validate(record)
    assert not Draft202012Validator(schema).is_valid({**record, "unknown": 1})
