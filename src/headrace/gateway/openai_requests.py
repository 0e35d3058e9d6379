"""What clients may ask: bodies of /v1/completions and /v1/chat/completions, checked field by field. Pure.

Nothing is silently ignored that would change the answer: a field that is not served is refused by its name, unless it
asks for what is done anyway (`NEUTRAL`) or concerns nobody here (`IGNORED`). null means the same as leaving it out.
Errors are InputErrors whose field is the path in the body: messages[1].content.
"""

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, from_json

from headrace.errors import InputError
from headrace.gateway.chat import ChatMessage
from headrace.gateway.openai_fields import Prompt, WrongValue, parse_content, parse_prompts, parse_stops, shown
from headrace.protocol.messages import Tier

MAX_GENERATIONS = 16  # of one request: prompts times n
MAX_MESSAGES = 2048
MAX_STOP_TOKEN_IDS = 64
MAX_FIELDS = 64  # of an object: 10 MB of unknown ones took 900 MB and 3 s of everybody's time to be refused one by one

IGNORED = (
    *("user", "metadata", "store", "parallel_tool_calls", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "suffix": ("",),
}
NEUTRAL_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {"tool_calls": ([],), "annotations": ([],)}
"""As answers have them that are sent back."""

Asked = TypeVar("Asked", bound="SharedFields")


# ---- bodies ----------------------------------------------------------------------------------------------------


class StrictFields(BaseModel):
    """No field that is not declared, and no "1" for 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(StrictFields):
    include_usage: bool = False
    include_obfuscation: bool = False  # pads chunks against guesses from their sizes; there is no padding here


class SharedFields(StrictFields):
    """What both kinds of request have. top_k, stop_token_ids, ignore_eos, return_token_ids and
    deadline_s are extensions."""

    default_tokens: ClassVar[int | None] = None  # of output; None: as many as fit

    model: str
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)  # 0 and -1: all
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stops)] = ()
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: int = Field(default=1, ge=1, le=MAX_GENERATIONS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex"] = "auto"
    deadline_s: float | None = Field(default=None, gt=0)

    @property
    def tier(self) -> Tier:
        return "flex" if self.service_tier == "flex" else "interactive"

    @property
    def max_tokens_field(self) -> str:
        """The name under which the client limits the output."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def most_tokens(self) -> int | None:
        """As asked, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """What concerns two fields at once."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options", "is for streams only: stream must be true")
        if self.max_tokens is not None and self.max_completion_tokens not in {None, self.max_tokens}:
            raise InputError(
                "max_completion_tokens", f"must be max_tokens ({self.max_tokens}), is {self.max_completion_tokens}"
            )


class CompletionRequest(SharedFields):
    default_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Annotated[list[Prompt], PlainValidator(parse_prompts)]
    echo: bool = False
    best_of: int | None = None

    def check(self) -> None:
        SharedFields.check(self)
        if self.best_of not in {None, self.n}:
            raise InputError("best_of", f"is not supported: must be n ({self.n}), is {self.best_of}")
        num_prompts = len(self.prompt)
        if num_prompts * self.n > MAX_GENERATIONS:
            field = "prompt" if num_prompts > MAX_GENERATIONS else "n"
            raise InputError(field, f"prompts times n must be at most {MAX_GENERATIONS}, is {num_prompts} * {self.n}")


class Turn(StrictFields):
    """One message. A developer's is a system message to the models, which know no other."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(parse_content)]
    name: str | None = Field(default=None, max_length=64)


class ChatRequest(SharedFields):
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)

    def turns(self) -> list[ChatMessage]:
        return [
            ChatMessage(role="system" if turn.role == "developer" else turn.role, content=turn.content, name=turn.name)
            for turn in self.messages
        ]


# ---- reading ---------------------------------------------------------------------------------------------------


def read_request(raw: bytes, kind: type[Asked]) -> Asked:
    """Raises InputError naming the field, or `body` where it is no JSON object."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InputError("body", f"must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise InputError("body", f"must be a JSON object, is {shown(body)}")
    _require_few_fields("body", body)
    _require_few_fields("stream_options", body.get("stream_options"))
    body = {
        name: value for name, value in body.items() if name not in IGNORED and not _says_nothing(name, value, NEUTRAL)
    }
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [_without_neutral(nth, message) for nth, message in enumerate(messages)]
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _input_error(error.errors(include_url=False)[0]) from error
    request.check()
    return request


def _require_few_fields(path: str, value: object) -> None:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise InputError(path, f"must have at most {MAX_FIELDS} fields, has {len(value)}")


def _without_neutral(nth: int, message: object) -> object:
    if not isinstance(message, dict):
        return message
    _require_few_fields(f"messages[{nth}]", message)
    return {name: value for name, value in message.items() if not _says_nothing(name, value, NEUTRAL_IN_MESSAGES)}


def _says_nothing(name: str, value: object, neutral: Mapping[str, tuple[object, ...]]) -> bool:
    # By type too: logprobs 0 asks for something, and False == 0.
    return value is None or any(type(value) is type(one) and value == one for one in neutral.get(name, ()))


def _input_error(details: ErrorDetails) -> InputError:
    """Of the first thing that is wrong, in the words of this house."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in details["loc"])
    path = "".join(steps).removeprefix(".")
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, WrongValue):
        return InputError(path + cause.path, str(cause))
    if details["type"] == "missing":
        return InputError(path, "is required")
    if details["type"] == "extra_forbidden":
        neutral = {**NEUTRAL, **NEUTRAL_IN_MESSAGES}.get(str(details["loc"][-1]), ())
        return InputError(path, "is not supported" + (f", only {json.dumps(neutral[0])} is" if neutral else ""))
    if details["type"] == "model_type":
        return InputError(path, f"must be an object, is {shown(details['input'])}")
    message = details["msg"].replace("Input should be", "must be").replace("List should have", "must have")
    return InputError(path, f"{message}, is {shown(details['input'])}")
