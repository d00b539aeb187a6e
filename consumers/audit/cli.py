"""`switchyard audit`: what happened under a digest, read from the log alone."""

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from schemas.ids import parse_digest

if TYPE_CHECKING:
    from consumers.audit.closure import Entry, Evidence

ROLE = "auditor"


@click.group()
def audit() -> None:
    """What happened under a digest, and whether anything is missing."""


@audit.command()
@click.option("--digest", required=True, help="The adapter's digest, sha256:<64 hex digits>.")
@click.option("--since", metavar="ISO-TIME", help="Only records from this time on (UTC where it names no zone).")
@click.option("--until", metavar="ISO-TIME", help="Only records before this time.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document (RFC 8785): the same log gives the same bytes."
)
@click.pass_context
def replay(ctx: click.Context, /, digest: str, since: str | None, until: str | None, as_json: bool) -> None:
    """Print every admission, start, load, eviction, cancellation, outcome and usage of a digest, with offsets.

    Ends with a verdict. Exit code 1: INCOMPLETE, which means that a record is missing, a job has no outcome yet or more
    than one, or records of one job contradict each other.
    """
    from consumers.audit.closure import Verdict
    from consumers.audit.replay import replay as read
    from infra.credentials import kafka_as

    evidence = asyncio.run(
        read(kafka_as(ROLE), parse_digest(digest), _time_ms("--since", since), _time_ms("--until", until))
    )
    if as_json:
        click.echo(as_document(evidence))
    else:
        for line in as_lines(evidence):
            click.echo(line)
    ctx.exit(int(evidence.verdict is Verdict.INCOMPLETE))


def _time_ms(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        said = f"{text!r} is no ISO 8601 time, such as 2026-12-02T07:00:00Z"
        raise click.BadParameter(said, param_hint=option) from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def as_document(evidence: "Evidence") -> bytes:
    """The evidence as canonical JSON: the same log gives the same bytes."""
    from dataclasses import asdict, replace

    from schemas.digest import canonical

    events = [
        {"offset": entry.offset, "timestamp_ms": entry.timestamp_ms, "record": entry.record.model_dump(mode="json")}
        for entry in evidence.events
        if entry.record is not None
    ]
    found = asdict(replace(evidence, events=()))
    return canonical({**found, "events": events, "verdict": evidence.verdict.value})


def as_lines(evidence: "Evidence") -> list[str]:
    """The evidence for a person."""
    covered = evidence.coverage
    return [
        f"audit of {covered.digest}",
        f"partition {covered.partition} of {covered.partitions}, offsets {covered.start} to {covered.end} (exclusive): "
        f"{evidence.read} records read, {len(evidence.events)} of this digest, {evidence.repeated} repeated and folded",
        *(_event_line(entry) for entry in evidence.events),
        *([] if evidence.events else ["no record of this digest"]),
        f"{evidence.admitted} jobs admitted; outcomes: "
        + (", ".join(f"{count} {name}" for name, count in evidence.outcomes.items()) or "none"),
        *([f"{evidence.earlier} jobs were admitted before this range"] if covered.start and evidence.earlier else []),
        *(f"open: job {job.job}, admitted at offset {job.offset}, {job.age_ms} ms old" for job in evidence.open_jobs),
        *(f"writer {name} has not closed: the closure alone proves its end" for name in evidence.open_writers),
        *(f"problem: {problem}" for problem in evidence.problems),
        evidence.verdict.value,
    ]  # fmt: skip


# What a line need not say: it is known from the replay itself, or stands at the line's beginning.
UNTOLD = frozenset({"type", "version", "writer", "writer_seq", "identity", "adapter", "decided_on", "key_id", "job_id"})


def _event_line(entry: "Entry") -> str:
    record = entry.record
    assert record is not None
    time = _time(entry.timestamp_ms)
    fields = {name: value for name, value in record if name not in UNTOLD}
    identity, job_id = getattr(record, "identity", None), getattr(record, "job_id", None)
    job = f" {identity.tenant}/{job_id}" if identity and job_id else ""
    return f"{entry.offset:>8} {time} {record.type:<17}{job} " + " ".join(f"{n}={_told(v)}" for n, v in fields.items())


def _told(value: object) -> str:
    """A nested value in few words: usage as numbers, a place as topic/partition/offset, a grant as whose, when, why."""
    from schemas.impersonation import Impersonation
    from schemas.replies import Usage

    if isinstance(value, Impersonation):
        # Quoted as Python does, so that what somebody wrote moves no cursor.
        return f"{value.grant_id} of {value.admin!r} until {_time(value.expires_at_ms)} because {value.reason!r}"
    if isinstance(value, Usage):
        return f"{value.prompt_tokens}+{value.completion_tokens}"
    return str(value)


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
