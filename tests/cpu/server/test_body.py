"""Large requests: read once, on a thread, and in calls too short to stall the event loop."""

import dataclasses
import json
import threading
from collections import Counter
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.core.sampling import MAX_BIASED
from perilune.server import body as bodies
from perilune.server import conversation, fields
from perilune.server.anthropic.protocol import CountBody, MessagesBody
from perilune.server.body import Body, parse
from perilune.server.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from perilune.server.responses.protocol import ResponsesBody
from perilune.text import history, tools
from tests.serving import CHAT, INFO, WEATHER, Served, served

MESSAGES = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {'text ' * 400}"} for i in range(21)]
PARAMETERS = WEATHER["function"]["parameters"]
LARGE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "tools": [WEATHER]},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 9,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
    },
    "/v1/messages/count_tokens": {
        "messages": MESSAGES,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
    },
    "/v1/responses": {
        "input": MESSAGES,
        "tools": [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}],
    },
    "/v1/responses/input_tokens": {
        "input": MESSAGES,
        "tools": [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}],
    },
    "/tokenize": {"messages": MESSAGES, "tools": [WEATHER]},
}
ROOMY = dataclasses.replace(INFO, max_model_len=1 << 20)


@pytest.mark.parametrize("path", LARGE)
@served(info=ROOMY)
async def test_a_large_conversation_is_read_once_and_not_on_the_event_loop(
    s: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    on_the_loop: set[str] = set()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if threading.current_thread() is threading.main_thread():
                on_the_loop.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(history, "_turn")
    watch(tools, "_parse_tool")
    watch(fields, "check")
    watch(conversation, "text_of")
    reply = await s.client.post(path, LARGE[path])
    assert reply.status == 200, reply.text
    assert calls["_turn"] == len(MESSAGES) and calls["_parse_tool"] == 1 and calls["check"]
    assert not on_the_loop


@served(info=ROOMY)
async def test_a_stored_conversation_is_read_on_a_thread(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    original = history._turn

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(history, "_turn", watched)
    first = await s.client.post("/v1/responses", {"input": MESSAGES})
    threads.clear()
    more = {"input": "And now?", "previous_response_id": first.json["id"]}
    reply = await s.client.post("/v1/responses", more)
    assert reply.status == 200, reply.text
    assert len(threads) == len(MESSAGES) + 2 and threading.main_thread() not in threads
    assert s.prompt().endswith("And now?<|im_end|><|im_assistant|>assistant<|im_middle|><think>")
    assert all(m["content"] in s.prompt() for m in MESSAGES)


NESTED = {"role": "user", "content": [{"type": "text", "text": 'é \ud83d\ude00 "x"'}, {"type": "text", "text": "b"}]}
BODIES: list[tuple[type[Body], Any]] = [
    (ChatBody, {"messages": [NESTED, *MESSAGES[:3]], "tools": [WEATHER], "temperature": 1, "n": 2}),
    (ChatBody, {"messages": [{"role": "user", "content": "a", "big": 10**30, "small": -1.5e-7, "no": None}]}),
    (ChatBody, {"messages": []}),
    (ChatBody, {"messages": [], "tools": [[]]}),
    (ChatBody, {"messages": [{}, 5]}),
    (ChatBody, {"messages": [{}, {}, "x"], "tools": [{}]}),
    (ChatBody, {"messages": {"role": "user"}}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "temperature": "1"}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "model": [{"a": 1}]}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "documents": [{"title": "a"}]}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "mesages": [{"title": "a"}]}),
    (ChatBody, {"messages": [{"role": "user", "contents": "a"}], "tools": [{"function": {"parametres": {}}}]}),
    (ChatBody, {"mesages": [{"role": "user", "content": "a"}]}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "enabled", "kept": 1}}),
    (CompletionBody, {"prompt": ["a", "b"], "stop": "x"}),
    (CompletionBody, {"prompt": [[1, 2], [3]]}),
    (CompletionBody, {"stop": "x"}),
    (DetokenizeBody, {"tokens": [1, 2, 3]}),
    (DetokenizeBody, {"tokens": [{"a": 1}]}),
    (TokenizeBody, {"messages": [NESTED]}),
    (CountBody, {"messages": [NESTED], "system": [{"type": "text", "text": "Be brief."}]}),
    (MessagesBody, {"messages": [NESTED, 3], "max_tokens": 5}),
    (ResponsesBody, {"input": [NESTED, 3], "text": {"format": {"type": "text"}}}),
    (ResponsesBody, {"input": "text"}),
    (ChatBody, [1]),
    (ChatBody, "text"),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_a_body_parsed_in_parts_is_the_same(kind: type[Body], body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(limit: int) -> Any:
        monkeypatch.setattr(bodies, "WHOLE_BYTES", limit)
        try:
            parsed = parse(kind, json.dumps(body, indent=1).encode())
        except RequestError as e:
            return str(e), e.param, e.code, e.status
        return parsed.model_dump(), parsed.model_fields_set

    assert outcome(1) == outcome(1 << 20)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user"}, {"role": }]}',
        b'{"messages": [{"role": "\xff"}]}',
        b'{"messages": [{"role": "user"}]',
        b'{"messages": [{"role": "user"}]}}',
        b'{"messages": ' + b'[{"a": ' * 5000,
        b'{"messages": ' + b'[{"a": ' * 5000 + b"1" + b"}]" * 5000 + b"}",
        b"",
    ],
)
def test_a_large_body_that_is_no_json(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 1 << 20):
        monkeypatch.setattr(bodies, "WHOLE_BYTES", limit)
        with pytest.raises(RequestError, match=r"not valid JSON: |nested deeper than 200 levels") as e:
            parse(ChatBody, raw)
        assert e.value.code == "invalid_json" and "\n" not in str(e.value)


