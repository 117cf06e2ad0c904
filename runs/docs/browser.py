"""Headless Chromium, controlled by the DevTools protocol through a pair of pipes."""

import contextlib
import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

WAIT_SECONDS = 60.0
END_SECONDS = 20.0  # a browser that was asked to end is killed after this time
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"),
    "--host-resolver-rules=MAP *.test 127.0.0.1",  # names under .test are reserved; for tests, they mean this machine
)


class Navigated(RuntimeError):
    """The page navigated away while it evaluated an expression."""


class Browser:
    """One browser process with a profile of its own, and the page that was opened last."""

    def __init__(self, chromium: str, profile: str) -> None:
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        # The browser has commands at file descriptor 3 and replies at 4. First copy both ends to higher numbers, so
        # that copying one to 3 or 4 cannot overwrite the other.
        above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, replies)]
        actions = [(os.POSIX_SPAWN_DUP2, end, at) for end, at in zip(above, (3, 4), strict=True)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        command = [chromium, *OPTIONS, f"--user-data-dir={profile}"]
        self.pid = os.posix_spawnp(chromium, command, os.environ, file_actions=[*actions, quiet])
        for end in (commands, replies, *above):
            os.close(end)
        self._rest, self._number, self._session, self._target = b"", 0, "", ""

    def open(self, url: str, size: tuple[int, int], scale: float = 1.0) -> None:
        """Opens `url` in a new page of `size` (width, height) CSS pixels. The page before is closed."""
        self._session, before = "", self._target
        self._target = target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if before:
            self.call("Target.closeTarget", targetId=before)
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command; RuntimeError if Chromium refuses it or has ended."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                got = os.read(self._replies, 1 << 16)
                if not got:
                    raise RuntimeError("Chromium ended early")
                self._rest += got
            line, _, self._rest = self._rest.partition(b"\0")
            reply = json.loads(line)
            if reply.get("id") == self._number:
                if "error" in reply:
                    why = str(reply["error"]["message"])
                    raise (Navigated if "navigated" in why else RuntimeError)(f"{method}: {why}")
                return reply["result"]

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, by way of JSON; RuntimeError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = WAIT_SECONDS) -> Any:
        """Evaluates `expression` until its value is true, and returns that; RuntimeError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(Navigated):
                if found := self.value(expression):
                    return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"the page never came to {expression}")
            time.sleep(0.05)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        os.close(self._commands)
        os.close(self._replies)


@contextlib.contextmanager
def browsing(chromium: str) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(chromium, profile)
        try:
            yield browser
        finally:
            browser.close()
