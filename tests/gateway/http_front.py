"""The gateway's HTTP side over a scripted dispatch: called without a network, or served on a free port in a thread."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from scripted_dispatch import LIMITS, Script, ScriptedDispatch, tokens
from starlette.types import ASGIApp
from tiny_vocabulary import byte_level_tokenizer, write_model

from headrace.gateway.app import make_app
from headrace.gateway.budgets import NO_TIERS, Tiers
from headrace.gateway.chat import load_chat_template
from headrace.gateway.connection import Closing
from headrace.gateway.intake import Intake
from headrace.gateway.options import GatewayOptions
from headrace.gateway.vocabulary import load_vocabulary
from headrace.protocol.control import Limits

MODEL = "mill"


def make_intake(directory: Path) -> Intake:
    vocabulary = load_vocabulary(write_model(directory, byte_level_tokenizer(), eos="<|im_end|>"))
    template = load_chat_template(directory, vocabulary.special_tokens)
    return Intake(model=MODEL, vocabulary=vocabulary, template=template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    intake: Intake
    dispatch: ScriptedDispatch
    closing: Closing
    app: ASGIApp
    runner: asyncio.Runner  # its loop is the server's

    def ids(self, text: str) -> list[int]:
        return self.intake.vocabulary.encode(text, with_specials=False)

    def says(self, text: str, **options: Any) -> None:
        """Every generation is answered with this text."""
        self.dispatch.script = lambda _: tokens(self.ids(text), **options)

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request, from beginning to end."""
        return self.runner.run(self._ask(method, path, **options))

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.ask("POST", path, json=body)

    def complete(self, prompt: Any = "The water", **fields: Any) -> httpx2.Response:
        return self.post("/v1/completions", **{"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: Any = "Why?", **fields: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", **{"model": MODEL, "messages": messages, **fields})

    async def _ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **options)


@contextmanager
def a_front(
    intake: Intake,
    script: Script = lambda _: (),
    *,
    limits: Limits | None = LIMITS,
    deadline_s: float = 600.0,
    tiers: Tiers = NO_TIERS,
) -> Iterator[Front]:
    dispatch = ScriptedDispatch(script, limits)
    options = GatewayOptions(
        control="ipc://unused", tokenizer=Path(), model=intake.model, deadline_s=deadline_s, tiers=tiers
    )
    closing = Closing()
    app = make_app(dispatch, intake, options, lambda: b"headrace_requests_total 7\n", closing=closing)
    with asyncio.Runner() as runner:
        yield Front(intake=intake, dispatch=dispatch, closing=closing, app=app, runner=runner)


def events_of(response: httpx2.Response) -> list[Any]:
    """The events of a stream; the last one, [DONE], as text."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.split("\n\n")
    assert lines[-1] == "" and all(line.startswith("data: ") for line in lines[:-1])
    contents = [line.removeprefix("data: ") for line in lines[:-1]]
    return [content if content == "[DONE]" else json.loads(content) for content in contents]


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The app behind a real server on a free port: its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
