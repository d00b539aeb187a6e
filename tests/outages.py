"""What is done to each service of a scene, and what is seen of it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from confluent_kafka import Producer

from schemas.jobs import RejectReason
from schemas.replies import JobRejected
from schemas.topics import TENANTS
from tests.factories import make_job
from tests.outage_scene import ENGINE, GONE, LONGER, TENANT, Final, Scene, Seen, first
from tests.routing import until

WAIT_S = 60.0
# Two for each row of the one worker.
WINDOW = 2 * ENGINE.rows
READY = "ready".__eq__
NOT_READY_NOW = "ready".__ne__


async def the_store_is_away(scene: Scene) -> Seen:
    seen, routing = Seen(), scene.routing
    await routing.jobs(warming := make_job(alias="a"))
    await scene.final(warming)
    before = await routing.routed_ids()
    place = scene.stack.objects_dir
    away = place.rename(place.with_name("away"))
    warm, cold, again = make_job(alias="a"), make_job(alias="cold"), make_job(alias="cold")
    await routing.jobs(warm, cold)
    seen.ran, seen.told = await scene.final(warm), [await scene.final(cold)]
    seen.router, seen.worker = [await asyncio.to_thread(scene.ready, name) for name in (scene.router, scene.worker)]
    seen.routed = await routing.routed_ids() - before
    away.rename(place)
    await routing.jobs(again)
    seen.after.append(await scene.final(again))
    return await scene.look_back(seen)


async def redis_is_gone(scene: Scene) -> Seen:
    seen, routing = Seen(), scene.routing
    running = await scene.start_long()
    before = await routing.routed_ids()
    scene.stack.processes["redis"].kill()
    seen.router = await scene.says(scene.router, NOT_READY_NOW)
    refused, waiting, again = make_job(alias="a"), make_job(alias="b"), make_job(alias="a")
    await routing.jobs(refused)
    await routing.post("batch", waiting)
    seen.told, seen.notices = [await scene.final(refused)], [await scene.notice(waiting)]
    seen.ran = await scene.final(running)
    seen.routed = await routing.routed_ids() - before
    await asyncio.to_thread(lambda: scene.stack.restart("redis").wait_ready())
    seen.after.append(await scene.final(waiting))
    await scene.says(scene.router, READY)
    await routing.jobs(again)
    seen.after.append(await scene.final(again))
    return await scene.look_back(seen)


async def redis_is_silent(scene: Scene) -> Seen:
    """Stopped, not gone: whether a call took a lease is not known."""
    seen, routing = Seen(), scene.routing
    running = await scene.start_long()
    before = await routing.routed_ids()
    redis = scene.stack.processes["redis"]
    redis.signal(signal.SIGSTOP)
    asked, behind = make_job(alias="a"), make_job(alias="a")
    try:
        await routing.jobs(asked)
        await routing.jobs(behind)
        seen.notices = [await scene.notice(asked), await scene.notice(behind)]
        seen.router = await scene.says(scene.router, NOT_READY_NOW)
        seen.ran = await scene.final(running)
        seen.told = [reply for reply in await scene.finals() if reply.job_id in (asked.job_id, behind.job_id)]
        seen.routed = await routing.routed_ids() - before
    finally:
        redis.signal(signal.SIGCONT)
    seen.after = [await scene.final(asked), await scene.final(behind)]
    await scene.says(scene.router, READY)
    return await scene.look_back(seen)


async def kafka_is_away(scene: Scene) -> Seen:
    seen = Seen()
    running = await scene.start_long(LONGER)
    kafka = scene.stack.processes["kafka"]
    producer = Producer({**scene.stack.file.kafka(TENANT).librdkafka(), "log_level": 2})
    late = make_job(alias="a")
    kafka.signal(signal.SIGSTOP)
    try:
        producer.produce(f"jobs.{TENANT}", late.encode())
        seen.router = await scene.says(scene.router, lambda sentence: "stale" in sentence)
        seen.worker = await scene.says(scene.worker, lambda sentence: "stale" in sentence)
        seen.taken = await asyncio.to_thread(producer.flush, 0.1) == 0
    finally:
        kafka.signal(signal.SIGCONT)
    assert await asyncio.to_thread(producer.flush, WAIT_S) == 0
    seen.ran, seen.told = await scene.final(running), [await scene.final(late)]
    for name in (scene.router, scene.worker):
        await scene.says(name, READY)
    again = make_job(alias="a")
    await scene.routing.jobs(again)
    seen.after.append(await scene.final(again))
    return await scene.look_back(seen)


async def kafka_is_killed(scene: Scene) -> Seen:
    """With jobs at every stage. What ends is started again at once, as `switchyard up` does."""
    seen, stack = Seen(), scene.stack
    ended, answered = stack.ended(), await scene.finals()
    running = await scene.start_long(LONGER)
    producer = Producer({**stack.file.kafka(TENANT).librdkafka(), "log_level": 2})
    late, burst = make_job(alias="a"), [make_job(alias="a") for _ in range(WINDOW)]
    await scene.routing.jobs(*burst)
    stack.processes["kafka"].kill()
    producer.produce(f"jobs.{TENANT}", late.encode())
    seen.router = await scene.says(scene.router, lambda sentence: "stale" in sentence or sentence == GONE)
    seen.worker = await scene.says(scene.worker, lambda sentence: "stale" in sentence or sentence == GONE)
    seen.taken = await asyncio.to_thread(producer.flush, 0.1) == 0
    await asyncio.to_thread(lambda: stack.restart("kafka").wait_ready())
    waiting = [running, late, *burst]

    async def all_answered() -> bool:
        for name, code in stack.ended().items():
            if name not in ended:
                seen.codes.append(code)
                await asyncio.to_thread(stack.restart, name)
        return {job.job_id for job in waiting} <= {reply.job_id for reply in await scene.finals()}

    await until(all_answered)
    seen.ran, *seen.told = [await scene.final(job) for job in waiting]
    assert (await scene.finals())[: len(answered)] == answered, "what was answered before is still there"
    for name in (scene.router, scene.worker):
        await scene.says(name, READY)
    again = make_job(alias="a")
    await scene.routing.jobs(again)
    seen.after.append(await scene.final(again))
    assert await asyncio.to_thread(producer.flush, WAIT_S) == 0
    return await scene.look_back(seen)


async def the_worker_is_killed(scene: Scene) -> Seen:
    seen, routing = Seen(), scene.routing
    running = await scene.start_long()
    before = await routing.routed_ids()
    scene.stack.processes[scene.worker].kill()
    killed_at = monotonic()
    jobs = [make_job(alias="a") for _ in range(WINDOW + 1)]
    await routing.jobs(*jobs)
    ids = {job.job_id for job in jobs}

    async def all_decided() -> list[bool]:
        refused = {reply.job_id for reply in await scene.finals()} & ids
        seen.routed = await routing.routed_ids() - before
        return [True] if refused | seen.routed == ids else []

    await first(all_decided)
    seen.told = [reply for reply in await scene.finals() if reply.job_id in ids]

    async def missed() -> list[Final]:
        await routing.jobs(probe := make_job(alias="a"))
        told = await scene.final(probe)
        return [told] if isinstance(told, JobRejected) and told.reason is RejectReason.NOT_READY else []

    seen.told.append(await first(missed))
    seen.took_s = monotonic() - killed_at
    await routing.post("batch", waiting := make_job(alias="b"))
    seen.notices = [await scene.notice(waiting)]
    await scene.start_worker()
    seen.ran = await scene.final(running)
    seen.after = [await scene.final(job) for job in [*jobs, waiting] if job.job_id in {*seen.routed, waiting.job_id}]
    return await scene.look_back(seen)


async def the_worker_is_stopped(scene: Scene) -> Seen:
    seen, routing = Seen(), scene.routing
    running = await scene.start_long()
    await asyncio.to_thread(scene.stack.processes[scene.worker].stop)
    seen.ran = await scene.final(running)
    before = await routing.routed_ids()
    refused, waiting = make_job(alias="a"), make_job(alias="b")
    await routing.jobs(refused)
    await routing.post("batch", waiting)
    seen.told, seen.notices = [await scene.final(refused)], [await scene.notice(waiting)]
    seen.routed = await routing.routed_ids() - before
    await scene.start_worker()
    seen.after.append(await scene.final(waiting))
    return await scene.look_back(seen)


async def the_registry_cannot_be_read(scene: Scene) -> Seen:
    """A record of policy that was cut short. Nothing mends this log: it is the last outage of its stack."""
    seen, routing = Seen(), scene.routing
    before = await routing.routed_ids()
    producer = Producer(scene.stack.kafka("admin").librdkafka())
    producer.produce(TENANTS.name, b'{"type": "TenantConfigured", "ten', TENANT)
    assert await asyncio.to_thread(producer.flush, WAIT_S) == 0
    router, worker = (scene.stack.processes[name] for name in (scene.router, scene.worker))
    seen.codes = [await asyncio.to_thread(process.wait_exit, WAIT_S) for process in (router, worker)]
    await routing.jobs(make_job(alias="a"))
    again = await asyncio.to_thread(scene.stack.restart, scene.router)
    seen.codes.append(await asyncio.to_thread(again.wait_exit, WAIT_S))
    seen.routed = await routing.routed_ids() - before
    seen.router = again.log.read_text()
    return seen


OUTAGES: dict[str, Callable[[Scene], Coroutine[Any, Any, Seen]]] = {
    "store": the_store_is_away,
    "redis gone": redis_is_gone,
    "redis silent": redis_is_silent,
    "kafka": kafka_is_away,
    "kafka killed": kafka_is_killed,
    "worker killed": the_worker_is_killed,
    "worker stopped": the_worker_is_stopped,
    "registry": the_registry_cannot_be_read,
}
