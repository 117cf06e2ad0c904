"""An HTTP server in process, around an engine that says what the test tells it to say."""

import asyncio
import functools
import inspect
import json
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from perilune.core.config import ServerConfig
from perilune.core.constraint import Constraint
from perilune.core.errors import EngineUnavailable
from perilune.core.messages import FIRST_COME, Delta, EngineInfo, EngineStats, Order, Picture
from perilune.core.sampling import SamplingParams
from perilune.core.step import TokenLogprob
from perilune.engine.client import check_pictures
from perilune.server.app import build_app
from perilune.server.service import Service
from perilune.text.chat import ChatTemplate
from perilune.text.family import K26
from perilune.text.tokenizer import AddedToken, Tokenizer

SPECIAL = {
    "[BOS]": True,
    "[EOS]": True,
    "<|im_end|>": True,
    "<|im_user|>": True,
    "<|im_assistant|>": True,
    "[EOT]": True,
    "<|im_system|>": True,
    "<|im_middle|>": True,
    "<|media_begin|>": True,
    "<|media_content|>": True,
    "<|media_end|>": True,
    "<|media_pad|>": True,
    "<|tool_calls_section_begin|>": False,
    "<|tool_calls_section_end|>": False,
    "<|tool_call_begin|>": False,
    "<|tool_call_argument_begin|>": False,
    "<|tool_call_end|>": False,
    "<think>": False,
    "</think>": False,
}
BYTES = Tokenizer(
    {bytes([i]): i for i in range(256)},
    {256 + i: AddedToken(name, special) for i, (name, special) in enumerate(SPECIAL.items())},
)
TEMPLATE = ChatTemplate(K26)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
HANG_SECONDS = 120.0  # bounds what would never end; says nothing about speed: a busy machine stops for seconds
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:{0}<|tool_call_argument_begin|>"
    '{{"city": "Oslo"}}<|tool_call_end|><|tool_calls_section_end|>'
)
INFO = EngineInfo("fake", 512, 512, (), 64, 16, 4, pids=(os.getpid(),))
STATS = EngineStats(2, 1, 64, 10, 20, 1000, 300, 77, 1, 50, 1.5, 8, (("suffix", 0, 8, 6), ("suffix", 1, 5, 2)), 3, 4000)


