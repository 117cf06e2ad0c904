"""`perilune serve` as users run it: a server process with its engine, the bundled model and the official openai SDK."""

import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from perilune.tasks.families import FAMILIES, check, problems
from perilune.tasks.problem import Answer, Problem
from tests.e2e.server import COMMAND, HANG_SECONDS, QUESTION, WEATHER, Server, needs_nano

pytestmark = needs_nano


def test_it_prints_a_page_and_a_curl_line_that_work(server: Server) -> None:
    line = next(line for line in server.lines if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", line.replace("curl ", "curl -sS -m 60 ", 1)], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert answer["object"] == "chat.completion" and answer["model"] == "kimi-nano", done.stderr
    assert any("kv_blocks" in line for line in server.lines), "the automatic choices are printed with reasons"
    page = next(line.split()[4].rstrip(",") for line in server.lines if line.startswith("Talk with it at "))
    assert page == f"{server.url}/" and "<title>Perilune</title>" in httpx.get(page).text


def test_models(server: Server) -> None:
    (model,) = server.openai.models.list().data
    assert model.id == "kimi-nano"


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_streamed_or_whole_is_the_same(server: Server, thinking: bool) -> None:
    ask: dict[str, Any] = {
        "model": "kimi-nano",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
    }
    whole = server.openai.chat.completions.create(**ask)
    message = whole.choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning_content", "")
    assert message.content and "936" in message.content and "</think>" not in message.content
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    assert whole.usage.completion_tokens_details is not None
    assert bool(whole.usage.completion_tokens_details.reasoning_tokens) == bool(reasoning)
    assert bool(reasoning) == thinking
    parts: dict[str, str] = {"content": "", "reasoning_content": ""}
    finish = usage = None
    for chunk in server.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            parts["content"] += choice.delta.content or ""
            parts["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
    assert parts == {"content": message.content, "reasoning_content": reasoning}
    assert finish == whole.choices[0].finish_reason
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("thinking", [None, False])
def test_an_answer_goes_on_from_the_last_message(server: Server, thinking: Any) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "347 + 589 = 9", "partial": True}]
    more: Any = {} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}}
    create = server.openai.chat.completions.create
    whole = create(model="kimi-nano", messages=begun, temperature=0, extra_body=more)
    assert whole.choices[0].message.content == "36" and whole.choices[0].finish_reason == "stop"
    stream = create(model="kimi-nano", messages=begun, temperature=0, stream=True, extra_body=more)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "36"
    bare = [*QUESTION, {"role": "assistant", "content": "347 + 589 = 9"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False, **more}
    two = create(model="kimi-nano", messages=bare, temperature=0, n=2, logprobs=True, extra_body=flags)
    for choice in two.choices:
        assert choice.message.content == "36" and choice.logprobs is not None and choice.logprobs.content
        assert "".join(e.token for e in choice.logprobs.content) == "36"
    ids = server.post("/tokenize", json={"messages": bare, **flags}).json()
    assert two.usage is not None and whole.usage is not None
    assert ids["count"] == two.usage.prompt_tokens == whole.usage.prompt_tokens
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    text = '{\n  "sum": 9'
    made = create(
        model="kimi-nano",
        messages=[*QUESTION, {"role": "assistant", "content": text}],
        response_format=form,
        max_tokens=60,
        extra_body=more,
    )
    assert str(json.loads(text + (made.choices[0].message.content or ""))["sum"]).startswith("9")
    with pytest.raises(openai.BadRequestError, match=r"'347 .* does not fit"):
        create(model="kimi-nano", messages=bare, response_format=form, extra_body=more)


def test_a_raw_completion_of_the_rendered_prompt_is_the_chat_answer(server: Server) -> None:
    kwargs = {"thinking": False}
    chat = server.openai.chat.completions.create(
        model="kimi-nano",
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        extra_body={"chat_template_kwargs": kwargs},
    )
    ids = server.post("/tokenize", json={"messages": QUESTION, "chat_template_kwargs": kwargs}).json()
    raw = server.openai.completions.create(model="kimi-nano", prompt=ids["tokens"], temperature=0, max_tokens=40)
    assert chat.usage is not None and chat.usage.prompt_tokens == ids["count"]
    assert raw.choices[0].text.strip() == (chat.choices[0].message.content or "").strip()


def test_echo_scores_the_prompt(server: Server) -> None:
    answer = server.openai.completions.create(
        model="kimi-nano", prompt="What is 2 + 2?", echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    table = answer.choices[0].logprobs
    assert table is not None and table.token_logprobs and table.top_logprobs and table.tokens
    assert answer.choices[0].text.startswith("What is 2 + 2?")
    assert table.token_logprobs[0] is None and all(p is not None and p <= 0 for p in table.token_logprobs[1:])
    assert all(len(top) <= 3 for top in table.top_logprobs[1:])  # the token itself too
    assert table.token_logprobs[-1] == pytest.approx(max(table.top_logprobs[-1].values()))  # greedy takes the likeliest


def test_a_seed_reproduces_a_sampled_answer(server: Server) -> None:
    def ask(seed: int) -> str:
        answer = server.openai.completions.create(
            model="kimi-nano", prompt="Once", temperature=1.5, top_p=1, seed=seed, max_tokens=30
        )
        return answer.choices[0].text

    assert ask(1) == ask(1) and len({ask(s) for s in range(2, 6)}) > 1


def test_tools(server: Server) -> None:
    """Enforcement costs the model no call: what it would have said right it says right."""

    def ask(problem: Problem) -> None:
        answer = server.openai.chat.completions.create(
            model="kimi-nano", messages=list(problem.messages), tools=list(problem.tools), temperature=0, max_tokens=300
        )
        choice = answer.choices[0]
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        got = []
        for number, call in enumerate(calls):
            assert call.type == "function" and call.id == f"functions.{call.function.name}:{number}"
            got.append((call.function.name, call.function.arguments))
        assert check(problem, Answer(choice.message.content or "", tuple(got))), (problem, answer)

    asked = problems("tool_call", "heldout", 8, seed=0, thinking=True, families=FAMILIES)  # those it gets right
    assert any(problem.reply.tool_calls for problem in asked)
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(ask, asked))


def test_a_forced_call_is_made_whatever_the_question(server: Server) -> None:
    other: Any = {
        "type": "function",
        "function": {
            "name": "book_table",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"guests": {"type": "integer", "minimum": 1, "maximum": 8}, "when": {"enum": ["a", "b"]}},
                "required": ["guests", "when"],
                "additionalProperties": False,
            },
        },
    }
    ask: dict[str, Any] = {
        "model": "kimi-nano",
        "messages": QUESTION,
        "tools": [WEATHER, other],
        "temperature": 1.5,
        "top_p": 1,
        "max_tokens": 120,
        "extra_body": {"max_thinking_tokens": 20},
    }
    for seed in range(2):
        for choice in ("required", {"type": "function", "function": {"name": "book_table"}}):
            answer = server.openai.chat.completions.create(
                **ask, seed=seed, tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = answer.choices[0].message.tool_calls or ()
            assert call.type == "function" and answer.choices[0].finish_reason == "tool_calls"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "book_table":
                assert set(arguments) == {"guests", "when"}
                assert arguments["guests"] in range(1, 9) and arguments["when"] in ("a", "b")
            else:
                assert choice == "required" and isinstance(arguments["city"], str)
            assert call.id == f"functions.{call.function.name}:0"
            assert not answer.choices[0].message.content
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= 20


def test_a_schema_is_kept_streamed_or_whole(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["red", "green"]},
        },
        "required": ["names", "kind"],
        "additionalProperties": False,
    }
    ask: dict[str, Any] = {
        "model": "kimi-nano",
        "messages": QUESTION,
        "temperature": 1.2,
        "top_p": 1,
        "seed": 3,
        "max_tokens": 150,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "extra_body": {"max_thinking_tokens": 30},
    }
    whole = server.openai.chat.completions.create(**ask).choices[0]
    data = json.loads(whole.message.content or "")
    assert set(data) == {"names", "kind"} and data["kind"] in ("red", "green") and 1 <= len(data["names"]) <= 3
    assert whole.finish_reason == "stop"
    text = ""
    for chunk in server.openai.chat.completions.create(**ask, stream=True):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.message.content
    for extra, fits in (
        ({"guided_choice": ["north", "south"]}, "north|south"),
        ({"guided_regex": "[0-9]{3}-[a-f]+x"}, "[0-9]{3}-[a-f]+x"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
    ):
        answer = server.openai.completions.create(
            model="kimi-nano", prompt="Where?", temperature=1.5, max_tokens=40, extra_body=extra
        )
        (said,) = answer.choices
        closed = (said.model_extra or {}).get("closed_by_grammar", False)
        assert re.fullmatch(fits, said.text) and said.finish_reason == ("length" if closed else "stop")
    letter = server.post("/tokenize", json={"prompt": "a"}).json()["tokens"][0]
    (said,) = server.openai.completions.create(
        model="kimi-nano",
        prompt="Where?",
        max_tokens=9,
        logit_bias={str(letter): 100},
        extra_body={"guided_regex": "a+b"},
    ).choices
    assert re.fullmatch("a{6,}b", said.text)
    assert (said.finish_reason, said.model_extra) == ("length", {"closed_by_grammar": True})
    assert "perilune_answers_closed_by_grammar_total 0.0" not in server.get("/metrics").text
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.openai.chat.completions.create(**{**ask, "max_tokens": 5})


def test_three_answers_streamed_are_three_answers_whole(server: Server) -> None:
    ask: dict[str, Any] = {
        "model": "kimi-nano",
        "messages": [{"role": "user", "content": "Tell me something."}],
        "temperature": 2.0,
        "top_p": 1,
        "seed": 11,
        "n": 3,
        "max_tokens": 24,
        "extra_body": {"thinking": {"type": "disabled"}},
    }
    whole = server.openai.chat.completions.create(**ask)
    texts = [""] * 3
    for chunk in server.openai.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) > 1
    assert whole.usage is not None and whole.usage.completion_tokens <= 3 * 24
    ranked = server.openai.completions.create(
        model="kimi-nano", prompt="Once", n=2, best_of=4, seed=1, temperature=1.5, max_tokens=8, logprobs=0
    )
    means = [sum(t) / len(t) for c in ranked.choices if c.logprobs and (t := c.logprobs.token_logprobs)]
    assert len(means) == 2 and means[0] >= means[1]


