"""A request's way in: from the bytes of its body to prompts of token ids. Pure; slow for long ones: fit for a thread.

Here, and nowhere else, is text made into tokens: a chat template is rendered once, a prompt tokenised once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.gateway.front.chat import ChatTemplate
from headrace.gateway.front.choices import PromptTokens
from headrace.gateway.front.openai_errors import Refused
from headrace.gateway.front.openai_fields import Prompt
from headrace.gateway.front.openai_requests import ChatRequest, CompletionRequest, read_request
from headrace.gateway.front.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The model that is served, as far as requests must suit it. `template` is None where it is no chat model."""

    model: str
    vocabulary: Vocabulary
    template: ChatTemplate | None

    def take_completion(self, raw: bytes, longest: int) -> tuple[CompletionRequest, list[PromptTokens]]:
        """The request and its prompts. A text of more than `longest` tokens for certain is not even tokenised."""
        asked = read_request(raw, CompletionRequest)
        self.require_model(asked.model)
        fields = [f"prompt[{nth}]" for nth in range(len(asked.prompt))] if len(asked.prompt) > 1 else ["prompt"]
        return asked, [
            self._plain_prompt(prompt, field, longest, echo=asked.echo)
            for prompt, field in zip(asked.prompt, fields, strict=True)
        ]

    def take_chat(self, raw: bytes, longest: int) -> tuple[ChatRequest, list[PromptTokens]]:
        """The request and its one prompt."""
        asked = read_request(raw, ChatRequest)
        self.require_model(asked.model)
        if self.template is None:
            raise InputError("messages", f"{self.model} has no chat template: /v1/completions takes plain text")
        text = self.template.render(asked.turns())
        # The template says itself how the text begins: the tokenizer must not put a second BOS before it.
        token_ids = self._encoded(text, "messages", longest, with_specials=False)
        return asked, [PromptTokens(field="messages", token_ids=token_ids)]

    def require_model(self, name: str) -> None:
        if name != self.model:
            message = f"must be {self.model!r}, the only model here, is {name[:256]!r}"
            raise Refused("model", message, status=404, code="model_not_found")

    def _plain_prompt(self, prompt: Prompt, field: str, longest: int, *, echo: bool) -> PromptTokens:
        if isinstance(prompt, str):
            token_ids, text = self._encoded(prompt, field, longest, with_specials=True), prompt
        else:
            self.vocabulary.require_known(prompt, field)
            # One that is longer is refused in a moment: decoding megabytes of it for an echo would hold up others.
            token_ids, text = _not_empty(prompt, field), self.vocabulary.decode(prompt[:longest]) if echo else ""
        return PromptTokens(field=field, token_ids=token_ids, echo=text if echo else "")

    def _encoded(self, text: str, field: str, longest: int, *, with_specials: bool) -> tuple[int, ...]:
        most_characters = longest * self.vocabulary.longest_token
        if len(text) > most_characters:
            raise InputError(
                field,
                f"must be at most {longest} tokens, which is never more than {most_characters} characters; "
                f"has {len(text)}",
            )
        return _not_empty(self.vocabulary.encode(text, with_specials=with_specials), field)


def _not_empty(token_ids: Sequence[int], field: str) -> tuple[int, ...]:
    if not token_ids:
        raise InputError(field, "must have at least 1 token, has 0")
    return tuple(token_ids)
