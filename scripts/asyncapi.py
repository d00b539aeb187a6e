"""`python -m scripts.asyncapi [--check]`: write docs/asyncapi.yaml, or compare it.

FastStream makes the document from publishers and subscribers that are declared from the topic catalogue; it knows
neither headers, keys, settings of topics nor who may use them, so these are added here.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Union

import yaml
from faststream import AckPolicy
from faststream.kafka import KafkaBroker
from faststream.specification import AsyncAPI

from infra.kafka.records import ECHO_BYTES_MAX, ECHOED, TRACEPARENT, Incoming, Stamp, dead_letter
from schemas.digest import digest_of
from schemas.ids import DIGEST_PATTERN
from schemas.record import Record
from schemas.topics import DLQ, METERING, REPLIES, REQUESTS, STREAM, TOPICS, Role, Topic

Document = dict[str, Any]

TARGET = Path(__file__).parents[1] / "docs" / "asyncapi.yaml"
PLACEHOLDERS = {"tenant": "The tenant: who pays, and whose rights the topic carries.", "pool": "The pool of workers."}
ABOUT = """\
Switchyard's topics: tenants post jobs and read tokens and replies; everything else is written and read by the platform.

Values are closed JSON objects that say their own `type` and `version`. Headers are never a source of identity: the
tenant of a job is the topic it arrived on. A tenant may post plain JSON without any header.
"""
# What each header says. A header that the code writes and this table lacks fails the generation.
HEADERS: dict[str, Document] = {
    "ce_specversion": {"type": "string", "const": "1.0", "description": "CloudEvents 1.0, binary mode."},
    "ce_id": {"type": "string", "description": "Unique within the source: its name and a number."},
    "ce_type": {"type": "string", "description": "The record's type and version."},
    "ce_source": {"type": "string", "description": "The process, and which of its lives, that wrote the record."},
    "ce_time": {"type": "string", "format": "date-time", "description": "When the record was made."},
    "ce_subject": {
        "type": "string",
        "pattern": DIGEST_PATTERN,
        "description": "The adapter digest, where there is one.",
    },
    "content-type": {"type": "string", "const": "application/json"},
    "kafka_correlationId": {"description": f"The sender's own bytes (at most {ECHO_BYTES_MAX}), echoed on the reply."},
    "correlation_id": {"description": f"The sender's own bytes (at most {ECHO_BYTES_MAX}), echoed on the reply."},
    TRACEPARENT: {"type": "string", "description": "W3C trace context; the router begins a trace for each job."},
    "dlq.reason": {"type": "string", "description": "Why the record was refused, in one word."},
    "dlq.detail": {"type": "string", "maxLength": 500, "description": "Why, in a sentence."},
    "dlq.component": {"type": "string", "description": "Which process refused it."},
    "dlq.original.topic": {"type": "string"},
    "dlq.original.partition": {"type": "string", "pattern": "^[0-9]+$"},
    "dlq.original.offset": {"type": "string", "pattern": "^[0-9]+$"},
    "dlq.original.timestamp": {"type": "string", "pattern": "^[0-9]+$", "description": "Milliseconds since 1970."},
}


def rendered() -> str:
    document = _complete(_declared())
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _declared() -> Document:
    """What FastStream says about every topic of the catalogue."""
    broker = KafkaBroker("127.0.0.1:9092")
    for topic in TOPICS:
        schema = Union[topic.records] if topic.records else bytes  # noqa: UP007 - made of a tuple
        broker.publisher(topic.name, schema=schema, title=topic.name, description=topic.about)
        subscriber = broker.subscriber(
            topic.name, title=f"{topic.name}:read", ack_policy=AckPolicy.MANUAL, no_reply=True,
            auto_offset_reset="earliest", isolation_level="read_committed",
        )  # fmt: skip
        subscriber(_reader(schema))
    api = AsyncAPI(broker, title="Switchyard", version="1", description=ABOUT, schema_version="3.0.0")
    document: Document = json.loads(api.to_specification().to_json())
    return document


def _reader(schema: Any) -> Any:
    """A handler that takes this type, for FastStream reads types from handlers."""

    async def read(message: Any) -> None:
        del message

    read.__annotations__["message"] = schema
    return read


def _complete(document: Document) -> Document:
    declared = document["channels"]
    records = {kind.type_name(): kind for topic in TOPICS for kind in topic.records}
    schemas = document["components"]["schemas"]
    # FastStream's own envelopes around several types; here each type is a message.
    plain = {name: schema for name, schema in sorted(schemas.items()) if ":" not in name}
    missing = records.keys() - plain.keys()
    assert not missing, f"FastStream described no schema for {missing}"
    operations: Document = {}
    for topic in TOPICS:
        operations |= _operations(topic, document["operations"])
    return {
        "asyncapi": document["asyncapi"],
        "info": document["info"],
        "defaultContentType": document["defaultContentType"],
        "servers": {"kafka": _server(document["servers"])},
        "channels": {_id(topic): _channel(topic, declared[topic.name]) for topic in TOPICS},
        "operations": operations,
        "components": {
            "messages": {
                **{name: _message(kind) for name, kind in sorted(records.items())},
                "DeadLetter": _dead_letter(),
            },
            "schemas": {**plain, "Digest": {"type": "string", "pattern": DIGEST_PATTERN}},
            "securitySchemes": {
                "scram": {
                    "type": "scramSha512",
                    "description": "One user per tenant and per service; no default rights.",
                }
            },
        },
    }


def _id(topic: Topic) -> str:
    """A channel's name without braces, which not every tool takes in a reference."""
    return topic.name.replace("{", "").replace("}", "")


