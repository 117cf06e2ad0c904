"""The server around the answers: clients that leave, keys, limits, metrics, failures of the engine."""

import asyncio
import base64
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import ServerConfig, build
from perilune.core.errors import CheckpointError, ConfigError
from perilune.server.service import read_generation_config
from tests.serving import BYTES, CHAT, HELLO, TEXT, Served, serve, served


def test_pages_of_other_origins_may_call_only_if_allowed() -> None:
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


def test_generation_config_is_read_and_checked(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0, "top_p": 0.9, "eos_token_id": 5}')
    assert read_generation_config(tmp_path) == {"temperature": 0, "top_p": 0.9}
    for bad in ('{"temperature": "hot"}', '{"top_p": 7}', "[", "[]", '{"eos_token_id": "x"}'):
        file.write_text(bad)
        with pytest.raises(CheckpointError, match="generation_config"):
            read_generation_config(tmp_path)


@served(api_key="k")
async def test_the_page_is_open_and_runs_its_own_script_only(s: Served) -> None:
    assert (await s.client.get("/v1/models")).status == 401
    reply = await s.client.get("/")
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'" and "connect-src 'self'" in policy
    for tag, rule in (("script", policy[1]), ("style", policy[2])):
        text = reply.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rule == f"{tag}-src 'sha256-{digest}'"
    assert "require-trusted-types-for 'script'" in policy and "trusted-types 'none'" in policy
    assert "innerHTML" not in reply.text and "http" not in reply.text


@served(api_key="k3y")
async def test_a_slash_at_the_end_of_a_path_is_no_other_path(s: Served) -> None:
    """A redirect would send the client to the http:// address that its Host header names, with its key and prompt."""
    assert (await s.client.get("/health/")).status == 200 and (await s.client.get("/v1/models/")).status == 401
    s.client.headers = {"authorization": "Bearer k3y"}
    assert (await s.client.post(CHAT + "/", {"messages": HELLO})).status == 200
    assert (await s.client.get("/v1/models/")).json["object"] == "list"
    for path in ("//", CHAT + "//", "/nowhere/"):
        reply = await s.client.post(path, {"messages": HELLO})
        assert reply.status in (404, 405) and "location" not in reply.headers


@served(served_model_name="org/name")
async def test_models(s: Served) -> None:
    (listed,) = (await s.client.get("/v1/models")).json["data"]
    assert listed["id"] == "org/name" and listed["max_model_len"] == 512 and listed["object"] == "model"
    assert listed["capabilities"] == {
        "chat": True, "thinking": "optional", "tools": True, "structured_output": True, "input": ["text"],
    }  # fmt: skip
    recommended = {"thinking": {"temperature": 1.0, "top_p": 0.95}, "instant": {"temperature": 0.6, "top_p": 0.95}}
    assert listed["sampling_defaults"] == recommended
    assert (await s.client.get("/v1/models/org/name")).json == listed
    assert (await s.client.get("/v1/models/other")).status == 404


@served()
async def test_tokenize_and_back(s: Served) -> None:
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


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["a", "b"]})])
@pytest.mark.parametrize("stream", [False, True])
@served(hold=3)
async def test_a_client_that_leaves_frees_the_engine_at_once(s: Served, path: str, body: Any, stream: bool) -> None:
    leave = asyncio.Event()
    call = asyncio.create_task(s.client.post(path, {**body, "stream": stream}, leave=leave))
    await s.hangs(len(body.get("prompt", "x")))
    assert s.engine.live and not s.engine.cancelled
    leave.set()
    await call
    assert sorted(s.engine.cancelled) == list(range(len(s.engine.seen))) and s.engine.live == 0
    page = (await s.client.get("/metrics")).text
    assert f'perilune_request_success_total{{finished_reason="cancelled"}} {float(len(s.engine.seen))}' in page


@served(hold=0, max_waiting=2)
async def test_a_full_server_answers_429_and_recovers(s: Served) -> None:
    room = s.engine.info.max_num_seqs + 2
    calls = [asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": i % 2 == 0})) for i in range(room)]
    await s.hangs(room)
    refused = await s.client.post(CHAT, {"messages": HELLO})
    assert refused.status == 429 and refused.error["code"] == "too_many_requests"
    assert refused.headers["retry-after"] == "1"
    assert (await s.client.post(TEXT, {"prompt": "a", "stream": True})).status == 429
    s.engine.release.set()
    assert [r.status for r in await asyncio.gather(*calls)] == [200] * room
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200


@served(pause=0.001)
async def test_thirty_two_clients_at_once(s: Served) -> None:
    async def one(s: Served, i: int) -> str:
        body = {"messages": [{"role": "user", "content": f"client {i}"}], "thinking": {"type": "disabled"}}
        if i % 2:
            return str((await s.client.post(CHAT, body)).json["choices"][0]["message"]["content"])
        chunks = (await s.client.post(CHAT, {**body, "stream": True})).chunks
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    assert await asyncio.gather(*(one(s, i) for i in range(32))) == ["Hello"] * 32
    assert len({tuple(p) for p, _ in s.engine.seen}) == 32


@served(hold=3)
async def test_each_token_is_sent_when_it_exists(s: Served) -> None:
    pieces: list[bytes] = []
    body = {"messages": HELLO, "stream": True, "thinking": {"type": "disabled"}}
    call = asyncio.create_task(s.client.post(CHAT, body, got=pieces.append))
    await s.hangs()
    assert len(pieces) == 4 and b'"content":"l"' in pieces[-1]  # role, H, e, l: the fourth token is held
    s.engine.release.set()
    reply = await call
    assert reply.headers["cache-control"] == "no-cache"
    assert all(p.startswith(b"data: ") and p.endswith(b"\n\n") for p in reply.pieces)


@served(fail_at=2)
async def test_an_engine_error_is_an_error_not_text(s: Served) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), (TEXT, {"prompt": ["a", "b"]})):
        reply = await s.client.post(path, body)
        assert reply.status == 500 and reply.error["code"] == "generation_failed"
        assert "not finite" in reply.error["message"]
        chunks = (await s.client.post(path, {**body, "stream": True})).chunks
        assert "not finite" in chunks[-1]["error"]["message"] and chunks[-1]["error"]["type"] == "server_error"
        assert all(not (c.get("choices") or [{}])[0].get("finish_reason") for c in chunks)


