"""The server that a quality or speed run measures: a running endpoint, or a private server started for the run."""

import asyncio
import contextlib
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence

from perilune.client.endpoint import READ_SECONDS, Endpoint, EndpointError, is_url
from perilune.core.errors import ConfigError, EngineError
from perilune.core.interpreter import environment

STOP_SECONDS = 10.0
DEATH_SECONDS = 2.0
KEPT_LINES = 20
# A closed terminal or kill -9 of the run would otherwise leave the server, and its memory, in use.
SERVER = """
import signal
from perilune.core.interpreter import end_with_parent
end_with_parent(signal.SIGTERM)
from perilune.cli.main import main
main()
"""
MAX_LINE = 1 << 20  # bytes of the server's log read at once
_ADDRESS = re.compile(r"curl (https?://\S+?)/v1/")  # the line that `perilune serve` prints when it is ready


@contextlib.asynccontextmanager
async def open_target(
    model: str,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    timeout: float = READ_SECONDS,
    serve_options: Sequence[str] = (),
) -> AsyncIterator[Endpoint]:
    """The endpoint at `model` if that is an address; else `model` served on a free port of this machine meanwhile.

    model_name, api_key  for an address only
    serve_options        arguments of `perilune serve`, for a private server only
    """
    if is_url(model):
        if serve_options:
            raise ConfigError(f"{serve_options[0]} configures a model served here, but {model} is a running server")
        async with Endpoint(model, model=model_name, api_key=api_key, timeout=timeout) as endpoint:
            yield endpoint
        return
    if model_name is not None or api_key is not None:
        raise ConfigError(
            "--model-name and --api-key-file belong to a running server: give its http:// address as MODEL"
        )
    async with serving(model, serve_options) as url, Endpoint(url, timeout=timeout) as endpoint:
        yield endpoint


@contextlib.asynccontextmanager
async def serving(model: str, options: Sequence[str] = ()) -> AsyncIterator[str]:
    """The address of a server of `model` in a process of its own, which ends with the block (Linux: or this process).

    Raises EngineError with the server's own last words if it cannot start or dies while it is used.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, "serve", model, "--port", "0", *options),
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE,
    )
    assert process.stderr is not None
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    last: deque[str] = deque(maxlen=KEPT_LINES)
    reader = asyncio.create_task(_read(process.stderr, ready, last))
    try:
        yield await ready
    except EndpointError as e:
        if e.status is not None:
            raise
        # A connection breaks a moment before its server's exit can be seen.
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(process.wait(), DEATH_SECONDS)
            await reader
            raise EngineError(f"the private server ended with exit code {code}: {_words(last)}") from e
        raise
    finally:
        if reader.done():
            # The server has closed its log and is ending by itself. terminate() would poll it first and so take its
            # exit code away from asyncio's own waiter, which then warns of an unknown child process.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DEATH_SECONDS)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reader


async def _read(lines: asyncio.StreamReader, ready: asyncio.Future[str], last: deque[str]) -> None:
    """Reads the server's log to its end, so that it never blocks on a full pipe, and finds the address in it."""
    async for raw in lines:
        line = raw.decode(errors="replace").strip()
        if (found := _ADDRESS.match(line)) and not ready.done():
            ready.set_result(found[1])
        if line:
            last.append(line)
    if not ready.done():
        ready.set_exception(EngineError(_words(last)))


def _words(last: Sequence[str]) -> str:
    """Why the server ended, from the last lines of its log: the last "error: ", else the last line."""
    errors = (line.removeprefix("error: ") for line in reversed(last) if line.startswith("error: "))
    return next(errors, last[-1] if last else "no message")
