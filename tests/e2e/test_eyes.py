"""kimi-nano served with its eyes: official SDKs and the page each ask about the picture of another sum."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from perilune.tasks.families import problems
from runs.docs.browser import Browser
from tests.e2e import test_page
from tests.e2e.server import Server, needs_nano
from tests.e2e.test_page import browser  # noqa: F401  (a fixture)
from tests.e2e.test_page_pictures import Pictured

pytestmark = needs_nano


@pytest.fixture(scope="module")
def seeing() -> Iterator[Server]:
    running = Server("--set", "threads=1")
    yield running
    running.kill()
    assert not any("Traceback" in line for line in running.lines), "".join(running.lines)


def asked(number: int) -> tuple[str, str, str]:
    """(question, PNG in base64, the answer's end) of a sum that is not in training. The answer is thought out."""
    problem = problems("picture_sums", "heldout", 4, thinking=True)[number]
    parts = {part["type"]: part for part in problem.messages[0]["content"]}
    _, _, picture = parts["image_url"]["image_url"]["url"].partition(",")
    return parts["text"]["text"], picture, problem.reply.content[problem.reply.content.index("=") :]


def test_chat(seeing: Server) -> None:
    text, picture, result = asked(0)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
    answer: Any = seeing.openai.chat.completions.create(model="kimi-nano", messages=messages)
    said = answer.choices[0].message
    assert said.content.endswith(result) and said.reasoning_content, said
    # 382 x 286 pixels: shrunk to 14 x 18 patches, four to a token.
    assert answer.usage.prompt_tokens_details.image_tokens == 63 < answer.usage.prompt_tokens


def test_responses(seeing: Server) -> None:
    text, picture, result = asked(1)
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    messages: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": text}]}]
    answer: Any = seeing.openai.responses.create(model="kimi-nano", input=messages)
    assert answer.output_text.endswith(result) and answer.output[0].type == "reasoning", answer
    assert answer.usage.input_tokens_details.image_tokens == 48 < answer.usage.input_tokens


def test_messages(seeing: Server) -> None:
    text, picture, result = asked(2)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
    claude = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0, timeout=60)
    answer: Any = claude.messages.create(
        model="kimi-nano", max_tokens=2048, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text.endswith(result), answer
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 48


@pytest.mark.skipif(test_page.CHROMIUM is None, reason="there is no chromium in PATH (Debian: apt install chromium)")
def test_the_page(browser: Browser, seeing: Server, tmp_path: Path) -> None:  # noqa: F811
    text, picture, result = asked(3)
    (file := tmp_path / "sum.png").write_bytes(base64.b64decode(picture))
    page = Pictured(browser, seeing)
    page.choose(file)
    page.thumbnails(1)
    assert page.ask(text).endswith(result)
