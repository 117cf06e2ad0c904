"""Files that are read again when they change, or on SIGHUP: keys, and TLS certificates."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from perilune.core.errors import ConfigError

POLL_SECONDS = 1.0
log = logging.getLogger("perilune.server")


class Watched:
    """Files that `load` reads. A failed load is logged once, and the contents read before stay in use."""

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], None]) -> None:
        self.what = what
        self.paths = paths
        self.load = load
        self._seen = self._stamps()

    def poll(self, *, force: bool = False) -> None:
        """Reads the files again if they have changed, or with `force` in any case."""
        stamps = self._stamps()
        if stamps == self._seen and not force:
            return
        self._seen = stamps
        try:
            self.load()
        except ConfigError as e:
            log.error("the %s was not read again, the one before stays in use: %s", self.what, e)
        else:
            log.info("the %s was read again", self.what)

    def _stamps(self) -> list[tuple[int, int, int, int] | None]:
        found: list[tuple[int, int, int, int] | None] = []
        for path in self.paths:
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                # ctime, because a change of owner or mode, which may make a file readable, changes nothing else here.
                found.append((status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))
        return found


def again(files: Sequence[Watched]) -> None:
    for file in files:
        file.poll(force=True)


async def watch(files: Sequence[Watched]) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        for file in files:
            file.poll()