def test_no_call_of_the_parser_gets_much(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(bodies, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(bodies, "from_json", lambda raw: sizes.append(len(raw)) or json.loads(raw))
    parts = [{"type": "text", "text": "x" * 300} for _ in range(40)]
    messages = [{"role": "user", "content": "y" * 500}, {"role": "user", "content": parts}] * 20
    raw = json.dumps({"messages": messages, "tools": [WEATHER] * 40}).encode()
    parsed = parse(ChatBody, raw)
    assert parsed.messages == messages and parsed.tools == [WEATHER] * 40
    assert len(raw) > 250_000 and max(sizes) < 1000


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            b'[{"role": "user", "content": "\\ud800"}]',
            r"lone surrogate (\\ud800 at messages\[0\]\.content|\\ud\w00 at byte \d+): not",
        ),
        (
            b'[{"a": {"b": ["\\udc00"]}}]',
            r"lone surrogate (\\udc00 at messages\[0\]\.a\.b\[0\]|\\ud\w00 at byte \d+): not",
        ),
        (
            b'[{"\\\\ud801 \\ud83d\\ude00": "\\ud800x"}]',
            r"lone surrogate (\\ud800 at messages\[0\]\.[^:]*|\\ud\w00 at byte \d+): not",
        ),
        (b'[{"a": ' + b"[" * 300 + b"]" * 300 + b"}]", r"nested deeper than 200 levels (in messages\[0\]|at line 1)"),
    ],
)
def test_what_is_wrong_in_a_large_body_is_named(messages: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 1 << 20):
        monkeypatch.setattr(bodies, "WHOLE_BYTES", limit)
        with pytest.raises(RequestError, match=said) as e:
            parse(ChatBody, b'{"messages": ' + messages + b"}")
        assert e.value.code == "invalid_json"


def test_a_large_logit_bias_is_refused_before_it_is_decoded() -> None:
    """400,000 entries, decoded in one call, stopped all streams for 0.3 s."""
    bias = {str(i): 1 for i in range(MAX_BIASED + 1)}
    raw = json.dumps({"logit_bias": bias, "messages": [{"role": "user", "content": "x" * bodies.WHOLE_BYTES}]}).encode()
    for kind in (ChatBody, CompletionBody):
        with pytest.raises(RequestError, match=f"logit_bias has more than {MAX_BIASED} members") as e:
            parse(kind, raw)
        assert e.value.param == "logit_bias" and e.value.status == 400
    del bias["0"]
    body = {"logit_bias": bias, "messages": [{"role": "user", "content": "x" * bodies.WHOLE_BYTES}]}
    assert parse(ChatBody, json.dumps(body).encode()).logit_bias == bias
