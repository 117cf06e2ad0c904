"""Pictures on the page at /, in headless Chromium: attached, pasted, dropped, removed, asked about, kept."""
# ruff: noqa: F811

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runs.docs.browser import Browser
from runs.docs.screenshot import PICTURE
from tests.cpu.media.pictures import file
from tests.cpu.media.videos import scenes, video
from tests.e2e.server import Server
from tests.e2e.test_page import Page, browser, pytestmark  # noqa: F401  (a fixture, and what the tests need)
from tests.e2e.test_pictures import counted

SHOT = file(Image.open(PICTURE).crop((0, 0, 640, 480)))  # of a screenshot; 414 tokens, 15 kB


@pytest.fixture(scope="module")
def seeing() -> Iterator[Server]:
    options = ("--sees", "--answer-tokens", "5")
    command = [sys.executable, "-m", "tests.scripted_engine", *options, "serve", "kimi-nano", "--port", "0"]
    running = Server(command=command)
    yield running
    running.kill()


class Pictured(Page):
    """A page with files that a script hands to it."""

    def choose(self, *paths: Path) -> None:
        """As the dialog of the attach button."""
        root = self.browser.call("DOM.getDocument")["root"]["nodeId"]
        field = self.browser.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.browser.call("DOM.setFileInputFiles", files=[str(path) for path in paths], nodeId=field)

    def carried(self, event: str, target: str, field: str, data: bytes, kind: str = "image/png") -> Any:
        """An event with a file: paste or drop. Whether the page took it."""
        text = base64.b64encode(data).decode()
        made = f"new File([Uint8Array.from(atob('{text}'), c => c.charCodeAt(0))], 'a.png', {{type: '{kind}'}})"
        fields = f"{{{field}: transfer, bubbles: true, cancelable: true}}"
        name = "ClipboardEvent" if event == "paste" else "DragEvent"
        return self.value(
            f"(() => {{ const transfer = new DataTransfer(); transfer.items.add({made});"
            f" return !{target}.dispatchEvent(new {name}('{event}', {fields})); }})()"
        )

    def thumbnails(self, count: int) -> list[str]:
        """What they are called, when there are so many and all are drawn."""
        self.wait(f"document.querySelectorAll('#pictures img').length === {count}")
        self.wait("[...document.querySelectorAll('#pictures img')].every(i => i.complete && i.naturalWidth)")
        return list(self.value("[...document.querySelectorAll('#pictures img')].map(i => i.alt)"))

    @property
    def fault(self) -> str:
        return str(self.value("$('pictures-fault').textContent"))