def test_penalties_and_bias_change_what_is_said(server: Server) -> None:
    def ask(**fields: Any) -> list[int]:
        answer = server.openai.completions.create(
            model="kimi-nano",
            prompt="1 1 1 1 1 1 1 1",
            temperature=0,
            max_tokens=24,
            extra_body={"ignore_eos": True, **fields.pop("extra", {})},
            **fields,
        )
        return list(server.post("/tokenize", json={"prompt": answer.choices[0].text}).json()["tokens"])

    plain, penalised = ask(), ask(frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(penalised)) / len(penalised) > len(set(plain)) / len(plain)
    only = server.post("/tokenize", json={"prompt": "z"}).json()["tokens"][0]
    assert ask(logit_bias={str(only): 100}) == [only] * 24
    assert ask(extra={"allowed_token_ids": [only]}) == [only] * 24
    word = server.post("/detokenize", json={"tokens": plain[:1]}).json()["prompt"]
    assert plain[0] not in ask(extra={"bad_words": [word]})


def test_a_misspelt_field_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        server.openai.completions.create(model="kimi-nano", prompt="a", extra_body={"temprature": 0})


def test_prompt_logprobs_add_up_to_echo(server: Server) -> None:
    ask: dict[str, Any] = {"model": "kimi-nano", "prompt": "What is 2 + 2?", "max_tokens": 1, "temperature": 0}
    echoed = server.openai.completions.create(**ask, echo=True, logprobs=0).choices[0].logprobs
    answer = server.openai.completions.create(**ask, extra_body={"prompt_logprobs": 0}).choices[0]
    table = (answer.model_extra or {})["prompt_logprobs"]
    assert echoed is not None and echoed.token_logprobs is not None and table[0] is None
    scores = [next(iter(row.values()))["logprob"] for row in table[1:]]
    assert scores == pytest.approx(echoed.token_logprobs[1 : len(table)], abs=1e-4)


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_effort_bounds_the_thought(server: Server, effort: Any) -> None:
    answer = server.openai.chat.completions.create(
        model="kimi-nano",
        messages=QUESTION,
        reasoning_effort=effort,
        max_completion_tokens=300,
        temperature=0,
    )
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    reasoned = answer.usage.completion_tokens_details.reasoning_tokens or 0
    assert (reasoned == 0) == (effort == "none") and "936" in (answer.choices[0].message.content or "")


