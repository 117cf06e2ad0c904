"""Pictures in requests of all three APIs: what reaches the engine, and what is refused in one line."""

import asyncio
import base64
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune.core.config import ServerConfig
from perilune.core.errors import ConfigError
from perilune.media.decoder import Picture
from perilune.media.kinds import reads_video
from perilune.server.audit import AuditLog
from perilune.server.call import Call
from perilune.server.pictures import reader
from perilune.server.pictures.reader import _key
from tests.cpu.media.pictures import chunk, file, png, scene
from tests.serving import BYTES, CHAT, HANG_SECONDS, INFO, Reply, Served, serve, served

SEEN = ["text", "image", "video"] if reads_video() else ["text", "image"]
PAD = BYTES.special("<|media_pad|>")
SEES: dict[str, Any] = {"info": dataclasses.replace(INFO, max_model_len=40_000, media_pad=PAD)}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WIDE, TALL = file(scene(100, 30)), file(scene(30, 100), "JPEG")  # 4 x 2 tokens each
PICTURE = "<|media_begin|>image<|media_content|>" + 8 * "<|media_pad|>" + "<|media_end|>\n"


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes = WIDE, kind: str = "png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data, kind), **more}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


def block(data: bytes = WIDE, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}}


def check_refused(reply: Reply, where: str, words: str, code: str = "invalid_image") -> None:
    error = reply.json["error"]
    message = error["message"]
    assert reply.status == 400 and words in message and "\n" not in message and len(message) < 400, message
    assert message.startswith(where)
    if "param" in error:
        assert (error["param"], error["code"]) == (where, code)


@served(**SEES)
async def test_chat(s: Served) -> None:
    body = chat(text("A"), part(detail="high"), text("B"), part(TALL, "jpeg"), part(TALL, "jpeg"))
    reply = await s.client.post(CHAT, body)
    assert reply.status == 200, reply.text
    usage = reply.json["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 24
    assert usage["prompt_tokens"] == len(s.engine.seen[-1][0])
    assert s.prompt().startswith(f"<|im_user|>user<|im_middle|>A{PICTURE}B{PICTURE}{PICTURE}<|im_end|>")
    first, second, third = s.engine.pictures[-1]
    assert second.digest == third.digest != first.digest
    assert (first.grid, second.grid, first.tokens) == ((1, 4, 8), (1, 8, 4), 8)
    streamed = await s.client.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.chunks[-1]["usage"]["prompt_tokens_details"]["image_tokens"] == 24
    both = await s.client.post(CHAT, {**body, "n": 2})
    assert both.json["usage"]["prompt_tokens_details"]["image_tokens"] == 24
    assert s.engine.pictures[-1][0] is s.engine.pictures[-2][0], "decoded once for all answers"
    for messages in (
        [{"role": "system", "content": [part()]}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [part()]},
         {"role": "user", "content": "Hi"}],
    ):  # fmt: skip
        assert (await s.client.post(CHAT, {"messages": messages})).status == 200
        assert s.prompt().count(PICTURE) == 1
    plain = await s.client.post(CHAT, chat(text("Hi")))
    assert plain.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert s.service.pictures.budget.held == 0


@served(**SEES)
async def test_tool_results_of_all_apis(s: Served) -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    item = {"type": "function_call", "call_id": "functions.f:0", "name": "f", "arguments": "{}"}
    shot: dict[str, Any] = {"type": "input_image", "image_url": url(WIDE), "detail": "auto"}
    use = {"type": "tool_use", "id": "functions.f:0", "name": "f", "input": {}}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {
            "messages": [
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "functions.f:0", "content": [text("R"), part()]},
            ],
            "thinking": {"type": "disabled"},
        },
        RESPONSES: {
            "input": [
                {"role": "user", "content": "U"},
                item,
                {
                    "type": "function_call_output",
                    "call_id": "functions.f:0",
                    "output": [{"type": "input_text", "text": "R"}, shot],
                },
            ],
            "reasoning": {"effort": "none"},
        },
        MESSAGES: {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "functions.f:0", "content": [text("R"), block()]}
                    ],
                },
            ],
        },
    }
    prompts = set()
    for path, body in bodies.items():
        reply = await s.client.post(path, body)
        assert reply.status == 200, reply.text
        prompts.add(s.prompt())
        assert [p.tokens for p in s.engine.pictures[-1]] == [8]
    (prompt,) = prompts
    assert f"## Return of functions.f:0\nR{PICTURE}<|im_end|>" in prompt


