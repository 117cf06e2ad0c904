"""The HTTP server in process, around an engine that says what the test tells it to say."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from perilune.core.config import ServerConfig
from perilune.core.errors import CheckpointError, EngineError
from perilune.core.messages import Delta, EngineInfo, EngineStats
from perilune.core.plan import TokenLogprob
from perilune.core.sampling import SamplingParams
from perilune.server import protocol
from perilune.server.app import build_app
from perilune.server.service import Service, read_generation_config
from perilune.text.chat import template_for
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
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
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


INFO = EngineInfo("fake", 512, 512, (), 64, 16, 4)
STATS = EngineStats(2, 1, 64, 10, 20, 1000, 300, 77, 1, 50, 1.5)


@dataclass
class FakeEngine:
    """Answers every prompt with the tokens of `answer` and `<|im_end|>`, one token per delta unless `width` is more.

    Like the real engine it ends at stop ids, honours max_tokens and gives log-probabilities. `pause` seconds precede
    each delta; before delta number `hold` it waits for `release`.
    """

    answer: str = "Hello"
    width: int = 1
    pause: float = 0.0
    hold: int | None = None
    fail_at: int | None = None
    info: EngineInfo = INFO
    stats: EngineStats = STATS
    alive: bool = True
    release: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    live: int = 0

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        rid = len(self.seen)
        self.seen.append((list(prompt), params))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else BYTES.stop_ids)}
        tokens = [*BYTES.encode(self.answer, allow_special=True), BYTES.special("<|im_end|>")]
        end = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        reason = "stop" if end <= (params.max_tokens or end) else "length"
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
                    await self.release.wait()
                if not self.alive:
                    raise EngineError("the engine process ended unexpectedly")
                if at == self.fail_at:
                    done = True
                    yield Delta(rid, finish_reason="error", error="logits are not finite")
                    return
                part = tokens[at : at + self.width]
                logprobs = () if params.logprobs is None else tuple(self.logprob(t, params.logprobs) for t in part)
                done = at + self.width >= len(tokens)
                cached = 3 if at == 0 else 0
                yield Delta(rid, tuple(part), logprobs, finish_reason=reason if done else None, cached_tokens=cached)
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


@dataclass
class Client:
    """Calls the ASGI application directly; a body may be sent in pieces, and the client may leave."""

    app: Starlette
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, body: Any = None, **more: Any) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, [data], **more)

    async def get(self, path: str) -> Reply:
        return await self.request("GET", path, [b""])

    async def request(
        self,
        method: str,
        path: str,
        body: list[bytes],
        *,
        leave: asyncio.Event | None = None,
        got: Callable[[bytes], None] = lambda piece: None,
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
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in self.headers.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await self.app(scope, receive, send)
        return reply


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text('{"model_type": "kimi_k25"}')
    return template_for(directory)


@dataclass
class Served:
    engine: FakeEngine
    service: Service
    client: Client

    def prompt(self) -> str:
        """The prompt that reached the engine last."""
        return BYTES.decode(self.engine.seen[-1][0])

    @property
    def params(self) -> SamplingParams:
        return self.engine.seen[-1][1]


@pytest.fixture
def serve(template: Any) -> Callable[..., Any]:
    """Runs a test's coroutine function against a server; keyword arguments set up the engine and the server."""

    def start(test: Callable[[Served], Coroutine[Any, Any, None]], **setup: Any) -> None:
        async def main() -> None:
            names = FakeEngine.__dataclass_fields__
            engine = FakeEngine(**{k: v for k, v in setup.items() if k in names})
            config = {k: v for k, v in setup.items() if k in ServerConfig.__dataclass_fields__}
            service = Service(
                engine,
                BYTES,
                setup.get("template", template),
                ServerConfig(**{"served_model_name": "m", **config}),
                setup.get("defaults", {}),
            )
            app = build_app(service, max_body=setup.get("max_body", 32 << 20))
            await asyncio.wait_for(test(Served(engine, service, Client(app))), 20)
            assert engine.live == 0 and service.in_flight == 0, "something of a request was left over"

        asyncio.run(main())

    return start


