"""The JSON of answers, field for field as OpenAI's: whole, and in chunks. Pure; knows no HTTP, no clock.

stream of one choice:  opening (role, or echoed prompt) | text .. | finish_reason
stream of a request:   its choices' chunks interleaved  | usage, where asked for
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.gateway.choices import Delta, Usage
from headrace.gateway.generation import FinishReason
from headrace.protocol.messages import Tier

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One choice of a whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class Shape(Protocol):
    """One request's answer, however it is sent."""

    @property
    def request_id(self) -> str: ...

    def whole(self, choices: Sequence[Finished], usage: Usage) -> Json: ...

    def opening(self, index: int) -> list[Json]:
        """Chunks before the first text of a choice."""
        ...

    def chunks(self, delta: Delta) -> list[Json]: ...

    def usage_chunk(self, usage: Usage) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """/v1/completions; `service_tier` is OpenAI's of chats alone. `echoes`: what goes before each choice's text."""

    request_id: str
    created: int
    model: str
    include_usage: bool
    include_token_ids: bool
    service_tier: str
    echoes: Sequence[str]

    def whole(self, choices: Sequence[Finished], usage: Usage) -> Json:
        told = [
            self._choice(index, self.echoes[index] + choice.text, choice.token_ids, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._head(), "choices": told, "usage": usage_json(usage)}

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(self._choice(index, self.echoes[index]))] if self.echoes[index] else []

    def chunks(self, delta: Delta) -> list[Json]:
        token_ids = delta.token_ids if self.include_token_ids else ()
        if not delta.text and not token_ids and delta.finish_reason is None:
            return []
        return [self._chunk(self._choice(delta.index, delta.text, token_ids, delta.finish_reason))]

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head(), "choices": [], "usage": usage_json(usage)}

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int] = (), finish_reason: FinishReason | None = None
    ) -> Json:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**choice, **_token_ids(token_ids, self.include_token_ids)}

    def _chunk(self, choice: Json) -> Json:
        return {**self._head(), "choices": [choice], **({"usage": None} if self.include_usage else {})}

    def _head(self) -> Json:
        return {
            "id": self.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """/v1/chat/completions."""

    request_id: str
    created: int
    model: str
    include_usage: bool
    include_token_ids: bool
    service_tier: str

    def whole(self, choices: Sequence[Finished], usage: Usage) -> Json:
        told = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                **_token_ids(choice.token_ids, self.include_token_ids),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head("chat.completion"), "choices": told, "usage": usage_json(usage)}

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def chunks(self, delta: Delta) -> list[Json]:
        token_ids = delta.token_ids if self.include_token_ids else ()
        said = [self._chunk(delta.index, {"content": delta.text}, token_ids)] if delta.text or token_ids else []
        last = [self._chunk(delta.index, {}, finish_reason=delta.finish_reason)] if delta.finish_reason else []
        return said + last

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_json(usage)}

    def _chunk(
        self, index: int, delta: Json, token_ids: Sequence[int] = (), finish_reason: FinishReason | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        choice |= _token_ids(token_ids, self.include_token_ids)
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": None,
        }


def _token_ids(token_ids: Sequence[int], wanted: bool) -> Json:
    """return_token_ids, as vLLM has it; but a stop token is among them only where it is text. With a stop string: up
    to the token that completed it."""
    return {"token_ids": list(token_ids)} if wanted else {}


def service_tier_of(tier: Tier) -> str:
    """As answers name the tier that was used."""
    return "flex" if tier == "flex" else "default"


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_json(model: str, created: int) -> Json:
    return {"id": model, "object": "model", "created": created, "owned_by": "headrace"}
