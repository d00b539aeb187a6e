"""OpenAI's batch format: a line of it to a job of ours, a final reply to a line of it. No door, no clock."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from schemas.errors import InvalidRecord
from schemas.jobs import Outcome, RejectReason
from schemas.record import Value, describe, strict_json
from schemas.replies import FinalReply, JobCompleted, JobRejected, Usage

CUSTOM_ID_CHARACTERS_MAX = 512
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
# OpenAI's words for lines that failed otherwise than with an HTTP status.
ENDED_WITHOUT_RESPONSE: dict[str, str] = {
    "cancelled": "batch_cancelled",
    Outcome.EXPIRED: "batch_expired",
    RejectReason.DEADLINE_PASSED: "batch_expired",
}
STATUS: dict[str, int] = {
    RejectReason.UNKNOWN_ALIAS: 404,
    RejectReason.JOB_ID_REUSED: 409,
    RejectReason.TENANT_MISMATCH: 403,
    RejectReason.CLASS_NOT_GRANTED: 403,
    RejectReason.IMPERSONATION: 403,
    Outcome.REVOKED: 403,
    Outcome.INTERRUPTED: 503,
    Outcome.FAILED: 500,
}
BAD_REQUEST = 400
CODE: dict[str, str] = {RejectReason.UNKNOWN_ALIAS: "model_not_found"}


class Part(Value):
    """A piece of a message's content. Only text is understood."""

    type: Literal["text"]
    text: str


class Turn(Value):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[Part, ...]

    def fields(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Body(Value):
    """What both endpoints take. A parameter that would change the answer and is not understood is refused."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None

    def fields(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
        }  # fmt: skip
        return {
            "alias": self.model,
            "parameters": {name: value for name, value in sampling.items() if value is not None},
        }


class ChatBody(Body):
    """The body of a chat completion."""

    messages: tuple[Turn, ...]
    max_completion_tokens: int | None = None
    logprobs: Literal[False] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    def fields(self) -> dict[str, Any]:
        fields = super().fields()
        if self.max_completion_tokens is not None:
            fields["parameters"]["max_tokens"] = self.max_completion_tokens
        return {**fields, "messages": tuple(turn.fields() for turn in self.messages)}


class CompletionBody(Body):
    """The body of a text completion."""

    prompt: str | tuple[str]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "prompt": self.prompt if isinstance(self.prompt, str) else self.prompt[0]}


class ChatLine(Value):
    """A line that asks for a chat completion."""

    custom_id: Annotated[str, Field(min_length=1, max_length=CUSTOM_ID_CHARACTERS_MAX)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: ChatBody


class CompletionLine(Value):
    """A line that asks for a text completion."""

    custom_id: Annotated[str, Field(min_length=1, max_length=CUSTOM_ID_CHARACTERS_MAX)]
    method: Literal["POST"]
    url: Literal["/v1/completions"]
    body: CompletionBody


Line = ChatLine | CompletionLine


class BadLine(InvalidRecord):
    """A line of a batch file cannot be a job. `custom_id` where one could be read, `param` where one is to blame."""

    def __init__(self, message: str, custom_id: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.param = param


def parse_line(content: bytes) -> Line:
    """Raises BadLine with a sentence that says what to mend."""
    if not content.strip():
        raise BadLine("the line is empty")
    try:
        document = strict_json(content)
    except InvalidRecord as error:
        raise BadLine(str(error).replace("the record", "the line")) from error
    if not isinstance(document, dict):
        raise BadLine("the line is not a JSON object")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or len(custom_id) > CUSTOM_ID_CHARACTERS_MAX:
        custom_id = None
    kinds: dict[Any, type[ChatLine | CompletionLine]] = {CHAT: ChatLine, COMPLETION: CompletionLine}
    url = document.get("url")
    if not isinstance(url, str) or url not in kinds:
        raise BadLine(f"'url' must be {CHAT} or {COMPLETION}", custom_id, "url")
    try:
        return kinds[url].model_validate_json(content)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]).removeprefix("body.")
        raise BadLine(describe(error), custom_id, where) from error


@dataclass(frozen=True)
class Origin:
    """Which line of which file asked for a job."""

    number: int
    custom_id: str | None
    url: str = CHAT
    model: str = ""


def answer_line(origin: Origin, job_id: str, reply: FinalReply, created_s: int) -> tuple[bool, dict[str, Any]]:
    """(whether it completed, the line for the output or error file)."""
    if isinstance(reply, JobCompleted):
        return True, _line(
            origin, job_id, response=_response(200, job_id, _completion(origin, job_id, reply, created_s))
        )
    reason = reply.reason if isinstance(reply, JobRejected) else reply.outcome
    own_code = None if isinstance(reply, JobRejected) else reply.code
    if reason in ENDED_WITHOUT_RESPONSE:
        return False, _line(origin, job_id, error={"code": ENDED_WITHOUT_RESPONSE[reason], "message": reply.message})
    status = STATUS.get(reason, BAD_REQUEST)
    code = own_code or CODE.get(reason, reason.value)
    return False, refusal_line(origin, job_id, status, reply.message, code=code)


def refusal_line(
    origin: Origin, job_id: str, status: int, message: str, *, param: str | None = None, code: str = "invalid_line"
) -> dict[str, Any]:
    """An error line in the form of an HTTP response, with the line's number in it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code, "line": origin.number}
    return _line(origin, job_id, response=_response(status, job_id, {"error": error}))


def usage_of(line: dict[str, Any]) -> Usage:
    """The tokens that an output line names; none for an error line."""
    found = ((line.get("response") or {}).get("body") or {}).get("usage") or {}
    return Usage(prompt_tokens=found.get("prompt_tokens", 0), completion_tokens=found.get("completion_tokens", 0))


def _line(origin: Origin, job_id: str, response: Any = None, error: Any = None) -> dict[str, Any]:
    return {"id": f"batch_req_{job_id}", "custom_id": origin.custom_id, "response": response, "error": error}


def _response(status: int, job_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": job_id, "body": body}


def _completion(origin: Origin, job_id: str, reply: JobCompleted, created_s: int) -> dict[str, Any]:
    chat = origin.url == CHAT
    said = {"message": {"role": "assistant", "content": reply.text}} if chat else {"text": reply.text}
    used = reply.usage
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{job_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created_s,
        "model": origin.model,
        "choices": [{"index": 0, **said, "finish_reason": reply.finish_reason.value, "logprobs": None}],
        "usage": {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        },
        "switchyard": {"receipt": reply.receipt.model_dump(mode="json")},
    }