def test_pictures_are_asked_about_and_kept(browser: Browser, seeing: Server, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    shot.write_bytes(SHOT)
    before = counted(seeing)

    def asked(count: int) -> int:
        return counted(seeing, before + count) - before

    page = Pictured(browser, seeing)
    assert "sees pictures" in page.value("document.querySelector('.empty').innerText")
    assert page.value("attach.disabled") is False
    page.choose(shot)
    assert page.thumbnails(1) == ["picture 1: shot.png"]
    assert page.carried("paste", "text", "clipboardData", SHOT)
    page.thumbnails(2)
    assert page.carried("drop", "document", "dataTransfer", SHOT)
    page.thumbnails(3)
    assert page.value("document.querySelector('#pictures button').getAttribute('aria-label')") == (
        "remove picture 1: shot.png"
    )
    page.value("document.querySelectorAll('#pictures button')[2].click()")
    assert page.thumbnails(2) == ["picture 1: shot.png", "picture 2: a.png"]
    assert page.value("document.activeElement.id") == "text"
    assert page.value("$('status').textContent") == "a.png is removed"
    page.ask("What is this?")
    assert page.thumbnails(0) == []
    assert asked(2) == 2
    assert page.value("[...document.querySelectorAll('.user .seen img')].every(i => i.naturalWidth === 640)")
    assert page.value("document.querySelectorAll('.user .seen img').length") == 2
    page.ask("And now?")
    assert asked(4) == 4, "the pictures stay in the conversation"
    page.reload()
    page.value("document.querySelector('#history button').click()")
    page.wait("document.querySelectorAll('.user .seen img').length === 2")
    page.ask("Still?")
    assert asked(6) == 6
    # A question that is a picture alone, and its edit.
    page.press("new chat")
    page.choose(shot)
    page.thumbnails(1)
    page.value("ask.requestSubmit()")
    page.answer()
    assert page.said("user") == [""] and asked(7) == 7
    page.value("document.querySelector('.user button:nth-child(2)').click()")
    page.fill(".user textarea", "Now with words")
    page.press("ask")
    page.answer()
    assert page.said("user") == ["Now with words"] and asked(8) == 8


def test_pictures_that_are_still_being_read_go_with_the_question(browser: Browser, seeing: Server) -> None:
    """Pasted, and Enter right after it: reading a file takes longer than that."""
    page = Pictured(browser, seeing)
    before = counted(seeing)
    text = base64.b64encode(SHOT).decode()
    page.fill("#text", "What is this?")
    page.value(
        f"const shot = () => new File([Uint8Array.from(atob('{text}'), c => c.charCodeAt(0))], 'a.png', "
        "{type: 'image/png'}); attachFiles([shot()]); attachFiles([shot()]);"
        " ask.requestSubmit(); ask.requestSubmit(); 0"
    )
    page.wait("document.querySelectorAll('.user .seen img').length === 2")
    page.answer()
    assert counted(seeing, before + 2) - before == 2
    assert page.said("user") == ["What is this?"] and page.thumbnails(0) == []


def test_a_video(browser: Browser, seeing: Server, tmp_path: Path) -> None:
    clip, shot = tmp_path / "clip.webm", tmp_path / "shot.png"
    clip.write_bytes(video(scenes(12), form="webm", codec="libvpx"))  # 3 s: 6 frames, 2 chunks
    shot.write_bytes(SHOT)
    page = Pictured(browser, seeing)
    assert "sees pictures and videos" in page.value("document.querySelector('.empty').innerText")
    page.choose(clip, shot)
    page.wait("document.querySelector('#pictures video')?.videoWidth === 56")
    assert page.value("document.querySelector('#pictures button').getAttribute('aria-label')") == (
        "remove video 1: clip.webm"
    )
    before = counted(seeing)
    page.ask("What happens?")
    assert counted(seeing, before + 3) == before + 3
    page.wait("document.querySelector('.user .seen video')?.videoWidth === 56")
    kept = page.value("JSON.parse(localStorage['perilune.chats'])[0].messages[0]")
    assert [one["url"][:11] for one in kept["pictures"]] == ["", "data:image/"]
    page.reload()
    page.value("document.querySelector('#history button').click()")
    page.wait("document.querySelectorAll('.user .seen img').length === 1")
    assert page.value("document.querySelectorAll('main video').length") == 0
    page.press("new chat")
    page.value("attachFiles([new File([new Uint8Array(VIDEO_BYTES + 1)], 'long.mp4', {type: 'video/mp4'})])")
    page.wait("$('pictures-fault').textContent === 'long.mp4 has more than 20 MB'")
    page.value("model.capabilities.input = ['text', 'image']")
    page.value("attachFiles([new File(['x'], 'a.mp4', {type: 'video/mp4'})])")
    page.wait("$('pictures-fault').textContent === 'kimi-nano does not see videos'")
    page.value("model = {}")  # as before the API key is given: the server says it
    page.value("attachFiles([new File(['x'], 'a.mp4', {type: 'video/mp4'})])")
    assert page.fault == "" and page.value("attached.map(one => one.name)") == ["a.mp4"]


def test_files_that_are_no_pictures(browser: Browser, seeing: Server, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(SHOT[:300])
    good.write_bytes(SHOT)
    page = Pictured(browser, seeing)
    page.choose(bad, good)
    assert page.thumbnails(1) == ["picture 1: good.png"]
    assert page.fault == "bad.png: this browser cannot read it as a picture"
    Image.new("RGB", (9, 9)).save(bad, "ICO")
    page.choose(bad)
    assert page.thumbnails(2) and "image/jpeg" in page.value("attached[1].url"), "its name says .png"
    page.choose(*[good] * 20)
    page.thumbnails(16)
    page.wait("$('pictures-fault').textContent.includes('at most 16 pictures')")


def test_pictures_of_a_chat_fit_one_request(browser: Browser, seeing: Server) -> None:
    """The server refuses a body of more than 32 MB, and pictures of a question cannot be removed any more."""
    page = Pictured(browser, seeing)
    text = base64.b64encode(SHOT).decode()
    page.value(
        f"const shot = Uint8Array.from(atob('{text}'), c => c.charCodeAt(0));"
        " const large = name => new File([shot, new Uint8Array(3900000)], name, {type: 'image/png'});"
        " attachFiles(['a.png', 'b.png', 'c.png', 'd.png'].map(large)); 0"
    )
    page.thumbnails(4)
    page.ask("What is this?")
    page.value("attachFiles(['e.png', 'f.png'].map(large)); 0")
    assert page.thumbnails(1) == ["picture 1: e.png"]
    page.wait("$('pictures-fault').textContent.startsWith('f.png: with it the pictures')")
    page.ask("And this?")
    page.press("new chat")
    page.value("attachFiles([large('f.png')]); 0")
    assert page.thumbnails(1) == ["picture 1: f.png"] and page.fault == ""


def test_what_the_browser_keeps_is_bounded(browser: Browser, seeing: Server) -> None:
    """A large picture is sent whole and kept as a small copy; what no picture is, is not shown."""
    page = Pictured(browser, seeing)
    draw = (
        "(async () => { const c = document.createElement('canvas'); c.width = c.height = 900;"
        " const p = c.getContext('2d'), d = p.createImageData(900, 900);"
        " for (let i = 0; i < d.data.length; i += 65536) crypto.getRandomValues(d.data.subarray(i, i + 65536));"
        " p.putImageData(d, 0, 0); const b = await new Promise(r => c.toBlob(r));"
        " await attachFiles([new File([b], 'noise.png', {type: 'image/png'})]); return attached[0].url.length; })()"
    )
    assert page.value(draw) > 1_000_000
    page.ask("What is this?")
    assert page.value("document.querySelector('.user .seen img').naturalWidth") == 900
    kept = page.value("JSON.parse(localStorage['perilune.chats'])[0].messages[0].pictures[0]")
    assert len(kept["url"]) < 600_000 and kept["url"].startswith("data:image/jpeg") and kept["name"] == "noise.png"
    page.reload()
    page.value("document.querySelector('#history button').click()")
    page.wait("document.querySelector('.user .seen img')?.naturalWidth === 512")
    for url in ("https://example.org/x.png", "javascript:hit=1", "data:image/svg+xml;base64,AAAA", 5):
        messages = [{"role": "user", "content": "q", "pictures": [{"url": url, "name": "x"}, None, {"url": "x"}]}]
        page.value(
            f"localStorage['perilune.chats'] = JSON.stringify({json.dumps([{'id': 'a', 'messages': messages}])})"
        )
        page.reload()
        page.value("document.querySelector('#history button').click()")
        assert page.said("user") == ["q"] and page.value("document.querySelectorAll('main img').length") == 0
    kept = page.value(
        "const large = 'A'.repeat(3000000), hold = (id, content) => keep({id, messages: [{role: 'user', content,"
        " pictures: [{kept: large, name: 'x'}]}]}); hold('b', 'p'); hold('c', large); localStorage['perilune.chats']"
    )
    asked = [chat["messages"] for chat in json.loads(kept)]
    assert asked == [[{"role": "user", "content": text}] for text in "pq"], "no other chat goes for one too large alone"


def test_a_model_that_does_not_see(browser: Browser, server: Server) -> None:
    page = Pictured(browser, server)
    page.wait("attach.disabled")
    assert "kimi-nano does not see pictures" in page.value("keys.textContent")
    page.carried("paste", "text", "clipboardData", SHOT)
    page.wait("$('pictures-fault').textContent === 'kimi-nano does not see pictures'")
    assert page.thumbnails(0) == []
