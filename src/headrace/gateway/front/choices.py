"""The choices of one request, from prompts to their last token: planned first, then run side by side. Knows no HTTP.

Each choice is a Generation of its own. Its tokens become text here, its stop strings end it here; what the rest of the
gateway hears of it are Deltas, in order, the last one with a finish_reason, and one Usage for all. When one choice
fails, the others are aborted: an answer is whole or it is an error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from headrace.errors import InputError
from headrace.gateway.budgets import Terms
from headrace.gateway.front.openai_requests import SharedFields
from headrace.gateway.front.text import ChoiceText
from headrace.gateway.front.vocabulary import Vocabulary
from headrace.gateway.generation import Dispatch, FinishReason, Generation, GenerationFailed
from headrace.protocol.control import Sampling


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, ready. `field` is where it stands in the request's body, `echo` what a client that wants it back
    is sent before each of its choices."""

    field: str
    token_ids: tuple[int, ...]
    echo: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`index` among all choices of the request, `prompt` among its prompts. `fields` are the client's names of what
    the dispatch side may find wrong."""

    index: int
    prompt: int
    fields: Mapping[str, str]
    generation: Generation
    stops: tuple[str, ...]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """More of one choice: tokens, and the text that is certain by now, possibly none."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """By one choice."""

    num_tokens: int
    cached_tokens: int


Tell = Callable[[Delta], Awaitable[None]]


def plan_choices(
    asked: SharedFields,
    prompts: Sequence[PromptTokens],
    *,
    terms: Terms,
    request_id: str,
    seed: int,
    vocabulary: Vocabulary,
    longest: int,
    most_deadline_s: float,
) -> list[Choice]:
    """One for every prompt and each of its n, in this order. Raises InputError.

    `seed` is for a request that names none; `longest` is what prompt and output may be together.
    """
    vocabulary.require_known(asked.stop_token_ids, "stop_token_ids")
    if asked.deadline_s is not None and asked.deadline_s > most_deadline_s:
        raise InputError("deadline_s", f"must be at most {most_deadline_s:g} s, is {asked.deadline_s:g}")
    eos = () if asked.ignore_eos else vocabulary.eos_token_ids
    stop_token_ids = tuple(dict.fromkeys((*eos, *asked.stop_token_ids)))
    numbered = [(nth, prompt) for nth, prompt in enumerate(prompts) for _ in range(asked.n)]
    return [
        Choice(
            index=index,
            prompt=nth,
            fields={"prompt": prompt.field, "max_tokens": asked.max_tokens_field},
            stops=asked.stop,
            generation=Generation(
                request_id=f"{request_id}-{index}",
                token_ids=prompt.token_ids,
                max_tokens=_max_tokens(asked, longest - len(prompt.token_ids)),
                sampling=Sampling(
                    temperature=asked.temperature,
                    top_k=max(0, asked.top_k),
                    top_p=asked.top_p,
                    seed=(seed if asked.seed is None else asked.seed) % 2**63,
                    choice=index,
                ),
                stop_token_ids=stop_token_ids,
                tier=terms.tier,
                budget=terms.budget,
                deadline_s=asked.deadline_s or most_deadline_s,
            ),
        )
        for index, (nth, prompt) in enumerate(numbered)
    ]


def _max_tokens(asked: SharedFields, room: int) -> int | None:
    """As asked, or the default, which is never what makes a request too long."""
    if asked.most_tokens is not None or asked.default_tokens is None:
        return asked.most_tokens
    return min(asked.default_tokens, max(1, room))


async def run_choices(choices: Sequence[Choice], dispatch: Dispatch, vocabulary: Vocabulary, tell: Tell) -> Usage:
    """All of them, side by side. Raises the first error of any, the others followed from it; cancelled, it aborts
    them all."""
    if len(choices) == 1:
        return _usage(choices, [await run_choice(choices[0], dispatch, vocabulary, tell)])
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_choice(choice, dispatch, vocabulary, tell)) for choice in choices]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return _usage(choices, [task.result() for task in running])


async def run_choice(choice: Choice, dispatch: Dispatch, vocabulary: Vocabulary, tell: Tell) -> Spent:
    """Tells a Delta for every Progress. At a stop string the generation is aborted before anything else. What the
    dispatch side finds wrong is told in the client's words."""
    text = ChoiceText(vocabulary, choice.stops)
    try:
        async with aclosing(dispatch.generate(choice.generation)) as stream:
            async for progress in stream:
                num_before = text.num_tokens
                piece, finish_reason = text.push(progress.token_ids), progress.finish_reason
                token_ids = progress.token_ids[: text.num_tokens - num_before]
                if finish_reason is not None:
                    piece += text.flush()
                if text.stopped or finish_reason is not None:
                    break
                await tell(Delta(index=choice.index, text=piece, token_ids=token_ids))
            else:
                raise GenerationFailed("its stream ended without a reason")
    except InputError as error:
        said = str(error).removeprefix(f"{error.field}: ")
        raise InputError(choice.fields.get(error.field, error.field), said) from error
    last: FinishReason | None = "stop" if text.stopped else finish_reason
    await tell(Delta(index=choice.index, text=piece, token_ids=token_ids, finish_reason=last))
    return Spent(
        num_tokens=text.num_tokens if text.stopped else progress.num_tokens,
        cached_tokens=progress.cached_tokens,
    )


def _usage(choices: Sequence[Choice], spent: Sequence[Spent]) -> Usage:
    prompts = {choice.prompt: len(choice.generation.token_ids) for choice in choices}
    # The second choice of a prompt may find what the first one computed: the fewest is what was there before.
    known: dict[int, int] = {}
    for choice, one in zip(choices, spent, strict=True):
        known[choice.prompt] = min(one.cached_tokens, known.get(choice.prompt, one.cached_tokens))
    return Usage(
        prompt_tokens=sum(prompts.values()),
        completion_tokens=sum(one.num_tokens for one in spent),
        cached_tokens=sum(known.values()),
    )
