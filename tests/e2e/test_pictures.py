"""Pictures through the official SDKs, unchanged: Kimi K2.6's vocabulary, and an engine that plays token ids."""

import base64
import functools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from click.testing import CliRunner

from perilune.cli import chat, generate
from perilune.core.errors import RequestError
from perilune.engine.client import EngineClient
from perilune.media.kinds import reads_video
from tests import scripted_engine
from tests.cpu.media.pictures import file, scene
from tests.cpu.media.videos import scenes, video
from tests.e2e.server import Server

SEEN = ["text", "image", "video"] if reads_video() else ["text", "image"]
PAD = 163605
SHOT, PHOTO = file(scene(1920, 1080)), file(scene(640, 480), "JPEG")
TOKENS = 2691 + 414
AROUND = 5  # begin, "image", content, end, newline


@pytest.fixture(scope="module")
def seeing(kimi_k26: Path) -> Iterator[Server]:
    options = ("--sees", "--answer-tokens", "5")
    command = [sys.executable, "-m", "tests.scripted_engine", *options, "serve", str(kimi_k26), "--port", "0"]
    running = Server("--served-model-name", "kimi", command=command)
    yield running
    running.kill()
    assert not any("Traceback" in line for line in running.lines), "".join(running.lines)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def counted(server: Server, least: int = 0) -> int:
    """Pictures that reached the engine; waits a while for the line that says `least`."""
    end = time.monotonic() + 30
    while True:
        found = max((int(line.split()[1]) for line in server.lines if line.startswith("pictures: ")), default=0)
        if found >= least or time.monotonic() > end:
            return found
        time.sleep(0.01)


def test_chat(seeing: Server) -> None:
    content: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(SHOT)}", "detail": "high"}},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded(PHOTO)}"}},
    ]
    text: Any = [{"role": "user", "content": "What is this?"}]
    create = seeing.openai.chat.completions.create
    plain = create(model="kimi", messages=text).usage
    before = counted(seeing)
    answer = create(model="kimi", messages=[{"role": "user", "content": content}])
    assert plain is not None and answer.usage is not None
    assert answer.usage.prompt_tokens == plain.prompt_tokens + TOKENS + 2 * AROUND
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.image_tokens == TOKENS
    with seeing.openai.chat.completions.stream(
        model="kimi", messages=[{"role": "user", "content": content}], stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.usage is not None and streamed.usage.prompt_tokens == answer.usage.prompt_tokens
    assert streamed.usage.prompt_tokens_details is not None
    assert streamed.usage.prompt_tokens_details.cached_tokens, "the same picture shares KV"
    assert counted(seeing, before + 4) == before + 4
    bad: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with pytest.raises(openai.BadRequestError, match="it is empty") as e:
        create(model="kimi", messages=bad)
    assert (e.value.param, e.value.code) == ("messages[0].content[0]", "invalid_image")
    (listed,) = seeing.openai.models.list().data
    assert (listed.model_extra or {})["capabilities"]["input"] == SEEN


def test_a_video(seeing: Server) -> None:
    """Three seconds of 640 x 480 pixels: six frames, in two chunks. Sent through the SDKs of OpenAI and Anthropic,
    which have no types for videos."""
    data = encoded(video(scenes(12, (640, 480))))
    url = f"data:video/mp4;base64,{data}"
    content: Any = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    before = counted(seeing)
    answer = seeing.openai.chat.completions.create(model="kimi", messages=[{"role": "user", "content": content}])
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.model_extra or {})["video_tokens"] == 2 * 414
    assert counted(seeing, before + 2) == before + 2
    content = [{"type": "input_video", "video_url": url}, {"type": "input_text", "text": "What is this?"}]
    with seeing.openai.responses.stream(model="kimi", input=[{"role": "user", "content": content}]) as stream:
        response = stream.get_final_response()
    assert response.usage is not None and response.usage.input_tokens == answer.usage.prompt_tokens
    assert (response.usage.input_tokens_details.model_extra or {})["video_tokens"] == 2 * 414
    claude = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0, timeout=60)
    source = {"type": "base64", "media_type": "video/mp4", "data": data}
    content = [{"type": "video", "source": source}, {"type": "text", "text": "What is this?"}]
    messages: Any = [{"role": "user", "content": content}]
    usage = claude.messages.create(model="kimi", max_tokens=9, messages=messages).usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(model="kimi", messages=messages).input_tokens == total > 2 * 414
    assert counted(seeing, before + 6) == before + 6
    cut: Any = [{"role": "user", "content": [{"type": "video", "source": {**source, "data": data[:2000]}}]}]
    with pytest.raises(anthropic.BadRequestError, match="the video cannot be used: it is damaged or truncated"):
        claude.messages.create(model="kimi", max_tokens=9, messages=cut)


