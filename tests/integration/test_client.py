"""JobClient with a tenant's own rights on the real Kafka; the pipeline behind it is played by `Answering`."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from infra.kafka.clients import KafkaUnreachable
from infra.launch.stack import Stack
from producers.client import ClientClosed, JobClient, JobIdOpen
from producers.job import Job, JobNotCompleted
from producers.preview import Event, Reset, Token
from schemas.errors import InvalidRecord
from schemas.jobs import JobClass, Outcome, RejectReason
from schemas.record import Coordinates, Record
from schemas.replies import JobCompleted, JobFailed, JobRejected
from tests.answering import Answering, Asked

NewTenant = Callable[[], str]


def nothing(_: Asked) -> Sequence[Record]:
    return ()


async def text_of(job: Job) -> str:
    return "".join([piece async for piece in job])


async def test_tokens_arrive_in_order_and_the_final_reply_names_the_digest(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()
    async with Answering(stack, name), JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="support", prompt="hello")
        assert await text_of(job) == "<hello>"
        final = await job.result(raise_for_failure=True)
        assert isinstance(final, JobCompleted)
        assert final.receipt.identity.tenant == name
        assert final.ingress == job.place


async def test_a_batch_job_goes_to_the_batch_topic_and_its_cancellation_to_the_cancel_topic(
    stack: Stack, tenant: NewTenant
) -> None:
    name = tenant()
    async with Answering(stack, name, nothing) as answering, JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", messages=[{"role": "user", "content": "x"}], job_class=JobClass.BATCH)
        await answering.until(lambda: len(answering.asked) == 1)
        await job.cancel()
        await answering.until(lambda: answering.cancelled == [job.job_id])
        assert answering.asked[0].place.topic == f"batch.{name}"
        await answering.say(answering.asked[0].failed(Outcome.CANCELLED))
        with pytest.raises(JobNotCompleted) as caught:
            await job.result(raise_for_failure=True)
        assert isinstance(caught.value.reply, JobFailed)


async def test_a_higher_attempt_resets_and_a_lower_one_is_ignored(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()
    async with Answering(stack, name, nothing) as answering, JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", prompt="x")
        await answering.until(lambda: bool(answering.asked))
        asked = answering.asked[0]
        events = job.events()
        await answering.say(asked.chunk("old", 0))
        assert await anext(events) == Token("old", 1)
        await answering.say(asked.chunk("new", 0, attempt=2), asked.chunk(" zombie", 1), asked.chunk("!", 1, attempt=2))
        await answering.say(asked.completed("new!", attempt=2))
        rest: list[Event] = [event async for event in events]
        assert rest[0] == Reset(2)
        assert "".join(event.text for event in rest if isinstance(event, Token)) == "new!"


async def test_a_lost_chunk_is_filled_in_by_the_final_text(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()

    def gap(asked: Asked) -> Sequence[Record]:
        return (
            asked.chunk("a", 0), asked.chunk("a", 0), asked.chunk("c", 2), asked.chunk("b", 1), asked.completed("abcd"),
        )  # fmt: skip

    async with Answering(stack, name, gap), JobClient(stack.kafka(name), name) as client:
        assert await text_of(await client.submit(alias="a", prompt="x")) == "abcd"


async def test_a_retryable_refusal_is_submitted_again_under_the_same_id(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()

    def twice_full(asked: Asked) -> Sequence[Record]:
        full = asked.rejected(RejectReason.CAPACITY, retry_after_ms=20)
        # Delivered twice, as after a router's crash: no reason to submit twice.
        return (full, full) if asked.times < 3 else (asked.completed("done"),)

    async with Answering(stack, name, twice_full) as answering, JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", prompt="x", deadline_ms=30_000)
        final = await job.result()
        assert isinstance(final, JobCompleted)
        assert [asked.times for asked in answering.asked] == [1, 2, 3]
        deadlines = [asked.job.deadline_ms or 0 for asked in answering.asked]
        assert deadlines == sorted(deadlines, reverse=True)
        assert deadlines[-1] < 30_000


async def test_a_retryable_refusal_is_final_where_retries_are_off_or_too_late(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()

    def full(asked: Asked) -> Sequence[Record]:
        return (asked.rejected(RejectReason.CAPACITY, retry_after_ms=5_000),)

    settings = stack.kafka(name)
    async with Answering(stack, name, full) as answering:
        async with JobClient(settings, name, retry=False) as client:
            final = await (await client.submit(alias="a", prompt="x")).result()
            assert isinstance(final, JobRejected)
        async with JobClient(settings, name) as client:
            final = await (await client.submit(alias="a", prompt="x", deadline_ms=1_000)).result()
            assert isinstance(final, JobRejected)
        assert len(answering.asked) == 2


async def test_replies_to_other_records_of_the_same_id_are_told_apart(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()
    elsewhere = Coordinates(topic=f"jobs.{name}", partition=0, offset=4_000)

    def replies(asked: Asked) -> Sequence[Record]:
        return (
            asked.rejected(RejectReason.CAPACITY, retry_after_ms=1, place=elsewhere),
            asked.rejected(RejectReason.JOB_ID_REUSED, place=elsewhere),
            asked.completed("of the first record", place=elsewhere),
        )

    async with Answering(stack, name, replies) as answering, JobClient(stack.kafka(name), name) as client:
        final = await (await client.submit(alias="a", prompt="x", job_id="mine")).result()
        assert isinstance(final, JobCompleted)
        assert len(answering.asked) == 1


async def test_a_reader_that_never_reads_holds_nobody_up(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()

    def many(asked: Asked) -> Sequence[Record]:
        return (*(asked.chunk("x", seq) for seq in range(200)), asked.completed("x" * 200))

    async with Answering(stack, name, many), JobClient(stack.kafka(name), name) as client:
        jobs = [await client.submit(alias="a", prompt=str(number)) for number in range(5)]
        await jobs[4].result()
        assert await text_of(jobs[4]) == "x" * 200
        # What the slow reader missed comes as one piece.
        assert [piece async for piece in jobs[0]] == ["x" * 200]


async def test_a_record_that_cannot_be_read_costs_only_itself(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()
    async with Answering(stack, name, nothing) as answering, JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", prompt="x")
        await answering.until(lambda: bool(answering.asked))
        for topic in (f"stream.{name}", f"replies.{name}"):
            for value in (b"{", b"\xff", None, b'{"type": "JobPaused", "version": 1}'):
                await answering.say_raw(topic, job.job_id, value)
        await answering.say(answering.asked[0].completed("whole"))
        assert await text_of(job) == "whole"


async def test_a_client_that_can_read_no_more_ends_every_open_job(stack: Stack, tenant: NewTenant) -> None:
    async def broken() -> None:
        raise OSError("no route to Kafka")

    name = tenant()
    async with JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", prompt="x")
        client._spawn(broken())
        with pytest.raises(ClientClosed, match="no route to Kafka"):
            await job.result()
        with pytest.raises(ClientClosed):
            await text_of(job)


async def test_no_kafka_and_a_wrong_password_are_each_one_sentence(stack: Stack, tenant: NewTenant) -> None:
    right = stack.kafka(tenant())
    for changed in ({"bootstrap": "127.0.0.1:9"}, {"password": "wrong"}):
        with pytest.raises(KafkaUnreachable, match="cannot be reached, or does not let this user in"):
            async with JobClient(right.model_copy(update=changed), right.username):
                raise AssertionError("let in")


async def test_closing_ends_what_waits_and_refuses_what_comes(stack: Stack, tenant: NewTenant) -> None:
    name = tenant()
    async with JobClient(stack.kafka(name), name) as client:
        job = await client.submit(alias="a", prompt="x", job_id="one")
        with pytest.raises(JobIdOpen):
            await client.submit(alias="a", prompt="x", job_id="one")
        with pytest.raises(InvalidRecord, match="messages"):
            await client.submit(alias="a")
        with pytest.raises(InvalidRecord, match="bytes"):
            await client.submit(alias="a", prompt="x" * (1 << 20))
        waiting = asyncio.create_task(job.result())
        await asyncio.sleep(0)
    with pytest.raises(ClientClosed):
        await waiting
    with pytest.raises(ClientClosed):
        await client.submit(alias="a", prompt="x")
