"""The company in which a request took its first step. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from consumers.engines.backend import Output, Outputs
from consumers.engines.protocol import Delta, EngineRequest
from schemas.service import Batch


class Steps:
    """Numbers an engine's steps and remembers who runs under which digest until the end of its request."""

    def __init__(self) -> None:
        self._number = 0
        self._digests: dict[str, str] = {}
        # Those of them that have had no token yet. A request is in here from its start to its first token,
        self._waiting: set[str] = set()
        # and then in here until its first delta is delivered.
        self._batches: dict[str, Batch] = {}

    def begin(self, request: EngineRequest) -> None:
        self._digests[request.request_id] = request.digest
        self._waiting.add(request.request_id)

    def end(self, request_id: str) -> None:
        self._digests.pop(request_id, None)
        self._waiting.discard(request_id)
        self._batches.pop(request_id, None)

    def count(self, request_ids: Iterable[str]) -> None:
        """One more step, and the requests that had a token of it. Those that ended meanwhile are no company."""
        self._number += 1
        served = [request_id for request_id in request_ids if request_id in self._digests]
        first = self._waiting.intersection(served)
        if first:
            digests = {self._digests[request_id] for request_id in served}
            batch = Batch(number=self._number, rows=len(served), adapters=len(digests))
            self._batches |= dict.fromkeys(first, batch)
            self._waiting -= first

    def number(self, outputs: Outputs) -> Outputs:
        """The outputs of one more step, with their batch on each first delta."""
        self.count(request_id for request_id, item in outputs if isinstance(item, Delta) and item.token_ids)
        return [self.numbered(output) for output in outputs]

    def numbered(self, output: Output) -> Output:
        """An output of a step that was counted, or of several: with the batch of its request's first token."""
        request_id, item = output
        if isinstance(item, Delta) and item.token_ids and request_id in self._batches:
            item = replace(item, batch=self._batches.pop(request_id))
        if not isinstance(item, Delta) or item.finish_reason is not None:
            self.end(request_id)
        return request_id, item
