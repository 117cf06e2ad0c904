"""Videos in requests of all three APIs."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.media.videos import colours, video
from tests.cpu.media.videos import part as video_part
from tests.cpu.server.test_pictures import (
    MESSAGES,
    PICTURE,
    RESPONSES,
    SEES,
    WIDE,
    chat,
    check_refused,
    part,
    text,
    url,
)
from tests.serving import CHAT, Served, served


@served(**SEES)
async def test_videos(s: Served) -> None:
    """Placeholders, times, usage and /tokenize; beside pictures; kept like pictures; each fault one line."""
    data = video(colours(12))
    sent, half = (video_part(url(d).replace("image/png", "video/mp4")) for d in (data, data[:900]))
    chunks = [f"{time}<|media_begin|>video<|media_content|>" + 2 * "<|media_pad|>" + "<|media_end|>"
              for time in ("00:00:00.000", "00:00:02.250")]  # fmt: skip
    body = chat(text("A"), sent, text("B"), part())
    reply = await s.client.post(CHAT, body)
    assert reply.status == 200, reply.text
    assert s.prompt().startswith(f"<|im_user|>user<|im_middle|>A{''.join(chunks)}\nB{PICTURE}<|im_end|>")
    details = reply.json["usage"]["prompt_tokens_details"]
    assert (details["video_tokens"], details["image_tokens"]) == (4, 8)
    assert [p.grid for p in s.engine.pictures[-1]] == [(4, 2, 4), (2, 2, 4), (1, 4, 8)]
    counted = await s.client.post("/tokenize", body)
    assert counted.json["count"] == reply.json["usage"]["prompt_tokens"]
    budget = s.service.pictures.budget
    assert budget.held == 0 and budget.cached == (8 * 6 + 32) * 588
    assert (await s.client.post(CHAT, {**body, "n": 2})).status == 200
    assert s.engine.pictures[-1][1] is s.engine.pictures[0][1], "decoded once"
    assert budget.held == 0
    for bad, words, code in (
        (half, "truncated", "invalid_video"),
        (video_part(url(WIDE)), "send it as an image part", "invalid_video"),
        (video_part("https://example.org/a.mp4"), "the video must be sent as a data: URL", "invalid_video_url"),
        ({"type": "video_url"}, "video_url must be {'url': 'data:...'}", "invalid_value"),
        ({"type": "video", "video": "x"}, "a video is sent here as {'type': 'video_url'", "unsupported_media"),
        (part(data, "png"), "none of PNG", "invalid_image"),
    ):  # fmt: skip
        error = (await s.client.post(CHAT, chat(text("A"), bad))).json["error"]
        assert words in error["message"] and error["code"] == code and "\n" not in error["message"], error
        assert error["message"].startswith("messages[0].content[1]")
    assert budget.held == 0


@served(**SEES)
async def test_videos_in_responses_and_messages(s: Served) -> None:
    """The same video as in chat: prompt, usage, counts, results of tools, later turns; each fault one line."""
    data = base64.b64encode(video(colours(12))).decode()
    link = f"data:video/mp4;base64,{data}"
    asked: dict[str, Any] = {"type": "input_video", "video_url": link}
    shown: dict[str, Any] = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": data}}
    linked: dict[str, Any] = {"type": "video", "source": {"type": "url", "url": link}}
    item = {"type": "function_call", "call_id": "functions.f:0", "name": "f", "arguments": "{}"}
    use = {"type": "tool_use", "id": "functions.f:0", "name": "f", "input": {}}

    async def prompt(path: str, body: dict[str, Any]) -> str:
        reply = await s.client.post(path, body)
        assert reply.status == 200, reply.text
        assert [p.grid for p in s.engine.pictures[-1]] == [(4, 2, 4), (2, 2, 4)]
        return s.prompt()

    quiet, off = {"reasoning": {"effort": "none"}}, {"thinking": {"type": "disabled"}}
    chatted = {await prompt(CHAT, chat(part, text("A"), **off)) for part in (
        video_part(link), {"type": "input_video", "video_url": link})}  # fmt: skip
    content = [asked, {"type": "input_text", "text": "A"}]
    body = {"input": [{"role": "user", "content": content}], **quiet}
    first = await s.client.post(RESPONSES, body)
    assert first.json["usage"]["input_tokens_details"]["video_tokens"] == 4 and {s.prompt()} == chatted
    again = await s.client.post(RESPONSES, {"input": "B", "previous_response_id": first.json["id"]})
    assert again.json["usage"]["input_tokens_details"]["video_tokens"] == 4
    kept = await s.client.get(f"{RESPONSES}/{first.json['id']}/input_items")
    assert kept.json["data"][0]["content"] == content
    streamed = await s.client.post(RESPONSES, {**body, "stream": True})
    assert streamed.status == 200 and {s.prompt()} == chatted
    for block_ in (shown, linked):
        messages = [{"role": "user", "content": [block_, text("A")]}]
        assert {await prompt(MESSAGES, {"max_tokens": 9, "messages": messages})} == chatted
        counted = await s.client.post(f"{MESSAGES}/count_tokens", {"messages": messages})
        assert counted.json == {"input_tokens": len(s.engine.seen[-1][0])}
    output = {"type": "function_call_output", "call_id": "functions.f:0", "output": [asked]}
    results = {
        await prompt(RESPONSES, {"input": [{"role": "user", "content": "U"}, item, output], **quiet}),
        await prompt(MESSAGES, {"max_tokens": 9, "messages": [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "functions.f:0", "content": [shown]}]},
        ]}),
    }  # fmt: skip
    assert len(results) == 1 and "00:00:02.250<|media_begin|>video" in results.pop()
    half = data[:1200]
    for given, where, words, code in (
        ({"video_url": f"data:video/mp4;base64,{half}"}, "", "truncated", "invalid_video"),
        ({"video_url": url(WIDE)}, "", "send it as an image part", "invalid_video"),
        ({"video_url": "https://example.org/a.mp4"}, "", "must be sent as a data: URL", "invalid_video_url"),
        ({"video_url": data}, "", "'data:video/mp4;base64,' and its file", "invalid_video_url"),
        ({"file_id": "file-1"}, ".file_id", "is not served: send video_url", "unsupported_parameter"),
        ({"video_url": {"url": link}}, ".video_url", "must be a string", "invalid_value"),
        ({}, ".video_url", "must be a string", "invalid_value"),
    ):
        sent = {"input": [{"role": "user", "content": [asked, {"type": "input_video", **given}]}]}
        check_refused(await s.client.post(RESPONSES, sent), f"input[0].content[1]{where}", words, code)
    for source, where, words in (
        ({"type": "base64", "media_type": "video/mp4", "data": half}, "", "truncated"),
        ({"type": "base64", "media_type": "image/png", "data": data}, "", "send it as an image part"),
        ({"type": "url", "url": "https://example.org/a.mp4"}, "", "must be sent as a data: URL"),
        ({"type": "file", "file_id": "f"}, ".source", "must be of type base64"),
    ):
        sent = {"messages": [{"role": "user", "content": [{"type": "video", "source": source}]}], "max_tokens": 9}
        check_refused(await s.client.post(MESSAGES, sent), f"messages[0].content[0]{where}", words)
    odd = {"messages": [{"role": "user", "content": [{"type": ["video"]}]}], "max_tokens": 9}
    check_refused(await s.client.post(MESSAGES, odd), "messages[0].content[0]", "may be text, image, video and")
    assert s.service.pictures.budget.held == 0


@served(**SEES)
async def test_a_video_without_pyav_is_one_line_with_the_remedy(
    s: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sent = video_part("data:video/mp4;base64,AAAAIGZ0eXBpc29t")
    error = (await s.client.post(CHAT, chat(sent))).json["error"]
    assert "pip install 'perilune[video]'" in error["message"] and error["code"] == "unsupported_media"
    assert (await s.client.post(CHAT, chat(part()))).status == 200
