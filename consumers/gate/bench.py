"""The gate's engine: started for a base when it is needed, stopped when nobody asked for a while."""

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

from consumers.engines import protocol
from consumers.engines.protocol import Artifact, Engine, EngineDead, EngineFault, EngineRequest, LoadFailed
from consumers.engines.select import default_kind, engine_environment, make_engine
from consumers.gate.checks import ANSWER_TOKENS, Answer, Trial, questions
from infra.artifacts import ArtifactBroken, fetch_artifact, find_base
from infra.logs import ActionLog
from infra.objects import ObjectCorrupt, Objects, ObjectUnknown
from infra.process import apply_environment
from infra.settings import EngineSettings
from ledger.registry import Registry
from schemas.adapters import AdapterManifest
from schemas.errors import SwitchyardError

log = ActionLog("gate")

# The adapter on trial and the zero adapter it is compared with.
SLOTS = 2

Make = Callable[[protocol.EngineKind, protocol.EngineSettings], Engine]


class CannotTry(SwitchyardError):
    """This gate cannot try adapters of this base now."""


class TrialBench:
    """One engine at a time, for the base that is asked for."""

    def __init__(
        self, settings: EngineSettings, registry: Registry, objects: Objects, cache: Path, make: Make = make_engine
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._objects = objects
        self._cache = cache
        self._make = make
        self._engine: Engine | None = None
        self._base: str | None = None
        # The build that ran last; it stays when the engine is stopped, for the report.
        self.engine_id = "none"

    @property
    def started(self) -> bool:
        return self._engine is not None

    async def stop(self) -> None:
        engine, self._engine, self._base = self._engine, None, None
        if engine is not None:
            await engine.stop()
            log.info("engine.stopped")

    async def try_adapter(self, manifest: AdapterManifest) -> Trial:
        """Load an adapter, ask it and the base the same questions, and take it out again.

        A fault of the adapter is a problem of the trial. Raises CannotTry, BaseMismatch, EngineError, ObjectStoreDown.
        """
        engine = await self._engine_for(manifest.base)
        zero = self._registry.adapters[self._registry.bases[manifest.base].zero_adapter].manifest
        if zero is None:
            raise CannotTry("the base has no zero adapter")
        try:
            artifact = await self._artifact(manifest)
        except (ArtifactBroken, ObjectUnknown, ObjectCorrupt) as error:
            return Trial(problems=(f"the stored files are not those of the manifest: {error}",))
        await engine.load(await self._artifact(zero))
        try:
            loaded = await engine.load(artifact)
        except LoadFailed as error:
            return Trial(problems=(f"the engine refused to load it: {error}",))
        try:
            answers, base_answers = await self._ask_both(engine, manifest.digest, zero.digest)
        except EngineFault as error:
            return Trial(load_ms=round(loaded.duration_ms), problems=(f"the engine failed under it: {error.reason}",))
        finally:
            await engine.unload(manifest.digest)
        return Trial(
            load_ms=round(loaded.duration_ms),
            resident_bytes=loaded.bytes,
            answers=answers,
            base_answers=base_answers,
        )

    async def _engine_for(self, base: str) -> Engine:
        if self._engine is not None and self._base == base and self._engine.healthy():
            return self._engine
        await self.stop()
        pools = [pool for pool in self._registry.pools.values() if pool.base == base]
        if base not in self._registry.bases or not pools:
            raise CannotTry(f"no pool serves base {base}")
        manifest = self._registry.bases[base].manifest
        directory = self._settings.base or Path()
        if self._settings.kind != "fake":
            directory = await asyncio.to_thread(find_base, directory, manifest)
        apply_environment(engine_environment())
        engine = self._make(
            self._settings.kind or default_kind(self._settings.device),
            protocol.EngineSettings(
                base_dir=directory,
                device=self._settings.device,
                slots=SLOTS,
                rows=SLOTS * len(questions()),
                rank_max=max(pool.rank_max for pool in pools),
                context_max=min(self._settings.context_max, *(pool.context_max for pool in pools)),
                kv_bytes=self._settings.kv_bytes,
                fake_step_ms=self._settings.step_ms,
            ),
        )
        self._engine, self._base, self.engine_id = engine, base, engine.build.id
        try:
            await engine.start()
        except EngineDead as error:
            raise CannotTry(f"the engine does not start: {error}") from error
        log.info("engine.started", engine=engine.build.id, base=base)
        return engine

    async def _artifact(self, manifest: AdapterManifest) -> Artifact:
        path = await fetch_artifact(self._objects, manifest, self._cache)
        size = sum(entry.size for entry in manifest.files)
        return Artifact(digest=manifest.digest, path=path, rank=manifest.rank, bytes=size)

    async def _ask_both(self, engine: Engine, digest: str, zero: str) -> tuple[list[Answer], list[Answer]]:
        if not engine.build.mixes_adapters:
            return await self._ask(engine, digest), await self._ask(engine, zero)
        # Both at once: an adapter that only works alone does not work.
        asked = len(questions())
        answers = await self._ask(engine, digest, zero)
        return answers[:asked], answers[asked:]

    async def _ask(self, engine: Engine, *digests: str) -> list[Answer]:
        """The answers to all questions, digest by digest. Waits for every one, so that none runs on after a fault."""
        asked = [(digest, number) for digest in digests for number in range(len(questions()))]
        answers = await asyncio.gather(*(self._answer(engine, *one) for one in asked), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _answer(self, engine: Engine, digest: str, number: int) -> Answer:
        request = EngineRequest(
            request_id=f"gate-{secrets.token_hex(8)}",
            digest=digest,
            prompt_ids=engine.encode(questions()[number]),
            max_tokens=ANSWER_TOKENS,
            # Never the same twice: a trial must not be answered from another one's cache.
            cache_salt=secrets.token_hex(16),
            temperature=0.0,
        )
        return tuple([token async for delta in engine.generate(request) for token in delta.token_ids])
