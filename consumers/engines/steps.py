"""The company in which a request took its first step. Pure."""

from dataclasses import replace

from consumers.engines.backend import Output, Outputs
from consumers.engines.protocol import Delta, EngineRequest
from schemas.service import Batch


class Steps:
    """Numbers an engine's steps and remembers who runs under which digest until the end of its request."""

    def __init__(self) -> None:
        self._number = 0
        self._digests: dict[str, str] = {}
        # Those of them that have had no token yet. A request is in here from its start to its first token.
        self._waiting: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        self._digests[request.request_id] = request.digest
        self._waiting.add(request.request_id)

    def end(self, request_id: str) -> None:
        self._digests.pop(request_id, None)
        self._waiting.discard(request_id)

    def number(self, outputs: Outputs) -> Outputs:
        """The outputs of one more step, with their batch on each first delta."""
        self._number += 1
        served = [request_id for request_id, item in outputs if isinstance(item, Delta) and item.token_ids]
        digests = {self._digests[request_id] for request_id in served if request_id in self._digests}
        batch = Batch(number=self._number, rows=len(served), adapters=len(digests))
        return [self._numbered(output, batch) for output in outputs]

    def _numbered(self, output: Output, batch: Batch) -> Output:
        request_id, item = output
        if isinstance(item, Delta) and item.token_ids and request_id in self._waiting:
            self._waiting.remove(request_id)
            item = replace(item, batch=batch)
        if not isinstance(item, Delta) or item.finish_reason is not None:
            self.end(request_id)
        return request_id, item