def both(
    serve: Callable[..., Any], body: dict[str, Any], check: Callable[[dict[str, Any]], None], **setup: Any
) -> None:
    """Checks a chat answer taken whole, and the same answer put together from its stream."""

    async def test(s: Served) -> None:
        whole = await s.client.post(CHAT, body)
        assert whole.status == 200, whole.text
        check(whole.json)
        stream = await s.client.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
        check(joined(stream.chunks))

    serve(test, **setup)


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What an OpenAI client makes of a chat stream."""
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    finish = None
    for c in chunks[1:-1]:
        choice = c["choices"][0]
        assert finish is None, "a chunk followed the one with finish_reason"
        finish = choice["finish_reason"]
        logprobs += (choice.get("logprobs") or {"content": []})["content"]
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = message.get(name, "") + choice["delta"][name]
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({k: v for k, v in part.items() if k != "index"})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "logprobs": {"content": logprobs} if logprobs else None,
    }
    return {"choices": [choice], "usage": chunks[-1]["usage"]}


@pytest.mark.parametrize("width", [1, 4])
def test_chat_keeps_reasoning_apart_and_reports_usage(serve: Any, width: int) -> None:
    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Grüße", "reasoning_content": "Let me see"}
        assert choice["finish_reason"] == "stop"
        usage = answer["usage"]
        assert usage["completion_tokens"] == len("Let me see") + 1 + len("Grüße".encode()) + 1
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["prompt_tokens"] == len("Hi") + len("userassistant") + 6  # im_user im_middle im_end twice; think
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Let me see")}

    both(serve, {"messages": HELLO}, check, answer="Let me see</think>Grüße", width=width)


@pytest.mark.parametrize(
    "switch",
    [{"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}}],
)
def test_thinking_can_be_switched_off(serve: Any, switch: dict[str, Any]) -> None:
    async def test(s: Served) -> None:
        answer = (await s.client.post(CHAT, {"messages": HELLO, **switch})).json["choices"][0]["message"]
        assert answer == {"role": "assistant", "content": "Hello"}
        assert s.prompt().endswith("<think></think>")
        assert (s.params.temperature, s.params.top_p) == (0.6, 0.95)
        await s.client.post(CHAT, {"messages": HELLO})
        assert s.prompt().endswith("<|im_middle|><think>")
        assert (s.params.temperature, s.params.top_p) == (1.0, 0.95)

    serve(test)


def test_reasoning_of_earlier_turns_is_kept_on_request(serve: Any) -> None:
    history = [*HELLO, {"role": "assistant", "content": "A", "reasoning_content": "R1"}, *HELLO]

    async def test(s: Served) -> None:
        await s.client.post(CHAT, {"messages": history})
        assert "R1" not in s.prompt()
        for ask in (
            {"thinking": {"type": "enabled", "keep": "all"}},
            {"chat_template_kwargs": {"preserve_thinking": True}},
        ):
            assert (await s.client.post(CHAT, {"messages": history, **ask})).status == 200
            assert "<think>R1</think>A" in s.prompt()

    serve(test)


def test_tool_calls_carry_native_ids(serve: Any) -> None:
    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure."
        assert choice["message"]["reasoning_content"] == "Need weather"
        (call,) = choice["message"]["tool_calls"]
        assert call["id"] == "functions.get_weather:0" and call["type"] == "function"
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}

    answer = "Need weather</think>Sure." + CALL.format(0)
    both(serve, {"messages": HELLO, "tools": [WEATHER]}, check, answer=answer)


def test_tool_results_go_back_and_the_next_call_counts_on(serve: Any) -> None:
    call = {
        "id": "functions.get_weather:0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]

    def check(answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        assert choice["message"]["tool_calls"][0]["id"] == "functions.get_weather:1"
        assert choice["message"]["content"] is None

    both(serve, {"messages": messages, "tools": [WEATHER]}, check, answer="</think>" + CALL.format(0))


def test_tool_choice_none_hides_the_tools(serve: Any) -> None:
    async def test(s: Served) -> None:
        await s.client.post(CHAT, {"messages": HELLO, "tools": [WEATHER]})
        assert "get_weather" in s.prompt()
        reply = await s.client.post(CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"})
        assert reply.status == 200 and "get_weather" not in s.prompt()
        assert "tool_calls" not in reply.json["choices"][0]["message"]

    serve(test)


@pytest.mark.parametrize("width", [1, 3])
def test_chat_logprobs_cover_every_token_of_the_turn(serve: Any, width: int) -> None:
    def check(answer: dict[str, Any]) -> None:
        entries = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == "Hm</think>é!"
        assert entries[0]["token"] == "H" and entries[0]["logprob"] == pytest.approx(-ord("H") / 100)
        assert [t["token"] for t in entries[0]["top_logprobs"]] == ["H", "I"]
        assert entries[0]["top_logprobs"][1]["logprob"] == -9999.0  # minus infinity has no JSON

    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    both(serve, body, check, answer="Hm</think>é!", width=width)


@pytest.mark.parametrize("width", [1, 5])
def test_a_stop_string_ends_the_turn_and_frees_the_engine(serve: Any, width: int) -> None:
    async def test(s: Served) -> None:
        body = {"messages": HELLO, "stop": "END", "thinking": {"type": "disabled"}, "logprobs": True}
        choice = (await s.client.post(CHAT, body)).json["choices"][0]
        assert choice["message"]["content"] == "one " and choice["finish_reason"] == "stop"
        assert s.engine.cancelled == [0]
        chunks = (await s.client.post(CHAT, {**body, "stream": True})).chunks
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and s.engine.cancelled == [0, 1]
        assert 'perilune_generations_total{reason="stop"} 2.0' in (await s.client.get("/metrics")).text

    serve(test, answer="one END two", width=width)


def test_max_tokens_ends_with_length_and_is_clamped_to_the_context(serve: Any) -> None:
    async def test(s: Served) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = (await s.client.post(CHAT, {"messages": HELLO, name: 3, "thinking": {"type": "disabled"}})).json
            assert answer["choices"][0]["message"]["content"] == "Hel"
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 3
        for ask in ({"max_tokens": 10**6}, {}):
            await s.client.post(CHAT, {"messages": HELLO, **ask})
            prompt, params = s.engine.seen[-1]
            assert len(prompt) + (params.max_tokens or 0) == s.engine.info.max_model_len

    serve(test)


def test_sampling_fields_reach_the_engine(serve: Any) -> None:
    async def test(s: Served) -> None:
        ask = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "stop_token_ids": [9]}
        assert (await s.client.post(CHAT, {"messages": HELLO, **ask, "stop": ["a", "b"]})).status == 200
        assert {k: getattr(s.params, k) for k in ask} == {**ask, "stop_token_ids": (9,)}
        assert s.params.stop == ("a", "b") and s.params.logprobs is None
        await s.client.post(CHAT, {"messages": HELLO, "top_k": -1, "temperature": None})
        assert s.params.top_k == 0 and s.params.temperature == 0.25 and s.params.top_p == 0.95

    serve(test, defaults={"temperature": 0.25})


def test_generation_config_is_read_and_checked(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0, "top_p": 0.9, "eos_token_id": 5}')
    assert read_generation_config(tmp_path) == {"temperature": 0, "top_p": 0.9}
    for bad in ('{"temperature": "hot"}', '{"top_p": 7}', "[", "[]"):
        file.write_text(bad)
        with pytest.raises(CheckpointError, match="generation_config"):
            read_generation_config(tmp_path)


def test_completions_takes_text_ids_and_lists_of_both(serve: Any) -> None:
    async def test(s: Served) -> None:
        for prompt, count in (("ab", 1), ([97, 98], 1), (["ab", "ab"], 2), ([[97, 98], [97, 98], [97, 98]], 3)):
            for stream in (False, True):
                body = {"prompt": prompt, "stream": stream}
                reply = await s.client.post(TEXT, body)
                assert reply.status == 200, reply.text
                texts = [""] * count
                ends = [None] * count
                for answer in reply.chunks if stream else [reply.json]:
                    assert answer["object"] == "text_completion"
                    for c in answer["choices"]:
                        texts[c["index"]] += c["text"]
                        ends[c["index"]] = ends[c["index"]] or c["finish_reason"]
                assert texts == ["Hello"] * count and ends == ["stop"] * count
                assert all(p == [97, 98] for p, _ in s.engine.seen)
                if not stream:
                    assert reply.json["usage"]["prompt_tokens"] == 2 * count
                    assert reply.json["usage"]["completion_tokens"] == 6 * count
        assert s.params.max_tokens == 16

    serve(test)


def test_completions_prompts_may_hold_control_tokens(serve: Any) -> None:
    async def test(s: Served) -> None:
        await s.client.post(TEXT, {"prompt": "<|im_user|>x"})
        assert s.engine.seen[-1][0] == [BYTES.special("<|im_user|>"), ord("x")]
        await s.client.post(CHAT, {"messages": [{"role": "user", "content": "<|im_end|>"}]})
        assert s.engine.seen[-1][0].count(BYTES.special("<|im_end|>")) == 1, "content must not become control tokens"

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs(serve: Any, stream: bool) -> None:
    async def test(s: Served) -> None:
        body = {"prompt": "né", "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
        reply = await s.client.post(TEXT, body)
        answers = reply.chunks if stream else [reply.json]
        text = "".join(a["choices"][0]["text"] for a in answers)
        table: dict[str, list[Any]] = {}
        for a in answers:
            for name, column in (a["choices"][0]["logprobs"] or {}).items():
                table.setdefault(name, []).extend(column)
        assert text == "néHe"
        assert table["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", "H", "e"]
        assert table["text_offset"] == [0, 1, 1, 2, 3]
        assert table["token_logprobs"] == [None, -1.95, -1.69, -0.72, -1.01]
        assert table["top_logprobs"] == [
            None,
            {"bytes:\\xc3": -1.95},
            {"bytes:\\xa9": -1.69},
            {"H": -0.72},
            {"e": -1.01},
        ]
        assert answers[-1]["choices"][0]["finish_reason"] == "length"

    serve(test)


def test_offsets_skip_tokens_without_text(serve: Any) -> None:
    async def test(s: Served) -> None:
        choice = (await s.client.post(TEXT, {"prompt": "x", "logprobs": 0})).json["choices"][0]
        assert choice["text"] == "ab"
        assert choice["logprobs"]["tokens"] == ["a", "<|im_user|>", "b"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1]

    serve(test, answer="a<|im_user|>b")


def test_echo_alone_generates_nothing(serve: Any) -> None:
    async def test(s: Served) -> None:
        answer = (await s.client.post(TEXT, {"prompt": [104, 105], "echo": True, "max_tokens": 0, "logprobs": 0})).json
        choice = answer["choices"][0]
        assert choice["text"] == "hi" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, -1.05]
        assert answer["usage"]["completion_tokens"] == 0
        assert (await s.client.post(TEXT, {"prompt": "x", "max_tokens": 0})).error["param"] == "max_tokens"

    serve(test)


def test_completion_stream_with_usage_and_stop(serve: Any) -> None:
    async def test(s: Served) -> None:
        body = {"prompt": "a", "stop": ["lo"], "stream": True, "stream_options": {"include_usage": True}}
        chunks = (await s.client.post(TEXT, body)).chunks
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "Hel"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == 1
        assert s.engine.cancelled == [0]

    serve(test)


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [1]}, "messages", "object"),
    ({}, "messages", "required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages",
        "not supported yet",
    ),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "between"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_k": -5}, "top_k", "top_k"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"seed": "x"}, "seed", "integer"),
    ({"seed": 2**70}, "seed", "seed"),
    ({"stop": 5}, "stop", "array"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"n": 2}, "n", "n must be 1"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported yet"),
    ({"presence_penalty": -1}, "presence_penalty", "not supported yet"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported yet"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "not supported yet"),
    ({"functions": []}, "functions", "tools"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "grammar enforcement"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "grammar enforcement"),
    ({"tool_choice": "always"}, "tool_choice", "must be"),
    ({"tools": [{"type": "function"}]}, "*", "function"),
    ({"tools": {}}, "tools", "array"),
    ({"thinking": {"type": "sometimes"}}, "thinking", "enabled"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "thinking", "contradict"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "boolean"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD_CHAT, ids=lambda v: json.dumps(v)[:50])
def test_bad_chat_requests_are_named(serve: Any, change: dict[str, Any], param: str, words: str) -> None:
    async def test(s: Served) -> None:
        body = {"messages": HELLO, **change} if change else {}
        for stream in ({}, {"stream": True}) if "stream" not in json.dumps(change) else ({},):
            reply = await s.client.post(CHAT, {**body, **stream})
            assert reply.status == 400, reply.text
            assert words in reply.error["message"]
            assert param == "*" or reply.error["param"] == param
            assert reply.error["type"] == "invalid_request_error"
        assert s.engine.seen == []
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200

    serve(test)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [600]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 5000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "s"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
def test_bad_completions_are_named(serve: Any, change: dict[str, Any], param: str) -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(TEXT, {"prompt": "a", **change})
        assert reply.status == 400 and reply.error["param"] == param, reply.text
        assert s.engine.seen == []

    serve(test)


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b'{"messages": [' + b"[" * 5000, b"[1]", b'"x"', b"null"])
def test_bodies_that_are_no_json_object(serve: Any, body: bytes) -> None:
    async def test(s: Served) -> None:
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            reply = await s.client.post(path, body)
            assert reply.status == 400 and reply.error["code"] == "invalid_json", reply.text

    serve(test)


def test_prompts_beyond_the_context(serve: Any) -> None:
    async def test(s: Served) -> None:
        long = "x" * 600
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
            (TEXT, {"prompt": long}, "prompt"),
            (TEXT, {"prompt": ["a", [120] * 600]}, "prompt"),
            (TEXT, {"prompt": [[97], [120] * 600], "stream": True}, "prompt"),
        ):
            reply = await s.client.post(path, body)
            assert reply.status == 400 and reply.error["param"] == param
        body = {"messages": [{"role": "user", "content": long}]}
        error = (await s.client.post(CHAT, body)).error
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
        count = (await s.client.post("/tokenize", body)).json["count"]
        assert str(count) in error["message"] and "512" in error["message"]

    serve(test)


def test_a_model_without_chat_still_completes(serve: Any, tmp_path: Path) -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(CHAT, {"messages": HELLO})
        assert reply.status == 400 and "plain completions" in reply.error["message"]
        assert reply.error["code"] == "unsupported_by_model"
        assert (await s.client.post(TEXT, {"prompt": "a"})).json["choices"][0]["text"] == "Hello"
        assert (s.params.temperature, s.params.top_p) == (1.0, 1.0)

    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    serve(test, template=template_for(tmp_path))


def test_unknown_fields_are_ignored_with_one_warning(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    protocol._warned.clear()

    async def test(s: Served) -> None:
        for _ in range(3):
            body = {"messages": HELLO, "frobnicate": 1, "chat_template_kwargs": {"enable_thinking": True}}
            assert (await s.client.post(CHAT, body)).status == 200

    with caplog.at_level(logging.WARNING):
        serve(test)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "frobnicate" in said[0] and "chat_template_kwargs.enable_thinking" in said[1]


def test_unknown_model_route_and_method(serve: Any) -> None:
    async def test(s: Served) -> None:
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            reply = await s.client.post(path, {**body, "model": "gpt-4"})
            assert reply.status == 404 and reply.error["code"] == "model_not_found" and "'m'" in reply.error["message"]
            assert (await s.client.post(path, {**body, "model": "m"})).status == 200
        assert (await s.client.get("/v1/nothing")).status == 404
        assert "/v1/nothing" in (await s.client.get("/v1/nothing")).error["message"]
        reply = await s.client.get(CHAT)
        assert reply.status == 405 and reply.error["message"] and reply.headers["allow"] == "POST"

    serve(test)


def test_models(serve: Any) -> None:
    async def test(s: Served) -> None:
        (listed,) = (await s.client.get("/v1/models")).json["data"]
        assert listed["id"] == "org/name" and listed["max_model_len"] == 512 and listed["object"] == "model"
        assert (await s.client.get("/v1/models/org/name")).json == listed
        assert (await s.client.get("/v1/models/other")).status == 404

    serve(test, served_model_name="org/name")


def test_tokenize_and_back(serve: Any) -> None:
    async def test(s: Served) -> None:
        reply = (await s.client.post("/tokenize", {"prompt": "hé"})).json
        assert reply == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 512}
        assert (await s.client.post("/detokenize", {"tokens": reply["tokens"]})).json == {"prompt": "hé"}
        await s.client.post(CHAT, {"messages": HELLO})
        chat = (await s.client.post("/tokenize", {"messages": HELLO})).json
        assert chat["tokens"] == s.engine.seen[-1][0]
        assert (await s.client.post("/tokenize", {})).status == 400
        assert (await s.client.post("/tokenize", {"prompt": "a", "messages": HELLO})).status == 400
        for bad in ([512], [-1], ["a"], 5):
            assert (await s.client.post("/detokenize", {"tokens": bad})).status == 400

    serve(test)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["a", "b"]})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine_at_once(serve: Any, path: str, body: Any, stream: bool) -> None:
    async def test(s: Served) -> None:
        leave = asyncio.Event()
        call = asyncio.create_task(s.client.post(path, {**body, "stream": stream}, leave=leave))
        for _ in range(100):  # until all of its generations hang in the engine
            await asyncio.sleep(0.005)
            if s.engine.live == len(s.engine.seen) == len(body.get("prompt", "x")):
                break
        assert s.engine.live and not s.engine.cancelled
        leave.set()
        await asyncio.wait_for(call, 0.5)
        assert sorted(s.engine.cancelled) == list(range(len(s.engine.seen))) and s.engine.live == 0
        page = (await s.client.get("/metrics")).text
        assert f'perilune_generations_total{{reason="cancelled"}} {float(len(s.engine.seen))}' in page

    serve(test, hold=3)


def test_a_full_server_answers_429_and_recovers(serve: Any) -> None:
    async def test(s: Served) -> None:
        room = s.engine.info.max_num_seqs + 2
        calls = [
            asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": i % 2 == 0})) for i in range(room)
        ]
        await asyncio.sleep(0.05)
        refused = await s.client.post(CHAT, {"messages": HELLO})
        assert refused.status == 429 and refused.error["code"] == "too_many_requests"
        assert refused.headers["retry-after"] == "1"
        assert (await s.client.post(TEXT, {"prompt": "a", "stream": True})).status == 429
        s.engine.release.set()
        assert [r.status for r in await asyncio.gather(*calls)] == [200] * room
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200

    serve(test, hold=0, max_waiting=2)


def test_thirty_two_clients_at_once(serve: Any) -> None:
    async def one(s: Served, i: int) -> str:
        body = {"messages": [{"role": "user", "content": f"client {i}"}], "thinking": {"type": "disabled"}}
        if i % 2:
            return str((await s.client.post(CHAT, body)).json["choices"][0]["message"]["content"])
        chunks = (await s.client.post(CHAT, {**body, "stream": True})).chunks
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    async def test(s: Served) -> None:
        assert await asyncio.gather(*(one(s, i) for i in range(32))) == ["Hello"] * 32
        assert len({tuple(p) for p, _ in s.engine.seen}) == 32

    serve(test, pause=0.001)


def test_each_token_is_sent_when_it_exists(serve: Any) -> None:
    async def test(s: Served) -> None:
        pieces: list[bytes] = []
        body = {"messages": HELLO, "stream": True, "thinking": {"type": "disabled"}}
        call = asyncio.create_task(s.client.post(CHAT, body, got=pieces.append))
        await asyncio.sleep(0.05)
        assert len(pieces) == 4 and b'"content":"l"' in pieces[-1]  # role, H, e, l: the fourth token is held
        s.engine.release.set()
        reply = await call
        assert reply.headers["cache-control"] == "no-cache"
        assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") for p in reply.pieces)

    serve(test, hold=3)


def test_an_engine_error_is_an_error_not_text(serve: Any) -> None:
    async def test(s: Served) -> None:
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), (TEXT, {"prompt": ["a", "b"]})):
            reply = await s.client.post(path, body)
            assert reply.status == 500 and reply.error["code"] == "generation_failed"
            assert "not finite" in reply.error["message"]
            chunks = (await s.client.post(path, {**body, "stream": True})).chunks
            assert "not finite" in chunks[-1]["error"]["message"] and chunks[-1]["error"]["type"] == "server_error"
            assert all(not (c.get("choices") or [{}])[0].get("finish_reason") for c in chunks)

    serve(test, fail_at=2)


def test_a_dead_engine_is_reported(serve: Any) -> None:
    async def test(s: Served) -> None:
        assert (await s.client.get("/health")).json == {"status": "ok"}
        call = asyncio.create_task(s.client.post(CHAT, {"messages": HELLO}))
        await asyncio.sleep(0.02)
        s.engine.alive = False
        s.engine.release.set()
        assert (await call).status == 503
        for reply in (await s.client.get("/health"), await s.client.post(CHAT, {"messages": HELLO, "stream": True})):
            assert reply.status == 503 and reply.error["code"] == "engine_unavailable"
        assert "perilune_engine_up 0.0" in (await s.client.get("/metrics")).text

    serve(test, hold=2)


def test_an_internal_error_shows_no_details(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(s: Served) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(s.engine, "generate", broken)
        with pytest.raises(ZeroDivisionError):  # raised again after the answer, for the server's log
            await s.client.post(CHAT, {"messages": HELLO}, got=lambda b: seen.append(b))
        chunks = (await s.client.post(CHAT, {"messages": HELLO, "stream": True})).chunks
        for error in (json.loads(seen[0])["error"], chunks[-1]["error"]):
            assert "secret" not in error["message"] and error["type"] == "server_error"

    seen: list[bytes] = []
    serve(test)


def test_stopping_the_server_ends_answers_in_flight(serve: Any) -> None:
    async def test(s: Served) -> None:
        calls = [asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": x})) for x in (False, True)]
        await asyncio.sleep(0.02)
        s.service.stop()
        whole, stream = await asyncio.wait_for(asyncio.gather(*calls), 0.5)
        assert whole.status == 503 and "shutting down" in whole.error["message"]
        assert "shutting down" in stream.chunks[-1]["error"]["message"]

    serve(test, hold=1)


def test_the_api_key_is_asked_for(serve: Any) -> None:
    async def test(s: Served) -> None:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "k3y"},
            {"authorization": "Basic k3y"},
        ):
            s.client.headers = headers
            for reply in (await s.client.get("/v1/models"), await s.client.post(CHAT, {"messages": HELLO})):
                assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
            assert (await s.client.get("/metrics")).status == 401
            assert (await s.client.get("/health")).status == 200
        s.client.headers = {"authorization": "Bearer k3y"}
        assert (await s.client.get("/v1/models")).status == 200
        assert 'status="401"' in (await s.client.get("/metrics")).text

    serve(test, api_key="k3y")


def test_large_bodies_are_refused(serve: Any) -> None:
    async def test(s: Served) -> None:
        pieces = [b" " * 400] * 3
        reply = await s.client.request("POST", CHAT, pieces)
        assert reply.status == 413 and reply.error["code"] == "body_too_large"
        s.client.headers = {"content-length": "5000"}
        assert (await s.client.request("POST", CHAT, [])).status == 413
        s.client.headers = {}
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200

    serve(test, max_body=1000)


def test_metrics_page(serve: Any) -> None:
    async def test(s: Served) -> None:
        await s.client.post(CHAT, {"messages": HELLO})
        await s.client.post(TEXT, {"prompt": "a", "stream": True})
        await s.client.get("/secret-path?key=x")
        reply = await s.client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
        for line in (
            'perilune_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
            'perilune_http_requests_total{route="/v1/completions",status="200"} 1.0',
            'perilune_http_requests_total{route="other",status="404"} 1.0',
            'perilune_generations_total{reason="stop"} 2.0',
            "perilune_generations_in_flight 0.0",
            "perilune_time_to_first_token_seconds_count 2.0",
            "perilune_inter_token_seconds_count 10.0",
            "perilune_generation_seconds_count 2.0",
            "perilune_engine_up 1.0",
            "perilune_requests_running 2.0",
            "perilune_requests_waiting 1.0",
            'perilune_kv_blocks{state="owned"} 20.0',
            'perilune_kv_blocks{state="cached"} 10.0',
            'perilune_kv_blocks{state="free"} 34.0',
            "perilune_prompt_tokens_total 1000.0",
            "perilune_cached_prompt_tokens_total 300.0",
            "perilune_generated_tokens_total 77.0",
            "perilune_preemptions_total 1.0",
        ):
            assert line in lines, f"{line} is missing"
        assert "secret" not in reply.text

    serve(test)


def test_the_access_log_has_no_contents(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        s.client.headers = {"authorization": "Bearer k3y"}
        await s.client.post(CHAT, {"messages": [{"role": "user", "content": "private"}]})

    with caplog.at_level(logging.INFO):
        serve(test, api_key="k3y", answer="answered")
    line = next(r.getMessage() for r in caplog.records if r.name == "perilune.access")
    assert line.startswith("POST /v1/chat/completions 200 ")
    assert not any(word in caplog.text for word in ("private", "k3y", "answered"))