def test_a_thought_is_cut_at_its_bound(server: Server) -> None:
    cut = server.openai.chat.completions.create(
        model="kimi-nano",
        messages=QUESTION,
        max_tokens=60,
        temperature=0,
        extra_body={"max_thinking_tokens": 3},
    )
    assert cut.usage is not None and cut.usage.completion_tokens_details is not None
    assert cut.usage.completion_tokens_details.reasoning_tokens == 3 and cut.choices[0].message.content


def test_a_tool_result_is_answered(server: Server) -> None:
    history: Any = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "functions.get_weather:0",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "rain, 4 degrees"},
    ]
    follow = server.openai.chat.completions.create(
        model="kimi-nano", messages=history, tools=[WEATHER], temperature=0, max_tokens=100
    )
    assert follow.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_thirty_two_clients_at_once_get_what_they_would_get_alone(server: Server) -> None:
    def ask(i: int) -> str | None:
        answer = server.openai.chat.completions.create(
            model="kimi-nano",
            messages=[{"role": "user", "content": f"What is {100 + i % 4} + {200 + i % 4}?"}],
            temperature=0,
            max_tokens=24,
            extra_body={"thinking": {"type": "disabled"}},
        )
        return answer.choices[0].message.content

    alone = [ask(i) for i in range(4)]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == alone * 8


