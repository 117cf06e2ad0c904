"""A tiny OpenAI-compatible server on a thread that answers what the test tells it to."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perilune.server.listener import Listener

Frame = tuple[float, dict[str, Any] | str | bytes]  # seconds to wait, then a chunk, its data, or raw bytes


def chunk(*, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int, completion: int, reasoning: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {"choices": [], "usage": counts}


def whole(content: str, *, finish: str = "stop", tokens: int = 7, prompt: int = 5, **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return usage(prompt, tokens) | {"choices": [choice]}


class FakeEndpoint:
    """`answer(body)` gives a whole answer or, for a stream, its frames; a Response is sent as it is.

    `bodies` keeps what was asked. `count(body)` is what /tokenize says; None: there is no /tokenize.
    """

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "fake", "max_model_len": 4096, "owned_by": "perilune"}]
        self.models_text: str | None = None
        self.key: str | None = None
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: whole("Hello")
        self.count: Callable[[dict[str, Any]], int] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.live = self.most = 0
        self.url = ""

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return refusal(401, "wrong key")
        if self.models_text is not None:
            return Response(self.models_text)
        return JSONResponse({"object": "list", "data": self.models})

    async def _tokenize(self, request: Request) -> Response:
        if self.count is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"count": self.count(await request.json())})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            await asyncio.sleep(0.002)
            found = self.answer(body)
        finally:
            self.live -= 1
        if isinstance(found, Response):
            return found
        if isinstance(found, dict):
            return JSONResponse(found)
        return StreamingResponse(_send(found), media_type="text/event-stream")


async def _send(frames: Sequence[Frame]) -> AsyncIterator[bytes]:
    for pause, data in frames:
        await asyncio.sleep(pause)
        if isinstance(data, bytes):
            yield data
        else:
            yield f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "code": None}}, status)


@contextlib.contextmanager
def serving() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        fake.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        end = threading.Event()

        async def serve() -> None:
            listener = Listener(fake.app)
            await listener.start(sock)
            while not end.is_set():
                await asyncio.sleep(0.01)
            await listener.close(1.0)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield fake
        finally:
            end.set()
            thread.join(60)
            assert not thread.is_alive()
