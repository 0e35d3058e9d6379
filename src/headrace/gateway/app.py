"""The gateway's HTTP routes: OpenAI's completions, chat completions and models, health, metrics. One event loop.

A request's way: body read (bounded) -> Intake: fields, template, tokens (long ones in a thread) -> choices planned ->
a WholeAnswer or StreamedAnswer runs them. This file knows paths and status codes; what happens is in those.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.gateway.admit import longest_sequence
from headrace.gateway.answers import ErrorResponse, JsonResponse, StreamedAnswer, WholeAnswer, Work
from headrace.gateway.budgets import Terms
from headrace.gateway.choices import PromptTokens, Tell, Usage, plan_choices, run_choices
from headrace.gateway.connection import Bodies, Closing
from headrace.gateway.generation import Dispatch
from headrace.gateway.intake import Intake
from headrace.gateway.openai_answers import ChatShape, CompletionShape, Shape, model_json, service_tier_of
from headrace.gateway.openai_errors import Refused, error_answer
from headrace.gateway.openai_requests import SharedFields
from headrace.gateway.options import GatewayOptions

INLINE_BYTES = 4096  # of a body: some 3 ms of tokenising, no more may hold up everybody's tokens
NUM_LONG_AT_ONCE = 2  # longer bodies, in threads: a megabyte of text takes 100 MB while it is tokenised
UNKNOWN_TOKENS = 2**15  # taken for the longest prompt while no decoder has told its own
MODEL_PATHS = "/v1/models/"  # and a model's name, which may have slashes
DELIVERY_S = 5.0  # after a generation's deadline, for its answer to reach the client

Taken = TypeVar("Taken")
Route = Callable[[Request], Awaitable[ASGIApp]]


def make_app(
    dispatch: Dispatch,
    intake: Intake,
    options: GatewayOptions,
    metrics_text: Callable[[], bytes],
    *,
    closing: Closing | None = None,
) -> ASGIApp:
    """`closing`, once set, ends every request that still runs with an error."""
    return App(Routes(dispatch, intake, options, metrics_text, closing=closing or Closing()))


class App:
    """Gives every request an id, every response its header, and every error its answer. By itself: a framework's
    layers around each call, and around each event of a stream, took a twentieth of the gateway's time."""

    def __init__(self, routes: "Routes") -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = secrets.token_hex(16)
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                name = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            answer = await self._routes.answer(Request(scope, receive))
            await answer(scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                raise  # the server hangs up
            await _answer_of(error)(scope, receive, send_with_id)
            if not isinstance(error, HeadraceError | ClientDisconnect):
                raise  # ours to mend: the server logs it


class Routes:
    """Paths, and what they share."""

    def __init__(
        self,
        dispatch: Dispatch,
        intake: Intake,
        options: GatewayOptions,
        metrics_text: Callable[[], bytes],
        *,
        closing: Closing,
    ) -> None:
        self._dispatch = dispatch
        self._intake = intake
        self._options = options
        self._metrics_text = metrics_text
        self._closing = closing
        self._started = int(time.time())
        self._bodies = Bodies()
        self._long = asyncio.Semaphore(NUM_LONG_AT_ONCE)
        self._paths: dict[str, tuple[str, Route]] = {
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat_completions),
            "/v1/models": ("GET", self.models),
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.metrics),
        }

    async def answer(self, request: Request) -> ASGIApp:
        """What is to be sent, or runs first and then sends. Raises HeadraceError, ClientDisconnect."""
        method, path = request.scope["method"], request.scope["path"]
        allowed, route = self._paths.get(path) or ("GET", self.model)
        if route == self.model and not path.startswith(MODEL_PATHS):
            raise Refused("", f"no such path: {path[:256]}", status=404)
        if method != allowed:
            refused = Refused("", f"{method} is not for {path[:256]}", status=405)
            return ErrorResponse(error_answer(refused), headers={"allow": allowed})
        return await route(request)

    async def completions(self, request: Request) -> ASGIApp:
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

    async def chat_completions(self, request: Request) -> ASGIApp:
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

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [model_json(self._intake.model, self._started)]})

    async def model(self, request: Request) -> Response:
        model = request.scope["path"].removeprefix(MODEL_PATHS)
        self._intake.require_model(model)
        return JsonResponse(model_json(model, self._started))

    async def health(self, request: Request) -> Response:
        """Whether a request could be served now."""
        if self._dispatch.is_ready() and not self._closing.is_set():
            return JsonResponse({"status": "ok", "model": self._intake.model})
        if self._closing.is_set():
            reason = "the gateway is shutting down"
        elif self._dispatch.limits() is None:
            reason = "no decoder has announced itself"
        else:
            reason = "no instance takes requests now"
        return JsonResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def metrics(self, request: Request) -> Response:
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

    def _answer(self, asked: SharedFields, prompts: Sequence[PromptTokens], shape: Shape, terms: Terms) -> ASGIApp:
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


def _answer_of(error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it; what proxies log for a client that left
    return ErrorResponse(error_answer(error))


def _name(request: Request, kind: str) -> str:
    """From now on the request's id, in its answer, its header and the log."""
    state: dict[str, str] = request.scope["state"]
    state["request_id"] = f"{kind}-{state['request_id']}"
    return state["request_id"]