@served(hold=2)
async def test_a_dead_engine_is_reported(s: Served) -> None:
    assert (await s.client.get("/health")).json == {"status": "ok"}
    call = asyncio.create_task(s.client.post(CHAT, {"messages": HELLO}))
    await s.hangs()
    s.engine.alive = False
    s.engine.release.set()
    assert (await call).status == 503
    for reply in (await s.client.get("/health"), await s.client.post(CHAT, {"messages": HELLO, "stream": True})):
        assert reply.status == 503 and reply.error["code"] == "engine_unavailable"
    assert "perilune_engine_up 0.0" in (await s.client.get("/metrics")).text


def test_a_refused_request_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        s.engine.alive = False
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 503
        s.engine.alive = True
        s.service.drain()
        assert (await s.client.post(CHAT, {"messages": HELLO})).status == 503

    with caplog.at_level(logging.INFO):
        serve(test)
    said = [(r.name, r.getMessage()) for r in caplog.records if r.name.startswith("perilune")]
    assert len(said) == 2, said
    assert all(name == "perilune.access" and "/v1/chat/completions 503 " in line for name, line in said), said


def test_a_stream_that_the_engine_lost_is_one_line_of_the_log_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        call = asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": True}))
        await s.hangs()
        s.engine.alive = False
        s.engine.release.set()
        assert (await call).chunks[-1]["error"]["code"] == "engine_unavailable"

    with caplog.at_level(logging.INFO):
        serve(test, hold=2)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("perilune")]
    assert len(said) == 1 and f"POST {CHAT} 200 " in said[0] and said[0].endswith(" error=engine_unavailable"), said


@served()
async def test_an_internal_error_shows_no_details(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(s.engine, "generate", broken)
    with pytest.raises(ZeroDivisionError):  # raised again after the answer, for the server's log
        await s.client.post(CHAT, {"messages": HELLO}, got=lambda b: seen.append(b))
    chunks = (await s.client.post(CHAT, {"messages": HELLO, "stream": True})).chunks
    for error in (json.loads(seen[0])["error"], chunks[-1]["error"]):
        assert "secret" not in error["message"] and error["type"] == "server_error"


@served(hold=1)
async def test_stopping_the_server_ends_answers_in_flight(s: Served) -> None:
    calls = [asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": x})) for x in (False, True)]
    await s.hangs(2)
    s.service.stop()
    whole, stream = await asyncio.gather(*calls)
    assert whole.status == 503 and "shutting down" in whole.error["message"]
    assert "shutting down" in stream.chunks[-1]["error"]["message"]


@served(api_key="k3y")
async def test_the_api_key_is_asked_for(s: Served) -> None:
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


@served(restarts=3)
async def test_metrics_page(s: Served) -> None:
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
        'perilune_request_success_total{finished_reason="stop"} 2.0',
        "perilune_generations_in_flight 0.0",
        "perilune_time_to_first_token_seconds_count 2.0",
        "perilune_inter_token_latency_seconds_count 10.0",
        "perilune_e2e_request_latency_seconds_count 2.0",
        "perilune_engine_up 1.0",
        "perilune_engine_restarts_total 3.0",
        "perilune_num_requests_running 2.0",
        "perilune_num_requests_waiting 1.0",
        'perilune_kv_blocks{state="owned"} 20.0',
        "perilune_cuda_graphs 3.0",
        "perilune_cuda_graph_bytes 4000.0",
        'perilune_kv_blocks{state="cached"} 10.0',
        'perilune_kv_blocks{state="free"} 34.0',
        "perilune_prompt_tokens_total 1000.0",
        "perilune_prefix_cache_hits_total 300.0",
        "perilune_generation_tokens_total 77.0",
        "perilune_spec_decode_num_drafts_total 8.0",
        'perilune_spec_decode_num_draft_tokens_total{position="2",source="suffix"} 5.0',
        'perilune_spec_decode_num_accepted_tokens_total{position="1",source="suffix"} 6.0',
        "perilune_acceptance_length 2.0",
        "perilune_num_preemptions_total 1.0",
    ):
        assert line in lines, f"{line} is missing"
    assert "secret" not in reply.text


def test_the_access_log_has_no_contents(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Served) -> None:
        s.client.headers = {"authorization": "Bearer k3y"}
        await s.client.post(CHAT, {"messages": [{"role": "user", "content": "private"}]})

    with caplog.at_level(logging.INFO):
        serve(test, api_key="k3y", answer="answered")
    line = next(r.getMessage() for r in caplog.records if r.name == "perilune.access")
    assert line.startswith("POST /v1/chat/completions 200 ")
    assert not any(word in caplog.text for word in ("private", "k3y", "answered"))
