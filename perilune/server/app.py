"""The HTTP application: every route and every wrapper in one expression, plus the endpoints too small for a file."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.core.errors import PeriluneError, RequestError
from perilune.server import errors, metrics
from perilune.server.anthropic import messages
from perilune.server.batches.api import (
    batch_by_id,
    batches,
    cancel_batch,
    file_by_id,
    file_content,
    files,
    open_batches,
)
from perilune.server.batches.protocol import ENDPOINTS
from perilune.server.browsers import OwnPages
from perilune.server.call import current
from perilune.server.description.document import openapi
from perilune.server.limits import BodyBudget, Limit
from perilune.server.middleware import ApiKey, BodyLimit, ClientLimit, Observe, refuse
from perilune.server.openai.chat import chat_completions
from perilune.server.openai.completions import completions
from perilune.server.openai.protocol import ChatBody, DetokenizeBody, TokenizeBody, json_response
from perilune.server.page.page import page
from perilune.server.responses.api import (
    cancel_response,
    create_response,
    input_items,
    input_tokens,
    response_by_id,
)
from perilune.server.responses.background import Jobs
from perilune.server.responses.store import ResponseStore
from perilune.server.service import Service
from perilune.server.sse import CLIENT_GONE_STATUS, ClientGone
from perilune.server.turn import rendered, see

_ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


def build_app(service: Service) -> Starlette:
    """The application around a running engine, which the caller closes after its last request."""
    config = service.config
    max_body = config.max_body_mb << 20
    budget = BodyBudget(config.body_memory_mb << 20, max_body)
    clients = Limit(concurrent=config.client_concurrency, requests_per_minute=config.client_requests_per_minute)
    routes = [
        Route("/", page, methods=["GET"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", response_by_id, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
        Route("/v1/files", files, methods=["GET", "POST"]),
        Route("/v1/files/{id}", file_by_id, methods=["GET", "DELETE"]),
        Route("/v1/files/{id}/content", file_content, methods=["GET"]),
        Route("/v1/batches", batches, methods=["GET", "POST"]),
        Route("/v1/batches/{id}", batch_by_id, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
        Route("/v1/messages", messages.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/v1/usage", usage, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/health/ready", health, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/metrics", metrics_page, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Observe, service=service, paths={r.endpoint: r.path for r in routes}),
            Middleware(messages.ErrorShape),
            Middleware(OwnPages, keys=service.keys, host=config.host, origins=config.cors_origins),
            # Outside of ApiKey: a preflight has no key, and a page must be able to read an error.
            *_cors(config.cors_origins),
            *([Middleware(ClientLimit, limit=clients)] if clients.bounds else []),
            Middleware(ApiKey, keys=service.keys),
            Middleware(BodyLimit, limit=max_body, budget=budget),
        ],
        exception_handlers={
            PeriluneError: errors.handle,
            HTTPException: errors.handle,
            ClientDisconnect: gone,
            ClientGone: gone,
            Exception: errors.handle,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.refuse = functools.partial(refuse, service)
    app.state.responses = ResponseStore()
    app.state.jobs = Jobs(service)
    batched = {r.path: r.endpoint for r in routes if r.path in ENDPOINTS}
    app.state.batches = open_batches(service, batched, app)
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    methods = ("GET", "POST", "DELETE")
    shown = ("x-request-id", "retry-after")
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",), expose_headers=shown
    )
    return [cors]


async def gone(request: Request, error: Exception) -> Response:
    """Handles ClientGone: the client left before its answer was made."""
    return Response(status_code=CLIENT_GONE_STATUS)


def _describe(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "perilune",
        "max_model_len": service.engine.info.max_model_len,
        **service.text.described(service.engine.info),
        **service.engine.info.marks,
    }


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    allowed = current().account.grant.models
    data = [_describe(service)] if allowed is None or service.model in allowed else []
    if messages.VERSION in request.headers:
        return json_response(messages.model_page([messages.model(m) for m in data], request.query_params))
    return json_response({"object": "list", "data": data})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["model"])
    current().account.check_model(service.model)
    described = _describe(service)
    return json_response(messages.model(described) if messages.VERSION in request.headers else described)


async def health(request: Request) -> Response:
    """Readiness: 200 while requests are taken."""
    service: Service = request.app.state.service
    service.admission.check_open()
    return json_response({"status": "ok", **service.engine.info.marks})


async def live(request: Request) -> Response:
    """Liveness: the server process answers. It needs no restart while it drains or starts its engine again."""
    return json_response({"status": "ok"})


async def usage(request: Request) -> Response:
    """Usage of the request's key since the server's start; with an operator's key, usage of every key."""
    service: Service = request.app.state.service
    account = current().account
    shown = service.keys.accounts if account.grant.operator else [account]
    data = [{"key": a.name or None, **dataclasses.asdict(a.usage), "in_flight": a.in_flight} for a in shown]
    return json_response({"object": "usage", "since": service.keys.since, "data": data})


async def metrics_page(request: Request) -> Response:
    service: Service = request.app.state.service
    if not current().account.grant.operator:
        raise RequestError(
            "metrics show what all keys do: use a key with operator = true", code="operator_only", status=403
        )
    return Response(service.metrics.render(), headers={"content-type": metrics.CONTENT_TYPE})


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, TokenizeBody)
    tokenizer, chat = service.text.tokenizer, _chat(body)

    def work() -> dict[str, Any]:
        tokens = (
            tokenizer.encode(body.prompt or "", allow_special=True)
            if chat is None
            else rendered(chat, service.text, body.tools).ids
        )
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.info.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(t) for t in tokens]
        return answer

    with contextlib.ExitStack() as held:
        if chat is not None:
            await see(service, request, chat, held)
        return json_response(await service.offload(size, work))


def _chat(body: TokenizeBody) -> ChatBody | None:
    """The conversation that the body has; None: it has a raw prompt."""
    if body.prompt is not None and body.messages is None:
        return None
    if body.messages and body.prompt is None:
        return ChatBody(
            messages=body.messages,
            tools=body.tools,
            thinking=body.thinking,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    raise RequestError("send either prompt or messages", param="prompt")


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, DetokenizeBody)
    tokenizer = service.text.tokenizer

    def work() -> str:
        if any(not 0 <= t < tokenizer.vocab_size for t in body.tokens):
            raise RequestError(f"tokens must be ids between 0 and {tokenizer.vocab_size - 1}", param="tokens")
        return tokenizer.decode(body.tokens)

    return json_response({"prompt": await service.offload(size, work)})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: clients that count tokens ask for it before they rely on /tokenize."""
    service: Service = request.app.state.service
    known = {
        role: name if service.text.tokenizer.special_id(name) is not None else None for role, name in _ROLES.items()
    }
    return json_response(
        {"tokenizer_class": "TikTokenTokenizer", **known, "model_max_length": service.engine.info.max_model_len}
    )