def test_responses(seeing: Server) -> None:
    question: Any = {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(SHOT)}", "detail": "auto"},
        ],
    }
    create, plain = seeing.openai.responses.create, {"role": "user", "content": "What is this?"}
    first = create(model="kimi", input=[question])
    bare = create(model="kimi", input=[plain])  # type: ignore[list-item]  # a message as a plain dict
    assert first.usage is not None and bare.usage is not None
    assert first.usage.input_tokens == bare.usage.input_tokens + 2691 + AROUND
    call: Any = {"type": "function_call", "call_id": "functions.look:0", "name": "look", "arguments": "{}"}
    shot = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{encoded(PHOTO)}", "detail": "low"}
    result: Any = {"type": "function_call_output", "call_id": "functions.look:0", "output": [shot]}
    before = counted(seeing)
    second = create(model="kimi", input=[call, result], previous_response_id=first.id)
    assert second.usage is not None and second.usage.input_tokens > TOKENS and counted(seeing, before + 2) == before + 2
    assert (second.usage.input_tokens_details.model_extra or {})["image_tokens"] == TOKENS


def test_messages(seeing: Server) -> None:
    claude = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0, timeout=60)

    def block(data: bytes, kind: str) -> Any:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": encoded(data)}}

    use: Any = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(PHOTO, "image/jpeg")]}
    messages: Any = [
        {"role": "user", "content": [block(SHOT, "image/png"), {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    before = counted(seeing)
    answer = claude.messages.create(model="kimi", max_tokens=9, messages=messages)
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert total > TOKENS and counted(seeing, before + 2) == before + 2
    assert claude.messages.count_tokens(model="kimi", messages=messages).input_tokens == total
    # The file's bytes say what it is, whatever `media_type` says.
    said, lying = ([{"role": "user", "content": [block(PHOTO, f"image/{kind}")]}] for kind in ("jpeg", "png"))
    count = claude.messages.count_tokens
    assert count(model="kimi", messages=lying) == count(model="kimi", messages=said)  # type: ignore[arg-type]  # dicts
    with pytest.raises(anthropic.BadRequestError, match="none of PNG"):
        lying = [{"role": "user", "content": [block(b"no picture", "image/png")]}]
        claude.messages.create(model="kimi", max_tokens=9, messages=lying)  # type: ignore[arg-type]  # plain dicts


def test_command_line(kimi_k26: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "shot.png"
    image.write_bytes(PHOTO)  # the name says nothing
    start = EngineClient.start

    def scripted(*options: str) -> None:
        run = scripted_engine.command("--vocab", "163840", "--answer-tokens", "5", *options)
        monkeypatch.setattr(EngineClient, "start", functools.partial(start, command=run))

    scripted("--media-pad", str(PAD))
    arguments = [str(kimi_k26), "--image", str(image)]
    shown = CliRunner().invoke(generate.command, [*arguments, "-p", "What is this?"], catch_exceptions=False)
    assert f"{414 + AROUND + 12} prompt tokens" in shown.output, shown.output
    talk = f"What is this?\n/image {image}\nAnd this?\n"
    shown = CliRunner().invoke(chat.command, arguments, input=talk, catch_exceptions=False)
    first, second = (int(n) for n in re.findall(r"\[(\d+) prompt tokens", shown.output))
    assert first == 414 + AROUND + 12 and second > first + 414 and shown.exit_code == 0
    scripted()
    with pytest.raises(RequestError, match="does not see pictures"):
        CliRunner().invoke(generate.command, [*arguments, "-p", "x"], catch_exceptions=False)
    shown = CliRunner().invoke(chat.command, arguments, input="What is this?\n", catch_exceptions=False)
    assert "error: messages[0].content[0]: the model 'kimi-k2.6' does not see pictures" in shown.output
    assert shown.exit_code == 1