@served(**SEES)
async def test_responses_keep_pictures_of_earlier_turns(s: Served) -> None:
    said = [{"type": "input_text", "text": "A"}, {"type": "input_image", "image_url": url(WIDE)}]
    first = await s.client.post(RESPONSES, {"input": [{"role": "user", "content": said}]})
    assert first.json["usage"]["input_tokens_details"]["image_tokens"] == 8
    again = await s.client.post(RESPONSES, {"input": "B", "previous_response_id": first.json["id"]})
    assert again.json["usage"]["input_tokens_details"]["image_tokens"] == 8
    assert f"A{PICTURE}<|im_end|>" in s.prompt()
    assert s.engine.pictures[0][0].digest == s.engine.pictures[1][0].digest
    named = await s.client.post(RESPONSES, {"input": ["x", {"role": "user", "content": [{"type": "input_image"}]}]})
    assert named.status == 400
    for shot, where, words, code in (
        ({"image_url": url(b"x")}, "input[1].content[0]", "none of PNG", "invalid_image"),
        ({"image_url": url(WIDE), "detail": "huge"}, "input[1].content[0]", "must be one of auto", "invalid_value"),
        ({"file_id": "f"}, "input[1].content[0].file_id", "send image_url", "unsupported_parameter"),
    ):
        parts = [{"type": "input_image", **shot}]
        body = {
            "instructions": "S",
            "input": [{"role": "user", "content": "a"}, {"role": "user", "content": parts}],
        }
        check_refused(await s.client.post(RESPONSES, body), where, words, code)


@served(**SEES)
async def test_messages_and_counting(s: Served) -> None:
    messages = [{"role": "user", "content": [block(), text("A"), block(TALL, "image/jpeg")]}]
    reply = await s.client.post(MESSAGES, {"max_tokens": 9, "messages": messages})
    assert reply.status == 200, reply.text
    assert f"<|im_middle|>{PICTURE}A{PICTURE}<|im_end|>" in s.prompt()
    counted = await s.client.post(f"{MESSAGES}/count_tokens", {"messages": messages})
    assert counted.json == {"input_tokens": len(s.engine.seen[-1][0])}
    parts = [{"type": "input_text", "text": "A"}, {"type": "input_image", "image_url": url(WIDE)}]
    asked = {"input": [{"role": "user", "content": parts}]}
    counted = await s.client.post(f"{RESPONSES}/input_tokens", asked)
    assert counted.json["input_tokens"] == (await s.client.post(RESPONSES, asked)).json["usage"]["input_tokens"]
    reply = await s.client.post("/tokenize", chat(part(), text("A"), part(TALL, "jpeg")))
    assert reply.json["tokens"].count(PAD) == 16 and reply.json["count"] == len(reply.json["tokens"])
    for path, where in ((MESSAGES, {"max_tokens": 9}), (f"{MESSAGES}/count_tokens", {})):
        lying = {**where, "messages": [{"role": "user", "content": [text("A"), block(LIES)]}]}
        error = (await s.client.post(path, lying)).json["error"]
        assert error["type"] == "invalid_request_error"
        for asked, status in (("error", 400), ("downsize", 200)):
            sent = {**block(), "transformations": {"oversized_image": asked}}
            reply = await s.client.post(path, {**where, "messages": [{"role": "user", "content": [sent]}]})
            assert reply.status == status and ("'error' is not served" in reply.text) == (status == 400)
        assert error["message"].startswith("messages[0].content[1]: ") and "truncated" in error["message"]
    check_refused(await s.client.post("/tokenize", chat(part(b"x"))), "messages[0].content[0]", "none of PNG")
    assert s.service.pictures.budget.held == 0


BOMB = png(20_000, 20_000, b"")
TRUNCATED = file(scene(300, 300))[:700]
LIES = png(300, 300, b"\0" * 900)  # One row of 300 is there.


