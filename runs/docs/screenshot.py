"""docs/images/page*.webp: the page at / in real conversations with kimi-nano, taken by headless Chromium.

python -m runs.docs.screenshot [CHROMIUM]   start a server, ask it, take the pictures (CHROMIUM: default `chromium`)

Each picture carries a digest of the page's markup and style, so that `make check` knows when they have changed since.
"""

import base64
import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator

from PIL import Image

from perilune.tasks import families
from runs.docs.browser import Browser, browsing
from runs.docs.tables import ROOT

PICTURE = ROOT / "docs/images/page.webp"
TOOLS_PICTURE = ROOT / "docs/images/page-tools.webp"  # a call that waits for its result, dark
ATTACHED_PICTURE = ROOT / "docs/images/page-pictures.webp"  # a question about a picture, answered
PAGE = ROOT / "perilune/server/page"
MOST_BYTES = 40_000
COLOURS = 28  # size of the pictures' palette
QUESTIONS = (
    "What is 347 + 589?",
    "Emma has 24 apples. She buys 13 more and then gives 9 of them away. How many apples are left?",
)
SIZE, SCALE = (820, 660), 1.5
TOOLS_SIZE = (480, 600)
ATTACHED_SIZE = (720, 690)
ATTACH = "attachFiles([new File([Uint8Array.from(atob('{}'), c => c.charCodeAt(0))], 'a.png', {{type: 'image/png'}})])"
KEY = b"page"


def problems() -> Iterator[str]:
    for picture in (PICTURE, TOOLS_PICTURE, ATTACHED_PICTURE):
        data = picture.read_bytes() if picture.is_file() else b""
        if len(data) > MOST_BYTES:
            yield f"{picture.relative_to(ROOT)} has {len(data)} bytes: at most {MOST_BYTES}"
        if KEY + b"\0" + digest() not in data:
            yield f"{picture.relative_to(ROOT)} shows another page: run python -m runs.docs.screenshot (needs Chromium)"


def digest() -> bytes:
    """A digest of the page's markup and style, as hexadecimal digits."""
    looks = b"".join((PAGE / name).read_bytes() for name in ("page.html", "style.css"))
    return hashlib.sha256(looks).hexdigest().encode()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Starts a server of kimi-nano; gives its address."""
    command = [sys.executable, "-m", "perilune.cli.main", "serve", "kimi-nano", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(found[1] for line in process.stderr if (found := re.match(r"curl (http://[^/]+)/v1", line)))
        finally:
            process.terminate()


def taken(browser: Browser) -> bytes:
    """What the page shows now, as WebP of few colours instead of about 1,000: a third of the file's size."""
    shown = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    return few_colours(Image.open(io.BytesIO(shown)))


def few_colours(picture: Image.Image) -> bytes:
    """The picture as lossless WebP of COLOURS colours, not dithered, with the digest where XMP would be."""
    file = io.BytesIO()
    few = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")
    few.save(file, "WEBP", lossless=True, quality=100, method=6, xmp=KEY + b"\0" + digest())
    return file.getvalue()


def opened(browser: Browser, url: str, size: tuple[int, int], scale: float = 1.0) -> None:
    browser.open(f"{url}/", size, scale)
    browser.wait('document.getElementById("model")?.textContent === "kimi-nano"')


def asked(browser: Browser, question: str) -> None:
    """Returns when the answer is complete."""
    browser.value(f'document.getElementById("text").value = {json.dumps(question)}')
    browser.value('document.getElementById("ask").requestSubmit()')
    browser.wait('document.getElementById("send").textContent === "send"')


def main() -> None:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    with serving() as url, browsing(chromium) as browser:
        opened(browser, url, SIZE, SCALE)
        for question in QUESTIONS:
            asked(browser, question)
        browser.value('document.querySelector("details").open = true')
        browser.value('document.querySelector("main").scrollTop = 0')
        PICTURE.write_bytes(taken(browser))
        opened(browser, url, ATTACHED_SIZE)
        chart = families.problems("picture_charts", "heldout", 10, thinking=True)[9].messages[0]["content"][0]
        browser.value(ATTACH.format(chart["image_url"]["url"].partition(",")[2]))
        asked(browser, "How many bars are there?")
        browser.value('document.querySelector("details").open = true')
        ATTACHED_PICTURE.write_bytes(taken(browser))
        opened(browser, url, TOOLS_SIZE)
        browser.value('document.querySelectorAll(".tries button")[1].click()')
        browser.wait('!!document.querySelector(".results")')
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.call("Emulation.setEmulatedMedia", features=dark)
        TOOLS_PICTURE.write_bytes(taken(browser))


if __name__ == "__main__":
    main()
