"""The HTTP application: every route and every wrapper in one expression, plus the endpoints too small for a file."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.core.errors import EngineError, PeriluneError, RequestError
from perilune.server import errors, metrics
from perilune.server.anthropic import messages
from perilune.server.middleware import ApiKey, BodyLimit, Observe
from perilune.server.openai.chat import chat_completions
from perilune.server.openai.completions import completions
from perilune.server.openai.protocol import ChatBody, DetokenizeBody, TokenizeBody, json_response
from perilune.server.page import page
from perilune.server.responses.api import create_response, response_by_id
from perilune.server.responses.store import ResponseStore
from perilune.server.service import ModelText, Service
from perilune.server.sse import CLIENT_GONE
from perilune.server.turn import rendered

MAX_BODY = 32 << 20  # bytes
_ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


def build_app(service: Service, *, max_body: int = MAX_BODY) -> Starlette:
    """The application around a running engine, which the caller closes after the application has shut down."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.stop()

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/{id}", response_by_id, methods=["GET", "DELETE"]),
        Route("/v1/messages", messages.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics_page, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Observe, metrics=service.metrics, paths={r.endpoint: r.path for r in routes}),
            Middleware(messages.ErrorShape),
            # Outside of ApiKey: a browser asks for leave without the key, and must be able to read a refusal.
            *_cors(service.config.cors_origins),
            Middleware(ApiKey, key=service.config.api_key),
            Middleware(BodyLimit, limit=max_body),
        ],
        exception_handlers={
            PeriluneError: errors.handle,
            HTTPException: errors.handle,
            ClientDisconnect: gone,
            Exception: errors.handle,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.responses = ResponseStore()
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    methods = ("GET", "POST", "DELETE")
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",))]


async def gone(request: Request, error: Exception) -> Response:
    """The client left while it was still sending its body."""
    return Response(status_code=CLIENT_GONE)


def _describe(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "perilune",
        "max_model_len": service.engine.info.max_model_len,
        **service.engine.info.marks,
    }


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_describe(request.app.state.service)]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["model"])
    return json_response(_describe(service))


async def health(request: Request) -> Response:
    service: Service = request.app.state.service
    if not service.engine.alive:
        return errors.response(EngineError("the engine has stopped: see the server's log, then restart it"))
    return json_response({"status": "ok", **service.engine.info.marks})


async def metrics_page(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.render(), headers={"content-type": metrics.CONTENT_TYPE})


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, TokenizeBody)
    tokenizer = service.text.tokenizer

    def work() -> dict[str, Any]:
        tokens = _tokens(body, service.text)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.info.max_model_len}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(t) for t in tokens]
        return answer

    return json_response(await service.offload(size, work))


def _tokens(body: TokenizeBody, text: ModelText) -> list[int]:
    if body.prompt is not None and body.messages is None:
        return text.tokenizer.encode(body.prompt, allow_special=True)
    if body.messages and body.prompt is None:
        chat = ChatBody(
            messages=body.messages,
            tools=body.tools,
            thinking=body.thinking,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        return rendered(chat, text, body.tools).ids
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
    """What clients that count tokens themselves ask for before they rely on /tokenize."""
    service: Service = request.app.state.service
    known = {
        role: name if service.text.tokenizer.special_id(name) is not None else None for role, name in _ROLES.items()
    }
    return json_response(
        {"tokenizer_class": "TikTokenTokenizer", **known, "model_max_length": service.engine.info.max_model_len}
    )