def _server(servers: Document) -> Document:
    (server,) = servers.values()
    return {**server, "protocol": "kafka-secure", "security": [{"$ref": "#/components/securitySchemes/scram"}]}


def _channel(topic: Topic, declared: Document) -> Document:
    names = [kind.type_name() for kind in topic.records] or ["DeadLetter"]
    placeholder = topic.name.partition("{")[2].rstrip("}")
    channel: Document = {
        "address": declared["address"],
        "description": declared["description"],
        "servers": [{"$ref": "#/servers/kafka"}],
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
    }
    if placeholder:
        channel["parameters"] = {placeholder: {"description": PLACEHOLDERS[placeholder]}}
    channel["bindings"] = {
        "kafka": {
            **declared["bindings"]["kafka"],
            "partitions": topic.partitions,
            "topicConfiguration": {
                "cleanup.policy": ["delete"],
                "retention.ms": topic.retention_ms,
                "max.message.bytes": topic.bytes_max,
            },
        }
    }
    channel["x-key"] = topic.key
    standard = channel["bindings"]["kafka"]["topicConfiguration"]
    channel["x-settings"] = {name: value for name, value in topic.config().items() if name not in standard}
    return channel


def _operations(topic: Topic, declared: Document) -> Document:
    """Who sends and who receives; the rights on the broker are made of the same sets."""
    found: Document = {}
    for kind, source, roles in (("write", topic.name, topic.writers), ("read", f"{topic.name}:read", topic.readers)):
        found[f"{kind}.{_id(topic)}"] = {
            "action": declared[source]["action"],
            "channel": {"$ref": f"#/channels/{_id(topic)}"},
            "summary": f"{kind} by: {', '.join(_names(roles))}",
            "x-roles": _names(roles),
        }
    return found


def _names(roles: Iterable[Role]) -> list[str]:
    return sorted(role.value for role in roles)


def _message(kind: type[Record]) -> Document:
    name = kind.type_name()
    version = kind.model_fields["version"].default
    written = Stamp(source="s").encoded("t", "k", kind, b"{}", 0, digest_of(b""))
    names = [header for header, _ in written.headers]
    if any(kind in topic.records for topic in TOPICS if topic.tenant_writes or topic in (REQUESTS, STREAM, REPLIES)):
        names += sorted(ECHOED)
    if any(kind in topic.records for topic in (REQUESTS, STREAM, REPLIES, METERING)):
        names.append(TRACEPARENT)
    headers = {header: HEADERS[header] for header in names}
    headers["ce_type"] = {**headers["ce_type"], "const": f"switchyard.{name}.v{version}"}
    keys = sorted({topic.key for topic in TOPICS if kind in topic.records})
    return {
        "name": name,
        "title": name,
        "summary": (kind.__doc__ or "").partition("\n")[0],
        "contentType": "application/json",
        "headers": {"type": "object", "properties": headers},
        "payload": {"$ref": f"#/components/schemas/{name}"},
        "bindings": {"kafka": {"key": {"type": "string", "description": " or ".join(keys)}, "bindingVersion": "0.4.0"}},
    }


def _dead_letter() -> Document:
    original = Incoming(topic="t", partition=0, offset=0, timestamp_ms=0, key=b"", value=b"", headers=())
    names = [name for name, _ in dead_letter(original, "component", "reason", "detail").headers]
    return {
        "name": "DeadLetter",
        "title": "DeadLetter",
        "summary": "A refused record: its own bytes as value, its own headers, and where it came from and why.",
        "contentType": "application/octet-stream",
        "headers": {"type": "object", "required": names, "properties": {name: HEADERS[name] for name in names}},
        "payload": {"description": "The refused record's value, unchanged."},
        "bindings": {"kafka": {"key": {"type": "string", "description": DLQ.key}, "bindingVersion": "0.4.0"}},
    }


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        fresh = TARGET.exists() and TARGET.read_text() == rendered()
        print("fresh" if fresh else f"{TARGET} is stale, run `python -m scripts.asyncapi`")
        return 0 if fresh else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(rendered())
    print(f"written: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