BAD: list[tuple[Any, str, str | None]] = [
    (part(BOMB), "20,000 x 20,000 pixels, and at most 100,000,000", "invalid_image"),
    (part(TRUNCATED), "damaged or truncated", "invalid_image"),
    (part(LIES), "damaged or truncated", "invalid_image"),
    (part(png(9, 9, b"", chunk(b"IDAT", b"x"))), "damaged or truncated", "invalid_image"),
    (part(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "SVG is not read", "invalid_image"),
    (part(b""), "it is empty", "invalid_image"),
    (part(b"%PDF-1.7"), "none of PNG", "invalid_image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a"}}, "not base64", "invalid_image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "must be 'data:image/p", "invalid_image"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,é===" }}, "not base64", "invalid_image"),
    ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "as a data: URL", "invalid_image_url"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "as a data: URL", "invalid_image_url"),
    ({"type": "image_url", "image_url": 5}, "must be {'url'", "invalid_value"),
    # As other programs' APIs take it, and longer than an address may be.
    (
        {"type": "image_url", "image_url": {"url": base64.b64encode(file(scene(90, 90))).decode()}},
        "the image must be sent as a data: URL, 'data:image/png;base64,' and", "invalid_image_url",
    ),
    (part(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"), "it is HEIC, none of PNG, JPEG", "invalid_image"),
    ({"type": "input_audio", "input_audio": {}}, "must be 'text', 'image_url' or 'video_url', not 'inp", None),
    (part(detail="tiny"), "detail must be one of", "invalid_value"),
    ({"type": "video_url", "video_url": {"url": "data:,"}}, "its URL must be 'data:video/mp4", "invalid_video"),
    ({"type": "image", "source": {}}, "'type': 'image_url'", "unsupported_media"),
]  # fmt: skip


@served(**SEES)
async def test_what_a_file_is_its_bytes_say(s: Served) -> None:
    for kind in ("jpeg", "png", "webp", "jpg", "x-unknown"):
        reply = await s.client.post(CHAT, chat(part(TALL, kind)))
        assert reply.status == 200, reply.text
    assert len({pictures[0].digest for pictures in s.engine.pictures}) == 1 and len(s.engine.pictures) == 5


@served(**SEES)
async def test_bad_pictures_are_one_clear_error(s: Served) -> None:
    for sent, words, code in BAD:
        if code is None:  # a part that is no picture: its type is what is wrong
            error = (await s.client.post(CHAT, chat(part(), sent))).error
            assert words in error["message"] and error["param"] == "messages[0].content[1].type"
            continue
        check_refused(await s.client.post(CHAT, chat(part(), sent)), "messages[0].content[1]", words, code)
    forged = {**part(b"x"), "where": "input[0]\n12:00:00 INFO"}
    check_refused(await s.client.post(CHAT, chat(forged)), "messages[0].content[0]", "none of PNG")
    assert s.engine.seen == [] and s.service.pictures.budget.held == 0


def test_a_model_that_does_not_see_says_so() -> None:
    async def test(s: Served) -> None:
        reply = await s.client.post(CHAT, chat(part(b"x")))
        words = "the model 'm' does not see pictures: send text only, or serve a model that does (moonshotai/Kimi-K2.6)"
        check_refused(reply, "messages[0].content[0]", words, "unsupported_media")
        assert (await s.client.get("/v1/models/m")).json["capabilities"]["input"] == ["text"]

    serve(test)

    async def seeing(s: Served) -> None:
        assert (await s.client.get("/v1/models/m")).json["capabilities"]["input"] == SEEN
        cut = await s.client.post(CHAT, chat(part(), truncate_prompt_tokens=5))
        assert cut.error["param"] == "truncate_prompt_tokens"
        begun = {"messages": [*chat(text("A"))["messages"], {"role": "assistant", "content": [part()]}]}
        assert "cannot be continued" in (await s.client.post(CHAT, begun)).error["message"]

    serve(seeing, **SEES)


def test_placeholders_elsewhere(tmp_path: Path) -> None:
    """The audit log has each picture's once; raw prompts have none."""
    log = AuditLog(tmp_path, "m", BYTES.decode, lambda: None, limit_bytes=1 << 20)

    async def test(s: Served) -> None:
        await s.client.post(CHAT, chat(part(), text("A")))
        for prompt in ([1, PAD], "a<|media_pad|>"):
            refused = await s.client.post("/v1/completions", {"prompt": prompt})
            assert (refused.error["param"], refused.error["code"]) == ("prompt", "unsupported_media")

    serve(test, **SEES, audit_log=str(tmp_path), audit_text=True, observers=[lambda service: log])
    (file,) = tmp_path.glob("*.jsonl")
    first = json.loads(file.read_text().splitlines()[0])
    assert "image<|media_content|><|media_pad|><|media_end|>\nA<|im_end|>" in first["prompts"][0]


@served(**SEES)
async def test_a_hundred_pictures_are_one_clear_error(s: Served) -> None:
    reply = await s.client.post(CHAT, chat(*[part(BOMB)] * 100))
    words = "100 pictures in one request, and at most 64 are read: send fewer"
    assert (reply.status, reply.error["code"]) == (400, "too_many_pictures") and words in reply.error["message"]
    assert not s.service.pictures.pool.active and not s.service.pictures.pool._idle, "none was decoded"
    # With many, the first bad one ends the work on the others.
    reply = await s.client.post(CHAT, chat(*[part()] * 20, part(b"x"), *[part()] * 40))
    check_refused(reply, "messages[0].content[20]", "none of PNG")
    assert (await s.client.post(CHAT, chat(*[part()] * 64))).status == 200


@served(**SEES)
async def test_the_time_limit_of_a_request(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "REQUEST_SECONDS", 1)
    large = png(10_000, 10_000, bytes(12_510_000), depth=1, colour=0)
    reply = await s.client.post(CHAT, chat(*(part(large + bytes([i])) for i in range(64))))
    assert reply.status == 400 and "64 pictures of this request takes longer than 1 s" in reply.text
    assert not any(decoder._turn.locked() for decoder in s.service.pictures.pool._idle)


@served(**SEES, hold=0, media_memory_mb=2)
async def test_memory_of_all_pictures_is_bounded(s: Served) -> None:
    """600 x 600 pixels are 484 tokens, 1.1 MB of patches."""
    large = part(file(scene(600, 600)))
    held = asyncio.create_task(s.client.post(CHAT, chat(large)))
    await s.hangs()
    budget = s.service.pictures.budget
    assert budget.held == 484 * 4 * 588, "text of the URL was given back"
    reply = await s.client.post(CHAT, chat(large))
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "server_busy", "2")
    assert budget.held == 484 * 4 * 588
    assert (await s.client.post("/tokenize", chat(part()))).status == 200
    s.engine.release.set()
    assert (await held).status == 200 and budget.held == 0
    reply = await s.client.post(CHAT, chat(large, large))
    assert (reply.status, reply.error["code"]) == (400, "too_many_pictures")
    assert "need more than 2 MB of memory" in reply.error["message"] and budget.held == 0


