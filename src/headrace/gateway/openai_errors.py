"""Every error as OpenAI's clients expect it: a status, and {"error": {message, type, param, code}}. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InputError
from headrace.gateway.generation import BudgetExceeded, GenerationFailed, Overloaded


class Refused(InputError):
    """A request that is wrong in a way that has a status or code of its own. `field` may be empty: no one field is."""

    def __init__(self, field: str, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(field, message)
        self.status = status
        self.code = code
        self.message = message


class ShuttingDown(Overloaded):
    """This gateway ends; another one, or the next one here, will serve."""

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down", status=503, retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error on its way out: as a response, or as an event of a stream that has begun."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    is_final: bool = False  # trying again does not help, whatever the status says
    more: Mapping[str, float] = field(default_factory=dict)  # for programs, what the message says to people

    def body(self) -> dict[str, Any]:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**told, **self.more}}

    def headers(self) -> Mapping[str, str]:
        if self.is_final:
            return {"x-should-retry": "false"}  # OpenAI's clients try a 429 again unless they are told not to
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def error_answer(error: BaseException) -> ErrorAnswer:
    """What a client is told; of an error that is ours, no more than that there was one."""
    match error:
        case Refused(field=field, status=status, code=code):
            message = str(error) if field else error.message
            return ErrorAnswer(
                status=status, message=message, type="invalid_request_error", param=field or None, code=code
            )
        case InputError(field=field):
            return ErrorAnswer(status=400, message=str(error), type="invalid_request_error", param=field)
        case BudgetExceeded(latency=latency):
            return ErrorAnswer(
                status=429,
                message=str(error),
                type="rate_limit_error",
                code=f"{latency}_budget_exceeded",
                retry_after_s=error.retry_after_s,
                is_final=error.retry_after_s is None,
                more={
                    f"predicted_{latency}_ms": round(error.predicted_s * 1e3, 1),
                    f"{latency}_budget_ms": round(error.budget_s * 1e3, 3),
                },
            )
        case Overloaded(status=429, retry_after_s=retry_after_s):
            return ErrorAnswer(
                status=429,
                message=str(error),
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=retry_after_s,
            )
        case Overloaded(status=status, retry_after_s=retry_after_s):
            return ErrorAnswer(
                status=status,
                message=str(error),
                type="server_error",
                code="service_unavailable",
                retry_after_s=retry_after_s,
            )
        case GenerationFailed(status=status):
            code = "deadline_exceeded" if status == 504 else "generation_failed"
            return ErrorAnswer(status=status, message=str(error), type="server_error", code=code)
    return ErrorAnswer(status=500, message="internal error", type="server_error", code="internal_error")