@dataclass
class FakeEngine:
    """Answers every prompt with the tokens of `answer` and `<|im_end|>`, one token per delta unless `width` is more:
    such a delta reports `width` - 1 accepted drafts and a rejected one.

    With `closed` its grammar ended the answer because max_tokens ran out.

    Like the real engine it ends at stop ids, honours max_tokens and gives log-probabilities. `pause` seconds precede
    each delta; before delta number `hold` it waits for `release`.
    """

    answer: str = "Hello"
    width: int = 1
    pause: float = 0.0
    hold: int | None = None
    fail_at: int | None = None
    late_at: int | None = None
    closed: bool = False
    info: EngineInfo = INFO
    stats: EngineStats = STATS
    alive: bool = True
    retry_seconds: int | None = None
    restarts: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    constraints: list[Constraint | None] = field(default_factory=list)
    cache_keys: list[tuple[str, ...]] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    pictures: list[tuple[Picture, ...]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    live: int = 0
    held: int = 0

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
        order: Order = FIRST_COME,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Delta, None]:
        check_pictures(prompt, pictures, self.info)
        rid = len(self.seen)
        self.cache_keys.append(cache_keys)
        self.orders.append(order)
        self.pictures.append(tuple(pictures))
        self.constraints.append(constraint)
        self.seen.append((list(prompt), params))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else BYTES.stop_ids)}
        tokens = [*BYTES.encode(self.answer, allow_special=True), BYTES.special("<|im_end|>")]
        end = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        reason = "stop" if end <= (params.max_tokens or end) and not self.closed else "length"
        tokens = tokens[: min(end, params.max_tokens or end)]
        done = False
        self.live += 1
        try:
            if params.prompt_logprobs is not None:
                half = len(prompt) // 2
                for part in (prompt[1:half], prompt[max(half, 1) :]):
                    yield Delta(rid, prompt_logprobs=tuple(self.logprob(t, params.prompt_logprobs) for t in part))
            for at in range(0, len(tokens), self.width):
                await asyncio.sleep(self.pause)
                if at == self.hold:
                    self.held += 1
                    await self.release.wait()
                if not self.alive:
                    raise EngineUnavailable("the engine process ended unexpectedly")
                if at == self.late_at:
                    done = True
                    yield Delta(rid, finish_reason="deadline")
                    return
                if at == self.fail_at:
                    done = True
                    yield Delta(rid, finish_reason="error", error="logits are not finite")
                    return
                part = tokens[at : at + self.width]
                logprobs = () if params.logprobs is None else tuple(self.logprob(t, params.logprobs) for t in part)
                done = at + self.width >= len(tokens)
                cached = 3 if at == 0 else 0
                yield Delta(
                    rid,
                    tuple(part),
                    logprobs,
                    finish_reason=reason if done else None,
                    cached_tokens=cached,
                    drafted=len(part) if self.width > 1 else 0,
                    accepted=len(part) - 1,
                    closed_by_grammar=done and self.closed,
                )
        finally:
            self.live -= 1
            if not done:
                self.cancelled.append(rid)

    @staticmethod
    def logprob(token: int, count: int) -> TokenLogprob:
        top = ((token, -token / 100), ((token + 1) % 256, float("-inf")))
        return TokenLogprob(token, -token / 100, top[:count])


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    pieces: list[bytes]

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        assert "\n" not in body["error"]["message"]
        return body["error"]

    @property
    def chunks(self) -> list[Any]:
        assert self.headers["content-type"].startswith("text/event-stream")
        frames = self.text.split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(f.removeprefix("data: ")) for f in frames[:-2]]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Types of the events of a stream with named events."""
        assert self.status == 200, self.text
        assert self.headers["content-type"].startswith("text/event-stream")
        events = []
        for frame in self.text.removesuffix("\n\n").split("\n\n"):
            name, data = frame.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


@dataclass
class Client:
    """Calls the ASGI application directly; a body may be sent in pieces, and the client may leave."""

    app: Starlette
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, body: Any = None, **more: Any) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, [data], **more)

    async def get(self, path: str) -> Reply:
        path, _, query = path.partition("?")
        return await self.request("GET", path, [b""], query=query)

    async def request(
        self,
        method: str,
        path: str,
        body: list[bytes],
        *,
        leave: asyncio.Event | None = None,
        got: Callable[[bytes], None] = lambda piece: None,
        query: str = "",
    ) -> Reply:
        reply = Reply(0, {}, [])
        parts = iter([{"type": "http.request", "body": b, "more_body": i + 1 < len(body)} for i, b in enumerate(body)])

        async def receive() -> dict[str, Any]:
            for part in parts:
                return part
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers.update({k.decode().lower(): v.decode() for k, v in message["headers"]})
            elif message.get("body"):
                reply.pieces.append(message["body"])
                got(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in self.headers.items()],
            "server": ("test", 80),
            "client": ("192.0.2.7", id(reply)),  # another port for each request
        }
        await self.app(scope, receive, send)
        return reply


@dataclass
class Served:
    engine: FakeEngine
    service: Service
    client: Client

    def prompt(self) -> str:
        """The prompt that reached the engine last."""
        return BYTES.decode(self.engine.seen[-1][0])

    async def hangs(self, generations: int = 1) -> None:
        """Returns when `generations` wait in the engine for `release`."""
        while self.engine.held < generations:
            await asyncio.sleep(0.001)

    @property
    def params(self) -> SamplingParams:
        return self.engine.seen[-1][1]


def serve(test: Callable[[Served], Coroutine[Any, Any, None]], **setup: Any) -> None:
    """Runs a test's coroutine function against a server; keyword arguments set up the engine and the server."""

    async def main() -> None:
        names = FakeEngine.__dataclass_fields__
        engine = setup.get("engine", FakeEngine)(**{k: v for k, v in setup.items() if k in names})
        config = {k: v for k, v in setup.items() if k in ServerConfig.__dataclass_fields__}
        service = Service(
            engine,
            BYTES,
            setup.get("template", TEMPLATE),
            ServerConfig(**{"served_model_name": "m", **config}),
            setup.get("defaults", {}),
        )
        made = [make(service) for make in setup.get("observers", ())]
        service.observers += [one.record for one in made]
        app = build_app(service)
        await asyncio.wait_for(test(Served(engine, service, Client(app))), HANG_SECONDS)
        for one in made:
            one.close()
        await service.pictures.close()
        assert engine.live == 0 and service.admission.in_flight == 0, "something of a request was left over"

    asyncio.run(main())


def served(
    *args: Any, by: Callable[..., None] = serve, takes: Sequence[str] = (), **setup: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a coroutine function a test: its first parameter is the server, the others are pytest's.

    `by` runs it; `takes` are fixtures that `by` takes behind the test, which may have them too."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            own = {name: given[name] for name in others}
            by(lambda s: test(s, **own), *(given[name] for name in takes), *args, **setup)

        _, *others = inspect.signature(test).parameters
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys([*others, *takes])]
        )
        return run

    return decorate
