"""The gateway's HTTP routes: OpenAI's completions, chat completions and models, health, metrics. One event loop.

A request's way: body read (bounded) -> Intake: fields, template, tokens (long ones in a thread) -> choices planned ->
a WholeAnswer or StreamedAnswer runs them. This file knows paths and status codes; what happens is in those.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.gateway.admit import longest_sequence
from headrace.gateway.answers import ErrorResponse, StreamedAnswer, WholeAnswer, Work
from headrace.gateway.budgets import Terms
from headrace.gateway.choices import PromptTokens, Tell, Usage, plan_choices, run_choices
from headrace.gateway.connection import Bodies
from headrace.gateway.generation import Dispatch
from headrace.gateway.intake import Intake
from headrace.gateway.openai_answers import ChatShape, CompletionShape, Shape, model_json, service_tier_of
from headrace.gateway.openai_errors import Refused, error_answer
from headrace.gateway.openai_requests import SharedFields
from headrace.gateway.options import GatewayOptions

INLINE_BYTES = 4096  # of a body: some 3 ms of tokenising, no more may hold up everybody's tokens
NUM_LONG_AT_ONCE = 2  # longer bodies, in threads: a megabyte of text takes 100 MB while it is tokenised
UNKNOWN_TOKENS = 2**15  # taken for the longest prompt while no decoder has told its own
DELIVERY_S = 5.0  # after a generation's deadline, for its answer to reach the client

Taken = TypeVar("Taken")


def make_app(
    dispatch: Dispatch,
    intake: Intake,
    options: GatewayOptions,
    metrics_text: Callable[[], bytes],
    *,
    closing: asyncio.Event | None = None,
) -> FastAPI:
    """`closing`, once set, ends every request that still runs with an error."""
    routes = Routes(dispatch, intake, options, metrics_text, closing=closing or asyncio.Event())
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for path, method, route in (
        ("/v1/completions", "POST", routes.completions),
        ("/v1/chat/completions", "POST", routes.chat_completions),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{model:path}", "GET", routes.model),
        ("/health", "GET", routes.health),
        ("/metrics", "GET", routes.metrics),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.add_exception_handler(HeadraceError, answer_error)
    app.add_exception_handler(Exception, answer_bug)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_middleware(RequestIds)
    return app


class Routes:
    """What the routes share."""

    def __init__(
        self,
        dispatch: Dispatch,
        intake: Intake,
        options: GatewayOptions,
        metrics_text: Callable[[], bytes],
        *,
        closing: asyncio.Event,
    ) -> None:
        self._dispatch = dispatch
        self._intake = intake
        self._options = options
        self._metrics_text = metrics_text
        self._closing = closing
        self._started = int(time.time())
        self._bodies = Bodies()
        self._long = asyncio.Semaphore(NUM_LONG_AT_ONCE)

    async def completions(self, request: Request) -> Response:
        asked, prompts = await self._take(request, self._intake.take_completion)
        terms = self._options.tiers.terms(request.headers, asked.tier)
        shape = CompletionShape(
            request_id=_name(request, "cmpl"),
            created=int(time.time()),
            model=self._intake.model,
            include_usage=asked.include_usage,
            include_token_ids=asked.return_token_ids,
            service_tier=service_tier_of(terms.tier),
            echoes=[prompt.echo for prompt in prompts for _ in range(asked.n)],
        )
        return self._answer(asked, prompts, shape, terms)

    async def chat_completions(self, request: Request) -> Response:
        asked, prompts = await self._take(request, self._intake.take_chat)
        terms = self._options.tiers.terms(request.headers, asked.tier)
        shape = ChatShape(
            request_id=_name(request, "chatcmpl"),
            created=int(time.time()),
            model=self._intake.model,
            include_usage=asked.include_usage,
            include_token_ids=asked.return_token_ids,
            service_tier=service_tier_of(terms.tier),
        )
        return self._answer(asked, prompts, shape, terms)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [model_json(self._intake.model, self._started)]})

    async def model(self, model: str) -> Response:
        self._intake.require_model(model)
        return JSONResponse(model_json(model, self._started))

    async def health(self) -> Response:
        """Whether a request could be served now."""
        if self._dispatch.is_ready() and not self._closing.is_set():
            return JSONResponse({"status": "ok", "model": self._intake.model})
        if self._closing.is_set():
            reason = "the gateway is shutting down"
        elif self._dispatch.limits() is None:
            reason = "no decoder has announced itself"
        else:
            reason = "no instance takes requests now"
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def metrics(self) -> Response:
        return Response(self._metrics_text(), media_type=CONTENT_TYPE_LATEST)

    async def _take(self, request: Request, take: Callable[[bytes, int], Taken]) -> Taken:
        async with self._bodies.read(request) as raw:
            if len(raw) <= INLINE_BYTES:
                return take(raw, self._longest())
            async with self._long:
                if await request.is_disconnected():
                    raise ClientDisconnect
                return await asyncio.to_thread(take, raw, self._longest())

    def _longest(self) -> int:
        limits = self._dispatch.limits()
        return UNKNOWN_TOKENS if limits is None else longest_sequence(limits)

    def _answer(self, asked: SharedFields, prompts: Sequence[PromptTokens], shape: Shape, terms: Terms) -> Response:
        choices = plan_choices(
            asked,
            prompts,
            terms=terms,
            request_id=shape.request_id,
            seed=secrets.randbits(63),
            vocabulary=self._intake.vocabulary,
            longest=self._longest(),
            most_deadline_s=self._options.deadline_s,
        )

        def run(tell: Tell) -> Coroutine[Any, Any, Usage]:
            return run_choices(choices, self._dispatch, self._intake.vocabulary, tell)

        patience_s = choices[0].generation.deadline_s + DELIVERY_S
        work = Work(shape=shape, run=run, closing=self._closing, patience_s=patience_s)
        return StreamedAnswer(work, include_usage=asked.include_usage) if asked.stream else WholeAnswer(work)


# ---- errors and ids --------------------------------------------------------------------------------------------


async def answer_error(request: Request, error: Exception) -> Response:
    return ErrorResponse(error_answer(error))


async def answer_bug(request: Request, error: Exception) -> Response:
    """What is ours to mend; the server logs it. Answered from outside of RequestIds."""
    return ErrorResponse(error_answer(error), headers={"x-request-id": request.state.request_id})


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client left before its body was there, or read; the status is the one that proxies log for it."""
    return Response(status_code=499)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = {404: f"no such path: {path[:256]}", 405: f"{request.method} is not for {path[:256]}"}
    refused = Refused("", text.get(error.status_code, error.detail), status=error.status_code)
    return ErrorResponse(error_answer(refused), headers=error.headers)


def _name(request: Request, kind: str) -> str:
    """From now on the request's id, in its answer, its header and the log."""
    request.state.request_id = f"{kind}-{request.state.request_id}"
    return str(request.state.request_id)


class RequestIds:
    """Gives every request an id and every response its header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        await self._app(scope, receive, send_with_id)