@served(**SEES, media_memory_mb=16)
async def test_a_picture_sent_again_is_not_decoded_again(s: Served) -> None:
    pictures, decoded = s.service.pictures, list[int]()
    decode = pictures.pool.decode

    async def counting(data: bytes) -> Picture:
        decoded.append(len(data))
        return await decode(data)

    pictures.pool.decode = counting  # type: ignore[method-assign]
    for more in ([], [part(TALL, "jpeg")], [part(TALL, "jpeg")]):
        assert (await s.client.post(CHAT, chat(part(), *more))).status == 200
    assert decoded == [len(WIDE), len(TALL)]
    assert s.engine.pictures[2][0].digest == s.engine.pictures[0][0].digest
    budget = pictures.budget
    assert (budget.held, budget.cached) == (0, 2 * 32 * 588)
    assert budget.get(_key("", url(WIDE))) is not None and budget.get(_key("another key", url(WIDE))) is None
    with budget.share() as share:  # requests take the memory of what is only kept
        share.take(budget.limit_bytes - 32 * 588)
        assert budget.cached == 32 * 588 and budget.get(_key("", url(TALL, "jpeg"))) is None
        share.take(1)
        assert budget.cached == 0
    for i in range(100):
        budget.keep(b"%d" % i, Picture(np.zeros(1 << 20, np.uint8), (1, 2, 2), 1, b""))
    assert budget.cached == 4 << 20, "a quarter of the limit"


