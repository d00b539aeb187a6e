"""The engine contract on every engine: the fake, PEFT, vLLM in process, and vLLM in its own processes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import pytest_asyncio

from consumers.engines.fake import Faults
from consumers.engines.protocol import EngineKind
from consumers.engines.select import engine_environment
from tests.contracts.engine_rig import Rig, core_of
from tests.contracts.engine_rigs import fake_rig, real_rig
from tests.contracts.engine_suite import EngineContract, ThreadContract


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One engine per class: a real one takes half a minute to start."""
    kind: EngineKind = request.cls.kind
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        made = fake_rig(Faults()) if kind == "fake" else real_rig(kind, tmp_path_factory.mktemp(kind))
        await made.engine.start()
        yield made
        await made.engine.stop()


Marks = list[pytest.MarkDecorator]
REAL: Marks = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="class"),
    pytest.mark.timeout(300),
    # The libraries' own warnings are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


def raise_in_step(*_: object, **__: object) -> None:
    raise RuntimeError("told to fail")


class TestFake(ThreadContract):
    """The fake keeps the whole contract, so that a worker tested on it is tested."""

    pytestmark: ClassVar[Marks] = [pytest.mark.asyncio(loop_scope="class")]
    kind: EngineKind = "fake"

    @contextmanager
    def failing_steps(self, rig: Rig) -> Iterator[None]:
        core = core_of(rig)
        core._faults.step_errors = 1
        yield
        core._faults.step_errors = 0


class TestPeft(ThreadContract):
    """Transformers and PEFT."""

    pytestmark: ClassVar[Marks] = REAL
    kind: EngineKind = "peft"

    @contextmanager
    def failing_steps(self, rig: Rig) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_of(rig), "_model", raise_in_step)
            yield


class TestVllm(ThreadContract):
    """vLLM in this process."""

    pytestmark: ClassVar[Marks] = REAL
    kind: EngineKind = "vllm"

    @contextmanager
    def failing_steps(self, rig: Rig) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_of(rig)._llm.model_executor, "execute_model", raise_in_step)
            yield


class TestVllmAsync(EngineContract):
    """vLLM in its own processes."""

    pytestmark: ClassVar[Marks] = [*REAL, pytest.mark.slow]
    kind: EngineKind = "vllm-async"
