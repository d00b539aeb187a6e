"""`switchyard job`: one job, streamed to the terminal as it is generated."""

import asyncio
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from producers.cli.options import acting_for, acting_options, tenant_option

if TYPE_CHECKING:
    from producers.client import JobClient
    from producers.job import Job
    from schemas.jobs import JobClass, JobSubmitted
    from schemas.replies import FinalReply

INTERRUPTED = 130
# After Ctrl-C: how long the reply to the cancellation is waited for.
CANCEL_S = 5.0


@click.group()
def job() -> None:
    """Run one job and watch its tokens, or take one back."""


@job.command()
@acting_options
@click.option("--alias", required=True, help="The tenant's name for the adapter to run under.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=1.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0))
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--session", "session_id", help="Jobs of one session keep to one version of the alias.")
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(min=0.001, max=86_400), help="Seconds until the job expires."
)
@click.option("--batch", is_flag=True, help="Wait in line when the pool is full, instead of being refused.")
@click.option("--json", "as_json", is_flag=True, help="Print the final reply as JSON, and nothing before it.")
@click.argument("prompt")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    tenant: str | None,
    as_tenant: str | None,
    grant: Path | None,
    alias: str,
    prompt: str,
    system: str | None,
    session_id: str | None,
    deadline_s: float | None,
    batch: bool,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Run PROMPT ('-': standard input) and print the answer as it comes.

    The receipt goes to standard error. Exit code 0: completed; 1: failed or rejected; 130: interrupted, and cancelled.
    """
    from infra.clock import SystemClock
    from producers.client import JobClient, make_record, random_job_id
    from producers.impersonation import load_grant, way_in
    from schemas.jobs import JobClass

    owner = acting_for(ctx, tenant, as_tenant, grant)
    impersonation = load_grant(grant) if grant is not None else None
    turns = [("system", system), ("user", sys.stdin.read() if prompt == "-" else prompt)]
    record = make_record(
        {
            "job_id": random_job_id(),
            "alias": alias,
            "messages": tuple({"role": role, "content": content} for role, content in turns if content is not None),
            "parameters": parameters,
            "session_id": session_id,
            # Not a number passes every range; as 0 the record refuses it in words.
            "deadline_ms": None if deadline_s is None else int(deadline_s * 1000) if isfinite(deadline_s) else 0,
            "impersonation": impersonation,
        }
    )

    job_class = JobClass.BATCH if batch else JobClass.INTERACTIVE

    async def submit_and_follow() -> int:
        settings = await way_in(owner, impersonation, SystemClock().now_ms())
        async with JobClient(settings, owner) as client:
            return await _follow(client, record, job_class, as_json)

    ctx.exit(asyncio.run(submit_and_follow()))


@job.command()
@tenant_option
@click.argument("job_id")
def cancel(tenant: str, job_id: str) -> None:
    """Take JOB_ID back, whether it waits, runs or has not arrived yet."""
    from infra.credentials import kafka_as
    from producers.client import JobClient

    async def take_back() -> None:
        async with JobClient(kafka_as(tenant), tenant) as client:
            await client.cancel(job_id)

    asyncio.run(take_back())
    click.echo(f"the cancellation of {job_id} is on its way; the job's final reply says what became of it")


async def _follow(client: "JobClient", record: "JobSubmitted", job_class: "JobClass", as_json: bool) -> int:
    """Print what comes until the final reply, and that. Ctrl-C cancels the job and waits a little for the reply."""
    # Shielded: an interruption between the append and its acknowledgement must not lose sight of the job.
    submitting = asyncio.create_task(client.submit_record(record, job_class))
    code = 0
    try:
        submitted = await asyncio.shield(submitting)
        if not as_json:
            await _print_tokens(submitted)
        final = await submitted.result()
    except asyncio.CancelledError:
        # Also a job that may not have arrived: its cancellation is remembered, and wins.
        await client.cancel(record.job_id)
        code = INTERRUPTED
        reply = await _soon(submitting)
        if reply is None:
            click.echo(f"\njob {record.job_id} is being cancelled; it has not answered yet", err=True)
            return code
        final = reply
    _print_final(final, as_json)
    return code or int(final.type != "JobCompleted")


async def _soon(submitting: "asyncio.Task[Job]") -> "FinalReply | None":
    try:
        async with asyncio.timeout(CANCEL_S):
            return await (await submitting).result()
    except TimeoutError:
        return None


def _print_final(final: "FinalReply", as_json: bool) -> None:
    click.echo(final.encode().decode() if as_json else "")
    click.echo(receipt_line(final), err=True)


async def _print_tokens(submitted: "Job") -> None:
    from producers.preview import Reset, Waiting

    async for event in submitted.events():
        if isinstance(event, Waiting):
            click.echo(f"waits: {event.message}", err=True)
            continue
        if isinstance(event, Reset):
            click.echo()
            click.echo(f"[begun again, attempt {event.attempt}]", err=True)
        else:
            click.echo(_printable(event.text), nl=False)


def _printable(text: str) -> str:
    """What a model wrote must not move a terminal's cursor or change its title."""
    if not sys.stdout.isatty():
        return text
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def receipt_line(final: "FinalReply") -> str:
    """One line: what became of the job, and for an admitted one what ran it."""
    from schemas.replies import JobCompleted, JobRejected

    if isinstance(final, JobRejected):
        return f"rejected: {final.reason}: {_printable(final.message)} (job {final.job_id})"
    if isinstance(final, JobCompleted):
        what = f"completed ({final.finish_reason})"
    else:
        what = f"{final.outcome}: {_printable(final.message)}"
    ran, used = final.receipt, final.usage
    return (
        f"{what}: {ran.identity.adapter}, attempt {ran.attempt}, {used.prompt_tokens} prompt + "
        f"{used.completion_tokens} completion tokens, {ran.engine} (job {final.job_id})"
    )
