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

from perilune.core.config import ServerConfig, build
from perilune.core.constraint import Constraint
from perilune.core.errors import CheckpointError, ConfigError, EngineError
from perilune.core.messages import Delta, EngineInfo, EngineStats
from perilune.core.plan import TokenLogprob
from perilune.core.sampling import SamplingParams
from perilune.server import protocol
from perilune.server.app import build_app
from perilune.server.form import EFFORTS
from perilune.server.service import Service, read_generation_config
from perilune.text.chat import ChatTemplate, template_for
from perilune.text.family import K2_THINKING
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
STATS = EngineStats(2, 1, 64, 10, 20, 1000, 300, 77, 1, 50, 1.5, 8, (("suffix", 0, 8, 6), ("suffix", 1, 5, 2)), 3, 4000)


@dataclass
class FakeEngine:
    """Answers every prompt with the tokens of `answer` and `<|im_end|>`, one token per delta unless `width` is more:
    then all but one had been guessed, and another one wrongly.

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
    constraints: list[Constraint | None] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    live: int = 0

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> AsyncGenerator[Delta, None]:
        rid = len(self.seen)
        self.constraints.append(constraint)
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
                yield Delta(
                    rid,
                    tuple(part),
                    logprobs,
                    finish_reason=reason if done else None,
                    cached_tokens=cached,
                    drafted=len(part) if self.width > 1 else 0,
                    accepted=len(part) - 1,
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
            engine = setup.get("engine", FakeEngine)(**{k: v for k, v in setup.items() if k in names})
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
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    parts: dict[int, list[dict[str, Any]]] = {}
    for c in chunks[:-1]:
        (choice,) = c["choices"]
        parts.setdefault(choice["index"], []).append(choice)
    assert sorted(parts) == list(range(len(parts)))
    return {"choices": [joined_choice(i, parts[i]) for i in sorted(parts)], "usage": chunks[-1]["usage"]}


def joined_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    finish = None
    for choice in parts[1:]:
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
    return {
        "index": index,
        "message": message,
        "finish_reason": finish,
        "logprobs": {"content": logprobs} if logprobs else None,
    }


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
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Let me see")

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


def test_penalties_bias_and_min_tokens_reach_the_engine(serve: Any) -> None:
    async def test(s: Served) -> None:
        ask = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "min_tokens": 2}
        for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
            assert (await s.client.post(path, {**prompt, **ask, "logit_bias": {"65": -100, "66": 2.5}})).status == 200
            assert {k: getattr(s.params, k) for k in ask} == ask
            assert s.params.logit_bias == ((65, -100.0), (66, 2.5))
            neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "min_tokens": 0}
            assert (await s.client.post(path, {**prompt, **neutral})).status == 200
            assert not s.params.penalized and s.params.logit_bias == () and s.engine.constraints[-1] is None

    serve(test)


def test_several_answers_to_one_conversation(serve: Any) -> None:
    ask = {"messages": HELLO, "tools": [WEATHER], "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 1}

    def check(answer: dict[str, Any]) -> None:
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        for choice in answer["choices"]:
            assert choice["message"]["content"] == "Sure." and choice["message"]["reasoning_content"] == "Hm"
            assert choice["message"]["tool_calls"][0]["id"] == "functions.get_weather:0"
            assert choice["finish_reason"] == "tool_calls"
            entries = choice["logprobs"]["content"]
            assert b"".join(bytes(e["bytes"]) for e in entries).decode().startswith("Hm</think>Sure.<|tool")
        length = len(BYTES.encode("Hm</think>Sure." + CALL.format(0), allow_special=True)) + 1
        assert answer["usage"]["completion_tokens"] == 3 * length
        assert answer["usage"]["prompt_tokens"] < 400, "the prompt counts once"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * len("Hm")

    async def seeds(s: Served) -> None:
        await s.client.post(CHAT, ask)
        assert s.engine.seen[0][1].seed == 7 and len({p.seed for _, p in s.engine.seen}) == 3

    both(serve, ask, check, answer="Hm</think>Sure." + CALL.format(0))
    serve(seeds)


def test_answers_to_one_conversation_are_streamed_side_by_side(serve: Any) -> None:
    async def test(s: Served) -> None:
        body = {"messages": HELLO, "n": 2, "stream": True, "thinking": {"type": "disabled"}}
        order = [c["choices"][0]["index"] for c in (await s.client.post(CHAT, body)).chunks]
        assert order != sorted(order), "the second answer waited for the first"

    serve(test, pause=0.002)


def test_a_failure_of_one_answer_ends_all(serve: Any) -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(CHAT, {"messages": HELLO, "n": 3})
        assert reply.status == 500 and reply.error["code"] == "generation_failed"
        chunks = (await s.client.post(CHAT, {"messages": HELLO, "n": 3, "stream": True})).chunks
        assert "not finite" in chunks[-1]["error"]["message"]

    serve(test, fail_at=2, pause=0.001)


def test_prompt_logprobs_are_spelled_by_id(serve: Any) -> None:
    async def test(s: Served) -> None:
        answer = (await s.client.post(TEXT, {"prompt": "né", "prompt_logprobs": 1})).json
        assert answer["choices"][0]["prompt_logprobs"] == [
            None,
            {"195": {"logprob": -1.95, "rank": 1, "decoded_token": "\ufffd"}},
            {"169": {"logprob": -1.69, "rank": 1, "decoded_token": "\ufffd"}},
        ]
        bare = (await s.client.post(TEXT, {"prompt": "né", "prompt_logprobs": 0})).json
        assert bare["choices"][0]["prompt_logprobs"][1]["195"]["rank"] is None
        both = {"prompt": "né", "prompt_logprobs": 2, "logprobs": 1, "echo": True}
        choice = (await s.client.post(TEXT, both)).json["choices"][0]
        assert len(choice["prompt_logprobs"][1]) == 2 and len(choice["logprobs"]["top_logprobs"][1]) == 1
        chat = (await s.client.post(CHAT, {"messages": HELLO, "prompt_logprobs": 0, "n": 2})).json
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None
        assert [p.prompt_logprobs for _, p in s.engine.seen[-2:]] == [0, None]

    serve(test)


def test_several_completions_and_the_best_of_them(serve: Any) -> None:
    class Varied(FakeEngine):
        """Candidate number i of every four answers with the i-th text: later letters are less likely."""

        async def generate(self, prompt: Any, params: Any, constraint: Any = None) -> AsyncGenerator[Delta, None]:
            self.answer = ("zz", "aa", "mm", "ab")[len(self.seen) % 4]
            async for delta in super().generate(prompt, params, constraint):
                yield delta

    async def test(s: Served) -> None:
        answer = (await s.client.post(TEXT, {"prompt": ["x", "y"], "n": 4})).json
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(("zz", "aa", "mm", "ab") * 2))
        assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 8 * 3
        chunks = (await s.client.post(TEXT, {"prompt": ["x", "y"], "n": 2, "stream": True})).chunks
        texts = [""] * 4
        for c in chunks:
            texts[c["choices"][0]["index"]] += c["choices"][0]["text"]
        assert texts == ["zz", "aa", "mm", "ab"]
        answer = (await s.client.post(TEXT, {"prompt": "x", "n": 2, "best_of": 4})).json
        assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, "aa", None), (1, "ab", None)]
        assert answer["usage"]["completion_tokens"] == 4 * 3
        assert s.params.logprobs == 0

    serve(test, engine=Varied, max_waiting=20)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}, "r"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_json": '{"type": "object"}'}, "guided_json"),
    ({"guided_regex": "[a-z]+"}, "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"guided_grammar": 'start: "yes" | "no"'}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "[a-z]+", "json": None}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(("form", "field"), FORMS, ids=lambda v: json.dumps(v)[:60])
def test_a_form_of_the_answer_is_enforced(serve: Any, form: dict[str, Any], field: str) -> None:
    async def test(s: Served) -> None:
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
            reply = await s.client.post(path, {**body, **form, "max_tokens": 100})
            assert reply.status == 200, reply.text
            constraint = s.engine.constraints[-1]
            assert constraint is not None and constraint.answer is not None and not constraint.tools
            assert constraint.thinking == (path == CHAT)
            assert (constraint.param or "").startswith(field)
        for nothing in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
            assert (await s.client.post(TEXT, {"prompt": "a", **nothing})).status == 200
            assert s.engine.constraints[-1] is None

    serve(test)


def test_tool_choice_is_enforced(serve: Any) -> None:
    other = {"type": "function", "function": {"name": "other", "strict": True, "parameters": {"type": "object"}}}
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "other", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]

    async def test(s: Served) -> None:
        async def ask(**fields: Any) -> Constraint | None:
            body = {"messages": HELLO, "tools": [WEATHER, other], **fields}
            reply = await s.client.post(CHAT, body)
            assert reply.status == 200, reply.text
            return s.engine.constraints[-1]

        auto = await ask()
        assert auto is not None and auto == await ask(tool_choice="auto", parallel_tool_calls=True)
        assert [name for name, _ in auto.tools] == ["get_weather", "other"]
        assert auto.text and auto.parallel and auto.first_index == 0 and auto.thinking and auto.answer is None
        required = await ask(tool_choice="required", parallel_tool_calls=False, thinking={"type": "disabled"})
        assert required is not None and not required.text and not required.parallel and not required.thinking
        assert len(required.tools) == 2
        named = await ask(tool_choice={"type": "function", "function": {"name": "other"}})
        assert named is not None and [name for name, _ in named.tools] == ["other"] and not named.text
        later = await ask(messages=history)
        assert later is not None and later.first_index == 1
        formed = await ask(response_format={"type": "json_object"})
        assert formed is not None and formed.answer is not None and len(formed.tools) == 2
        forced = await ask(response_format={"type": "json_object"}, tool_choice="required")
        assert forced is not None and forced.answer is None and len(forced.tools) == 2
        none = await ask(tool_choice="none")
        assert none is None or not none.tools

    serve(test)


def test_what_cannot_be_enforced_is_refused(serve: Any) -> None:
    async def test(s: Served) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        for form, param in (
            ({"guided_json": schema}, "guided_json"),
            ({"guided_regex": "(?<=x)y"}, "guided_regex"),
            ({"guided_grammar": "start: ???"}, "guided_grammar"),
            ({"tools": [tool]}, "tools"),
            ({"tools": [tool], "tool_choice": "required"}, "tools"),
        ):
            reply = await s.client.post(CHAT, {"messages": HELLO, **form})
            assert reply.status == 400 and reply.error["param"].startswith(param), reply.text
        reply = await s.client.post(CHAT, {"messages": HELLO, "guided_choice": ["a" * 50], "max_tokens": 20})
        assert reply.status == 400 and reply.error["param"] == "max_tokens" and "at least" in reply.error["message"]
        assert s.engine.seen == []

    serve(test)


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"max_thinking_tokens": 5}, 5),
        ({"max_thinking_tokens": 0}, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "max_thinking_tokens": 7}, 7),
        ({"reasoning_effort": "minimal"}, EFFORTS["minimal"]),
        ({"reasoning_effort": "low"}, EFFORTS["low"]),
        ({"reasoning_effort": "medium", "thinking": {"type": "enabled"}}, EFFORTS["medium"]),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "none", "max_thinking_tokens": 0}, "off"),
    ],
    ids=str,
)
def test_thinking_can_be_bounded(serve: Any, fields: dict[str, Any], budget: Any) -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(CHAT, {"messages": HELLO, **fields})
        assert reply.status == 200, reply.text
        constraint = s.engine.constraints[-1]
        if budget == "off":
            assert s.prompt().endswith("<think></think>") and constraint is None
            return
        assert s.prompt().endswith("<think>")
        assert (constraint and constraint.thinking_budget) == budget

    serve(test)


def test_a_model_that_opens_its_own_thought_is_told_so(serve: Any) -> None:
    async def test(s: Served) -> None:
        for more in ({}, {"tools": [WEATHER]}, {"max_thinking_tokens": 3}, {"guided_regex": "a"}):
            answer = (await s.client.post(CHAT, {"messages": HELLO, **more})).json
            assert s.prompt().endswith("<|im_middle|>"), "its prompts end where the answer begins"
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("r", "a")
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
            constraint = s.engine.constraints[-1]
            assert (constraint is not None and constraint.thinking) == bool(more)
        assert constraint is not None
        least = constraint.least
        body = {"messages": HELLO, **more}
        assert (await s.client.post(CHAT, {**body, "max_tokens": least})).error["param"] == "max_tokens"
        assert (await s.client.post(CHAT, {**body, "max_tokens": least + 1})).status == 200
        refused = await s.client.post(CHAT, {"messages": HELLO, "reasoning_effort": "none"})
        assert refused.status == 400 and "always thinks" in refused.error["message"]

    serve(test, template=ChatTemplate(K2_THINKING), answer="<think>r</think>a")


def test_strict_servers_refuse_what_the_vendor_does(serve: Any) -> None:
    async def test(s: Served) -> None:
        for fields in (
            {"top_p": 0.9},
            {"temperature": 0.7},
            {"temperature": 0.6},  # that of the other mode
            {"temperature": 1.0, "thinking": {"type": "disabled"}},
            {"presence_penalty": 0.1},
            {"frequency_penalty": -0.1},
            {"n": 2},
        ):
            reply = await s.client.post(CHAT, {"messages": HELLO, **fields})
            name = next(iter(fields))
            assert reply.status == 400 and reply.error["param"] == name and name in reply.error["message"]
        for fields in (
            {},
            {"top_p": 0.95, "temperature": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
            {"temperature": 0.6, "thinking": {"type": "disabled"}},
        ):
            assert (await s.client.post(CHAT, {"messages": HELLO, **fields})).status == 200
        assert (await s.client.post(TEXT, {"prompt": "a", "temperature": 0.3})).status == 200

    serve(test, vendor_strict=True)


def test_pages_of_other_origins_may_call_only_if_allowed(serve: Any) -> None:
    page = "https://chat.example.org"

    async def closed(s: Served) -> None:
        s.client.headers = {"origin": page}
        assert "access-control-allow-origin" not in (await s.client.get("/v1/models")).headers

    async def opened(s: Served) -> None:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        s.client.headers = {"origin": page, **ask}
        reply = await s.client.request("OPTIONS", CHAT, [b""])
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == page
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()
        s.client.headers = {"origin": page}
        reply = await s.client.get("/v1/models")
        assert reply.status == 401 and reply.headers["access-control-allow-origin"] == page
        s.client.headers = {"origin": "https://elsewhere.example.org", "authorization": "Bearer k"}
        assert "access-control-allow-origin" not in (await s.client.get("/v1/models")).headers

    serve(closed)
    serve(opened, cors_origins=(page,), api_key="k")


def test_origins_are_checked() -> None:
    assert build(ServerConfig, {"cors_origins": ["*", "http://localhost:3000"]}).cors_origins == (
        "*",
        "http://localhost:3000",
    )
    for bad in (["example.org"], ["https://example.org/page"], ["https://example.org/"]):
        with pytest.raises(ConfigError, match="not an origin"):
            build(ServerConfig, {"cors_origins": bad})
    for wrong in ("https://example.org", [5]):
        with pytest.raises(ConfigError, match="list of strings"):
            build(ServerConfig, {"cors_origins": wrong})


def test_the_developer_speaks_as_the_system(serve: Any) -> None:
    async def test(s: Served) -> None:
        await s.client.post(CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *HELLO]})
        assert s.prompt().startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|>")

    serve(test)


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
    ({"functions": []}, "functions", "tools"),
    ({"tools": [{"type": "function"}]}, "*", "function"),
    ({"tools": {}}, "tools", "array"),
    ({"thinking": {"type": "sometimes"}}, "thinking", "enabled"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "thinking", "contradict"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "boolean"),
    ({"n": 0}, "n", "between 1"),
    ({"n": 1000}, "n", "between 1"),
    ({"n": 1.5}, "n", "integer"),
    ({"n": 128}, "n", "102 fit"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "between -2"),
    ({"presence_penalty": -3}, "presence_penalty", "between -2"),
    ({"presence_penalty": "1"}, "presence_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "512"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "json_schema"),
    ({"response_format": "json_object"}, "response_format", "object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": 5}, "guided_json", "JSON schema"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "list"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "list"),
    ({"guided_grammar": ["a"]}, "guided_grammar", "string"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one of them"),
    ({"structured_outputs": {"frobnicate": 1}}, "structured_outputs.frobnicate", "json_object"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "string"),
    ({"guided_json": {"type": "object"}, "min_tokens": 5}, "min_tokens", "guided_json"),
    ({"tools": [WEATHER], "ignore_eos": True}, "ignore_eos", "tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "must be"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "does not declare",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools[0].function.strict",
        "true or false",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens", "at least 0"),
    ({"max_thinking_tokens": 5, "thinking": {"type": "disabled"}}, "max_thinking_tokens", "switched off"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens", "switched off"),
    ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens", "at least 0"),
    (
        {"max_thinking_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
        "max_thinking_tokens",
        "contradict",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "medium"),
    ({"reasoning_effort": "low", "thinking": {"type": "disabled"}}, "thinking", "contradict"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "contradict"),
    ({"reasoning_effort": "low", "max_thinking_tokens": 5}, "reasoning_effort", "one of them"),
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

    serve(test, max_waiting=98)


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
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"600": 1}}, "logit_bias"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a{20}"}, "max_tokens"),
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
        body = {"prompt": "hé", "add_special_tokens": True, "return_token_strs": True}
        assert (await s.client.post("/tokenize", body)).json["token_strs"] == ["h", "\ufffd", "\ufffd"]
        bare = {"messages": HELLO, "add_generation_prompt": False, "continue_final_message": False}
        whole = (await s.client.post("/tokenize", bare)).json["tokens"]
        assert whole == chat["tokens"][: len(whole)] and whole[-1] == BYTES.special("<|im_end|>")
        instant = (await s.client.post("/tokenize", {"messages": HELLO, "thinking": {"type": "disabled"}})).json
        assert instant["tokens"][-1] == BYTES.special("</think>")
        refused = await s.client.post("/tokenize", {"messages": HELLO, "continue_final_message": True})
        assert refused.status == 400 and refused.error["param"] == "continue_final_message"
        assert (await s.client.post("/tokenize", {})).status == 400
        assert (await s.client.post("/tokenize", {"prompt": "a", "messages": HELLO})).status == 400
        for bad in ([512], [-1], ["a"], 5):
            assert (await s.client.post("/detokenize", {"tokens": bad})).status == 400
        info = (await s.client.get("/tokenizer_info")).json
        assert info["model_max_length"] == 512 and info.keys() >= {"bos_token", "eos_token", "pad_token"}
        for name in (info["bos_token"], info["eos_token"]):
            if name is not None:  # a client takes its id from here
                assert len((await s.client.post("/tokenize", {"prompt": name})).json["tokens"]) == 1

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
            "perilune_cuda_graphs 3.0",
            "perilune_cuda_graph_bytes 4000.0",
            'perilune_kv_blocks{state="cached"} 10.0',
            'perilune_kv_blocks{state="free"} 34.0',
            "perilune_prompt_tokens_total 1000.0",
            "perilune_cached_prompt_tokens_total 300.0",
            "perilune_generated_tokens_total 77.0",
            "perilune_verified_steps_total 8.0",
            'perilune_drafted_tokens_total{position="2",source="suffix"} 5.0',
            'perilune_accepted_tokens_total{position="1",source="suffix"} 6.0',
            "perilune_acceptance_length 2.0",
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


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_tells_of_tokens_guessed_ahead(serve: Any, path: str) -> None:
    ask = {"messages": HELLO, "thinking": {"type": "disabled"}} if path == CHAT else {"prompt": "Hi"}

    async def test(s: Served) -> None:
        s.engine.answer, s.engine.width = "abcdefg", 4  # and the end: two deltas of four tokens
        usage = (await s.client.post(path, ask)).json["usage"]
        details = usage["completion_tokens_details"]
        assert (usage["completion_tokens"], details["acceptance_length"]) == (8, 4.0)
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 2)
        # A stop string among the tokens of a step: what lies behind it is nobody's.
        answer = (await s.client.post(path, {**ask, "stop": "f"})).json
        text = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        assert text == "abcde" and answer["usage"]["completion_tokens"] == 6
        s.engine.width = 1
        details = (await s.client.post(path, ask)).json["usage"]["completion_tokens_details"]
        assert [details[k] for k in ("accepted_prediction_tokens", "rejected_prediction_tokens")] == [0, 0]
        assert details["acceptance_length"] == 1.0

    serve(test)