@served(**SEES)
async def test_a_client_that_leaves_stops_the_decoding(s: Served) -> None:
    assert (await s.client.post(CHAT, chat(part()))).status == 200
    pool = s.service.pictures.pool
    (decoder,) = pool._idle
    decoder._seconds = HANG_SECONDS  # after which decoding would be given up
    leave, calls = asyncio.Event(), list[Call]()
    s.service.observers.append(calls.append)
    body = chat(part(TALL, "jpeg"))
    for path in (CHAT, "/tokenize"):
        await pool.decode(WIDE)
        assert decoder._worker is not None
        worker = decoder._worker.pid
        os.kill(worker, signal.SIGSTOP)  # as a picture that takes long
        waiting = asyncio.create_task(s.client.request("POST", path, [json.dumps(body).encode()], leave=leave))
        while not pool.active:
            await asyncio.sleep(0.001)
        leave.set()
        assert (await waiting).status == 499 and not os.path.exists(f"/proc/{worker}")
        assert pool.active == 0 and s.service.pictures.budget.held == 0
        leave.clear()
        assert calls[-1].error is None
    assert len(s.engine.seen) == 1
    assert (await s.client.post(CHAT, chat(part()))).status == 200


@served(**SEES)
async def test_the_deadline_of_a_request_counts_decoding(s: Served) -> None:
    assert (await s.client.post(CHAT, chat(part(), deadline_seconds=600))).status == 200
    assert 0 < (s.engine.orders[-1].deadline_seconds or 0) < 600
    (decoder,) = s.service.pictures.pool._idle
    assert decoder._worker is not None
    os.kill(decoder._worker.pid, signal.SIGSTOP)  # as a picture that takes long
    reply = await s.client.post(CHAT, chat(part(TALL, "jpeg"), deadline_seconds=0.1))
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded"), reply.text
    assert s.service.pictures.budget.held == 0 and len(s.engine.seen) == 1
    assert (await s.client.post(CHAT, chat(part(TALL, "jpeg")))).status == 200


@served(**SEES)
async def test_decoding_does_not_stall_other_streams(s: Served) -> None:
    """12 MB of pixels and 16 MB of base64 beside a loop that looks every millisecond how much CPU time has been spent,
    by any thread: a thread that keeps the interpreter stalls the loop, too."""
    noise = file(Image.frombytes("RGB", (2000, 2000), os.urandom(12_000_000)))
    await s.client.post(CHAT, chat(part()))
    body = json.dumps(chat(part(noise))).encode()
    asked = asyncio.create_task(s.client.request("POST", CHAT, [body]))
    longest, last, while_decoding = 0.0, time.process_time(), 0
    while not asked.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.process_time() - last), time.process_time()
        while_decoding += s.service.pictures.pool.active
    assert (await asked).status == 200 and longest < 0.2 and while_decoding > 2, (longest, while_decoding)


@pytest.mark.parametrize("host", ["https://a.example", "a b", "", "a.example/x", "*a", "a.*"])
def test_hosts_of_the_configuration_are_hosts(host: str) -> None:
    with pytest.raises(ConfigError, match="is not a host: write images"):
        ServerConfig(media_allow_host=(host,))
    ServerConfig(media_allow_host=("*", "*.a.example", "a.example:8080", "10.0.0.1"))


@served(**SEES)
async def test_a_response_in_the_background_sees(s: Served) -> None:
    said = [{"role": "user", "content": [{"type": "input_image", "image_url": url(WIDE)}]}]
    made = await s.client.post(RESPONSES, {"input": said, "background": True})
    assert made.status == 200, made.text
    while (state := (await s.client.get(f"{RESPONSES}/{made.json['id']}")).json)["status"] != "completed":
        await asyncio.sleep(0.001)
    assert state["usage"]["input_tokens_details"]["image_tokens"] == 8
    assert [p.tokens for p in s.engine.pictures[-1]] == [8] and s.service.pictures.budget.held == 0