def test_bad_requests_leave_the_server_alive(server: Server) -> None:
    client, chat = httpx.Client(base_url=server.url, timeout=HANG_SECONDS), "/v1/chat/completions"
    for status, response in (
        (400, client.post(chat, content=b"{not json")),
        (400, client.post(chat, json={"messages": []})),
        (400, client.post(chat, json={"messages": QUESTION, "temperature": "hot"})),
        (400, client.post(chat, json={"messages": [{"role": "user", "content": "long " * 20_000}]})),
        (404, client.post(chat, json={"messages": QUESTION, "model": "other"})),
        (404, client.get("/nowhere")),
        (405, client.get(chat)),
        (413, client.post(chat, content=b" " * (33 << 20))),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="context"):
        server.openai.completions.create(model="kimi-nano", prompt=[5] * 100_000)
    # Not HTTP at all, and a client that leaves in the middle of its body.
    for noise in (b"\x00\xff\x00\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"):
        with socket.create_connection(server.address) as raw:
            raw.sendall(noise)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.post(chat, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(server: Server, stream: bool) -> None:
    body = {"prompt": [65], "max_tokens": 100_000, "ignore_eos": True, "stream": stream}

    def leave() -> None:
        with socket.create_connection(server.address) as client:
            data = json.dumps(body).encode()
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            while stream and client.recv(1 << 16).count(b"data: ") == 0:
                pass
            while not server.metric("perilune_num_requests_running"):
                time.sleep(0.01)

    assert server.cancelled_after(leave) == 1, "the engine worked on for a client that left"


def test_what_can_be_expected_to_fail_is_logged_in_one_line(server: Server) -> None:
    endless = {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}}}
    many = {"type": "string", "pattern": "^(a{0,1000}){0,1000}$"}
    before = len(server.lines)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"):
        for body in (b"{", b"[" * 500, b'{"prompt":"\\ud800"}'):
            assert server.post(path, content=body).status_code == 400
        with socket.create_connection(server.address) as half:  # a body that ends with the connection
            half.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    with socket.create_connection(server.address) as odd:
        odd.sendall(b"not HTTP\r\n\r\n")
    for schema, stream, status in (
        ({**endless, "$ref": "#/$defs/x"}, True, 400),
        ({"type": "string", "minLength": 10**12}, True, 400),
        (
            {**endless, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "additionalProperties": False},
            True,
            200,
        ),
        (many, False, 200),
    ):
        body = {"messages": QUESTION, "guided_json": schema, "max_tokens": 300, "stream": stream}
        reply = server.post("/v1/chat/completions", json=body | {"reasoning_effort": "none"})
        assert reply.status_code == status and (status == 400 or '"error"' not in reply.text), reply.text
    server.get("/v1/models", headers={"x-request-id": "the-last"})
    while not any("id=the-last" in line for line in server.lines):
        time.sleep(0.01)
    said = [line for line in server.lines[before:] if not re.match(r"kernel \d+ of|\d+ kernels were compiled", line)]
    assert not any("Traceback" in line or "ERROR" in line for line in said), "".join(said)
    assert all(re.match(r"[0-9:]{8} (INFO|WARNING) ", line) for line in said), "".join(said)


def test_metrics_count_the_work(server: Server) -> None:
    before = server.metric("perilune_generation_tokens_total")
    server.openai.completions.create(model="kimi-nano", prompt="a", max_tokens=8, extra_body={"ignore_eos": True})
    deadline = time.monotonic() + 60
    while server.metric("perilune_generation_tokens_total") < before + 8:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.metric("perilune_engine_up") == 1


def test_a_taken_port_is_one_line_with_the_remedy(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1 and "in use" in done.stderr and "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
