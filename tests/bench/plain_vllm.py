"""The peer of the cold tenant: plain vLLM under its own first-come, first-served scheduler, with nothing around it."""

import random
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict

from consumers.engines.protocol import EngineSettings
from consumers.engines.select import engine_environment
from consumers.engines.vllm import engine_args
from infra.process import apply_environment

COLD = "cold"


class PlainTrace(BaseModel):
    """Hot adapters that clients call in a closed loop, and a cold one that is asked for once they are warm."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base: Path
    hot: tuple[Path, ...]
    cold: Path
    clients: int
    tokens_min: int
    tokens_max: int
    cold_tokens: int
    seed: int
    prompt: str
    warm_s: float
    give_up_s: float
    context_max: int


class PlainAnswer(BaseModel):
    """The cold one's first token; where it starved, for how long it was waited for."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    first_token_s: float
    starved: bool


class Trace:
    """Drives vLLM's own engine. `Any` stands for its classes."""

    def __init__(self, trace: PlainTrace) -> None:
        from vllm import EngineArgs, LLMEngine

        self._trace = trace
        self._dice = [random.Random(trace.seed + number) for number in range(trace.clients)]
        settings = EngineSettings(
            base_dir=trace.base,
            slots=len(trace.hot),
            rows=trace.clients,
            rank_max=8,
            context_max=trace.context_max,
            kv_bytes=32 << 20,
            host_adapters_max=2 * len(trace.hot),
        )
        self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**engine_args(settings)), enable_multiprocessing=False)
        self._sent = 0

    def run(self) -> PlainAnswer:
        for client in range(self._trace.clients):
            self._ask_hot(client)
        warm_until = monotonic() + self._trace.warm_s
        while monotonic() < warm_until:
            self._step()
        asked_at = monotonic()
        self._ask(COLD, len(self._trace.hot), self._trace.cold, self._trace.cold_tokens)
        while (waited := monotonic() - asked_at) < self._trace.give_up_s:
            if self._step():
                return PlainAnswer(first_token_s=monotonic() - asked_at, starved=False)
        return PlainAnswer(first_token_s=waited, starved=True)

    def _step(self) -> bool:
        """One step; each client that has its answer asks again. True where the cold one had a token."""
        served = False
        for output in self._llm.step():
            name = output.request_id.partition("/")[0]
            served = served or name == COLD
            if output.finished and name != COLD:
                self._ask_hot(int(name))
        return served

    def _ask_hot(self, client: int) -> None:
        tokens = self._dice[client].randint(self._trace.tokens_min, self._trace.tokens_max)
        number = client % len(self._trace.hot)
        self._ask(str(client), number, self._trace.hot[number], tokens)

    def _ask(self, name: str, number: int, adapter: Path, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._sent += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        lora = LoRARequest(adapter.name, number + 1, str(adapter))
        self._llm.add_request(f"{name}/{self._sent}", self._trace.prompt, sampling, lora_request=lora)


def main() -> None:
    asked, answered = map(Path, sys.argv[1:])
    apply_environment(engine_environment())
    answer = Trace(PlainTrace.model_validate_json(asked.read_bytes())).run()
    answered.write_text(answer.model_dump_json())


if __name__ == "__main__":
    main()
