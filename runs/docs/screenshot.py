"""docs/images/page.png: the page at / in a real conversation with kimi-nano, taken by headless Chromium.

python -m runs.docs.screenshot [CHROMIUM]   start a server, ask, take the picture (CHROMIUM: default `chromium`)

The picture carries a digest of the page's markup and style, so that `make check` knows when they have changed since.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

from runs.docs.tables import ROOT

PICTURE = ROOT / "docs/images/page.png"
PAGE = ROOT / "perilune/server/page.html"
MOST_BYTES = 200_000
QUESTIONS = (
    "What is 347 + 589?",
    "Emma has 24 apples. She buys 13 more and then gives 9 of them away. How many apples are left?",
)
SIZE = (820, 660)
KEY = b"page"


def problems() -> Iterator[str]:
    data = PICTURE.read_bytes() if PICTURE.is_file() else b""
    if len(data) > MOST_BYTES:
        yield f"{PICTURE.relative_to(ROOT)} has {len(data)} bytes: at most {MOST_BYTES}"
    if KEY + b"\0" + digest() not in data:
        yield f"{PICTURE.relative_to(ROOT)} shows another page: run python -m runs.docs.screenshot (needs Chromium)"


def digest() -> bytes:
    """Of what the page looks like: all of it before its script."""
    return hashlib.sha256(PAGE.read_text().partition("<script>")[0].encode()).hexdigest().encode()


class Browser:
    """Chromium, spoken to in the DevTools protocol through a pair of pipes."""

    def __init__(self, chromium: str, profile: str) -> None:
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        # The protocol's pipes are file descriptors 3 and 4 of the browser.
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                f'exec "$@" 3<&{commands} 4>&{replies}',
                "sh",
                chromium,
                *options,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, replies),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(replies)
        self._rest, self._number, self._session = b"", 0, ""

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        width, height = SIZE
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1.5, mobile=False)
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                got = os.read(self._replies, 1 << 16)
                if not got:
                    raise SystemExit("Chromium ended early")
                self._rest += got
            line, _, self._rest = self._rest.partition(b"\0")
            reply = json.loads(line)
            if reply.get("id") == self._number:
                return reply["result"]

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + 60
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise SystemExit(f"the page never came to {expression}")
            time.sleep(0.1)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """kimi-nano's server; its address."""
    command = [sys.executable, "-m", "perilune.cli.main", "serve", "kimi-nano", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(found[1] for line in process.stderr if (found := re.match(r"curl (http://[^/]+)/v1", line)))
        finally:
            process.terminate()


def labelled(png: bytes) -> bytes:
    """The picture with a text chunk behind its header chunk, which takes 33 bytes."""
    chunk = b"tEXt" + KEY + b"\0" + digest()
    return png[:33] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[33:]


def main() -> None:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    with serving() as url, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(chromium, profile)
        try:
            browser.open(f"{url}/")
            browser.wait('document.getElementById("model")?.textContent === "kimi-nano"')
            for question in QUESTIONS:
                browser.value(f'document.getElementById("text").value = {json.dumps(question)}')
                browser.value('document.getElementById("ask").requestSubmit()')
                browser.wait('document.getElementById("send").textContent === "send"')
            browser.value('document.querySelector("details").open = true')
            browser.value('document.querySelector("main").scrollTop = 0')
            png = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        finally:
            browser.process.terminate()
            browser.process.wait()
    PICTURE.write_bytes(labelled(png))


if __name__ == "__main__":
    main()
