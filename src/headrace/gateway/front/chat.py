"""A model's chat template: messages in, the marked-up prompt out. Knows no tokens, no requests; renders anywhere.

Templates come with the model and are run in a sandbox, with what they may expect there (Source: transformers,
utils/chat_template_utils.py): `raise_exception`, `strftime_now`, `tojson`, break and continue in loops, and blocks
marked `generation`. Messages are data to them, never template text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InputError
from headrace.gateway.front.vocabulary import read_json

# What a template can raise over messages that it cannot take, beside its own errors: it is code, written by others.
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `name` tells speakers of the same role apart, in templates that know it."""

    role: str
    content: str
    name: str | None = None


class ChatTemplate:
    """Compiled once; rendering keeps no state."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises InputError when `source` is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InputError("tokenizer", f"its chat template must be a jinja2 template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises InputError when the template refuses."""
        told = [_as_told(message) for message in messages]
        values = {"messages": told, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(self._special_tokens | values)
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
            raise InputError("messages", f"must suit the model's chat template: {error}") from error


def load_chat_template(directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """From chat_template.jinja, else tokenizer_config.json; None where the model has none (it is no chat model)."""
    try:
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        named = read_json(directory / "tokenizer_config.json").get("chat_template")
        if named is None:
            return None
        source = _default_of(named)
    except (OSError, ValueError) as error:
        raise InputError("tokenizer", f"{directory}/chat_template.jinja must be a text file: {error}") from error
    return ChatTemplate(source, special_tokens)


def _default_of(named: object) -> str:
    """The template itself, or the one called default of several: [{"name": .., "template": ..}, ..]."""
    if isinstance(named, list):
        by_name = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
        named = by_name.get("default")
    if not isinstance(named, str):
        raise InputError("tokenizer", "chat_template in tokenizer_config.json must be a template, or name a default")
    return named


def _as_told(message: ChatMessage) -> dict[str, str]:
    told = {"role": message.role, "content": message.content}
    return told if message.name is None else {**told, "name": message.name}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class GenerationBlock(Extension):
    """{% generation %} marks the assistant's part, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # the wall clock of the place is meant
