"""The server's side of the engine process: starts it, submits requests, receives their deltas. No torch here."""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from perilune.core.config import EngineConfig
from perilune.core.constraint import Constraint
from perilune.core.errors import EngineError, EngineUnavailable, RequestError, prompt_too_long, signal_note
from perilune.core.interpreter import environment
from perilune.core.messages import (
    FIRST_COME,
    Cancel,
    Delta,
    EngineInfo,
    EngineStats,
    Failed,
    Media,
    Order,
    Picture,
    Pixels,
    Shutdown,
    Submit,
    Want,
    joined,
)
from perilune.core.sampling import SamplingParams
from perilune.engine import wire
from perilune.engine.inbox import Inbox
from perilune.media import placeholders

SHUTDOWN_SECONDS = 1.5
# Messages read from the engine before other asyncio tasks run. More: longer gaps in each client's stream.
TURN_MESSAGES = 1024
ENGINE_COMMAND = (sys.executable, "-m", "perilune.engine.process")  # the descriptor of the socket is appended
CRASH_SECONDS = 0.5  # How long a process that has closed its socket may take to print its traceback and exit.
MAX_RUNS = 2  # engine processes that one request may run in. More: a request that crashes engines ends more of them.
BACKOFF_SECONDS = 1.0  # Pause after an engine process that finished no step; doubled each time.
MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_SECONDS = 60  # The longest Retry-After: the SDKs of OpenAI and Anthropic ignore longer ones.
MAX_LINE_BYTES = 64 << 10  # Longer lines of the engine's standard error are logged as several.
_LEVELLED = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")  # as engine/process.py logs
LOST = "lost"  # finish reason, inside this module only, of a request that its engine process did not finish

log = logging.getLogger("perilune.engine")


def check_prompt(prompt: Sequence[int], info: EngineInfo) -> None:
    """RequestError unless the prompt can be run: not empty, known ids, room for at least one token after it."""
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if len(prompt) >= info.max_model_len:
        raise prompt_too_long(len(prompt), info.max_model_len, "prompt")
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        raise RequestError(f"prompt token ids must be between 0 and {info.vocab_size - 1}", param="prompt")


def check_pictures(prompt: Sequence[int], pictures: Sequence[Media | Picture], info: EngineInfo) -> None:
    """RequestError unless the prompt has a run of the placeholder for each picture, in order, and no other."""
    if info.media_pad is not None:
        placeholders.spans(prompt, info.media_pad, [picture.tokens for picture in pictures])
    elif pictures:
        raise blind(info)


def blind(info: EngineInfo) -> RequestError:
    """The error for a request with pictures when no vision tower is loaded."""
    return RequestError(f"{info.model} does not see pictures: send text alone", code="unsupported_media")


def room(prompt: Sequence[int], params: SamplingParams, info: EngineInfo) -> int:
    """Tokens that may follow the prompt."""
    rest = info.max_model_len - len(prompt)
    return rest if params.max_tokens is None else min(params.max_tokens, rest)


@dataclass(slots=True)
class _Request:
    """An unfinished request.

    pictures  with their pixels
    produced  whether a delta has arrived
    runs      number of engine processes that it was submitted to
    lost      whether its engine process has ended and `inbox` got a last delta with LOST
    """

    message: Submit
    inbox: Inbox
    deadline: float | None  # by the event loop's clock
    pictures: tuple[Picture, ...] = ()
    produced: bool = False
    runs: int = 0
    lost: bool = False


class _Process:
    """One engine process. `stepped`: it has finished a step."""

    _relaying: asyncio.Task[None] | None = None

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pixels: socket.socket,
    ) -> None:
        self.process, self.reader, self.writer, self._pixels = process, reader, writer, pixels
        self.info: EngineInfo
        self.stepped = self._killed = False

    @classmethod
    async def start(cls, launch: "Launch") -> "_Process":
        """Spawns a process and waits until it is loaded; EngineError with its own message when it cannot start."""
        body = msgspec.msgpack.encode((str(launch.model), launch.config))
        try:
            self = await cls._spawn(launch, len(body))  # no await up to the next `try`: cancelling there would leak it
        except OSError as e:  # no memory, process or descriptor is left
            raise EngineError(f"the engine process cannot be started: {e.strerror or e}") from e
        if self.process.stderr is not None:
            self._relaying = asyncio.create_task(_relay(self.process.stderr))
        try:
            self.writer.write(body)
            (first,) = await _read(self.reader)
            assert isinstance(first, EngineInfo | Failed), f"unexpected first message {first!r}"
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            await self.kill(CRASH_SECONDS)
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            why = f"; `ulimit -v` is {limit >> 10} KB: raise it" if limit != resource.RLIM_INFINITY else ""
            raise EngineError(f"before it was ready, the engine process ended with {self.ending}{why}") from e
        except BaseException:  # cancelled, or a malformed message
            await self.kill()
            raise
        if isinstance(first, Failed):
            await self.kill(CRASH_SECONDS)
            raise EngineError(first.error)
        self.info = first
        return self

    @classmethod
    async def _spawn(cls, launch: "Launch", size: int) -> "_Process":
        """The process, which has got the descriptor of the socket for pixels and waits for `size` bytes. OSError if the
        system refuses it."""
        (ours, theirs), (pixels, their_pixels) = socket.socketpair(), socket.socketpair()
        pixels.setblocking(False)
        with theirs, their_pixels:
            socket.send_fds(ours, [wire.HEADER.pack(size)], [their_pixels.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(  # if this is cancelled, asyncio kills the process
                    *launch.command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    env=environment(),
                    start_new_session=True,  # Ctrl-C is for the server, which then ends this process
                    stderr=asyncio.subprocess.PIPE if launch.logged else None,
                )
            except BaseException:  # also if this is cancelled: no process will ever use the socket
                writer.close()
                pixels.close()
                raise
        return cls(process, reader, writer, pixels)

    @property
    def ending(self) -> str:
        code = self.process.returncode
        return f"signal {-code}{signal_note(code)}" if code is not None and code < 0 else f"exit code {code}"

    def send(self, message: Any) -> None:
        if isinstance(message, Pixels):
            wire.send_pixels(self._pixels, message)
        else:
            self.writer.write(wire.encode([message]))

    async def kill(self, wait_seconds: float = 0.0) -> None:
        """Ends the process, by force if it has not ended after `wait_seconds`, and all processes that it started."""
        if self._killed:  # its id may belong to another process by now
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), wait_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also ranks and compilers, which outlive the process
        self._killed = True
        self.writer.close()
        self._pixels.close()
        await self.process.wait()
        if self._relaying is not None:  # log its last lines; other processes may still hold the pipe open
            await asyncio.wait([self._relaying], timeout=CRASH_SECONDS)
            self._relaying.cancel()


@dataclass(frozen=True, slots=True)
class Launch:
    """How the engine process is started. The descriptor of its socket is appended to `command`. `logged`: its standard
    error becomes lines of this process's log."""

    model: Path
    config: EngineConfig
    command: Sequence[str] = ENGINE_COMMAND
    logged: bool = False


class EngineClient:
    """A running engine process. All methods belong to the event loop that started it.

    If `supervised`, an engine process that ends by itself is started again: at once, or after a growing delay if it
    ended before it finished a step. Requests that had produced tokens then fail; the others run again, at most MAX_RUNS
    times in all, because one of them may crash the engine.

    alive     requests are taken
    restarts  engine processes after the first
    """

    def __init__(self, launch: Launch, process: _Process, end_tokens: frozenset[int], *, supervised: bool) -> None:
        self.info = process.info
        self.stats = EngineStats()
        self.end_tokens = end_tokens
        self.alive = True
        self.restarts = 0
        self._launch = launch
        self._process = process
        self._supervised = supervised
        self._fruitless = 0  # engine processes in a row that ended without having finished a step
        self._ids = itertools.count()
        # The server bounds the number of live requests; an inbox holds only tokens of its own request.
        self._requests: dict[int, _Request] = {}
        self._start_seconds = 0.0  # duration of the last start
        self._down_since = 0.0  # by the event loop's clock
        self._failure: str | None = None  # why no request is taken any more; None while a process runs or will start
        self._running = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        model: Path,
        config: EngineConfig,
        *,
        stop_token_ids: Iterable[int] = (),
        supervised: bool = False,
        command: Sequence[str] = ENGINE_COMMAND,
        logged: bool = False,
    ) -> "EngineClient":
        """Spawns the engine on a checkpoint directory and waits until it is loaded.

        `stop_token_ids`: the tokenizer's end tokens, added to those in config.json. `command` starts another process
        that speaks engine/wire.py. `logged` as in Launch.
        Raises EngineError with the engine's own message when it cannot start.
        """
        launch, begun = Launch(model, config, command, logged), _now()
        process = await _Process.start(launch)
        end_tokens = frozenset(stop_token_ids) | set(process.info.stop_token_ids)
        self = cls(launch, process, end_tokens, supervised=supervised)
        self._start_seconds = _now() - begun
        return self

    @property
    def retry_seconds(self) -> int | None:
        """Seconds until requests are taken again, if the start takes as long as the last; None: none is starting."""
        if self.alive or not self._supervised:
            return None
        left = self._start_seconds - (_now() - self._down_since)
        return min(max(math.ceil(left), 1), MAX_RETRY_SECONDS)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
        order: Order = FIRST_COME,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one request until its last. Closing the iterator early cancels the request in the engine.

        `pictures` in the order of their runs of EngineInfo.media_pad in the prompt. This process keeps their pixels
        until the request has ended, and sends those that the engine asks for (Want), also after a restart.

        Deltas that came while the consumer was busy are joined to one, so that a server slower than its engine catches
        up. With stop strings deltas stay apart: the consumer counts accepted drafts, delta by delta, up to the stop.
        Cached KV is shared only with requests of equal `cache_keys`.

        Raises RequestError for a prompt that cannot run or has no room for the shortest answer that its constraint
        allows, and EngineUnavailable if the engine is down or ends meanwhile.
        """
        check_prompt(prompt, self.info)
        check_pictures(prompt, pictures, self.info)
        if constraint is not None:
            constraint.check_room(room(prompt, params, self.info))
        if self._failure is not None:
            raise EngineUnavailable(self._failure, retry_seconds=self.retry_seconds)
        rid = next(self._ids)
        ends, media = params.ending_with(self.end_tokens), tuple(map(Media.of, pictures))
        message = Submit(rid, tuple(prompt), ends, constraint, cache_keys, order, media)
        deadline = None if order.deadline_seconds is None else _now() + order.deadline_seconds
        request = self._requests[rid] = _Request(message, Inbox(), deadline, tuple(pictures))
        finished = False
        try:
            if self.alive:
                self._submit(request)
            while not finished:
                taken = await (request.inbox.take() if request.deadline is None else self._take_in_time(request))
                lost = taken.pop() if taken[-1].finish_reason == LOST else None
                for delta in taken if params.stop or len(taken) < 2 else joined(taken):
                    finished = delta.finish_reason is not None
                    yield delta
                if lost is not None and not finished:
                    finished = True
                    raise EngineUnavailable(lost.error or "", retry_seconds=self.retry_seconds)
        finally:
            del self._requests[rid]
            if not finished and self.alive:
                self._process.send(Cancel(rid))

    async def _take_in_time(self, request: _Request) -> list[Delta]:
        """As Inbox.take; at the deadline of the request its last delta. The engine ends requests by deadline too, but
        not while its process starts again or the request's grammar is compiled."""
        try:
            async with asyncio.timeout_at(request.deadline):
                return await request.inbox.take()
        except TimeoutError:
            rid = request.message.rid
            if self.alive:
                self._process.send(Cancel(rid))
            return [Delta(rid, finish_reason="deadline")]

    async def close(self) -> None:
        """Ends the engine process, by force if it does not end in time; live requests get an EngineUnavailable."""
        self._lose("the engine was shut down", every=True)
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        with contextlib.suppress(ConnectionError):
            self._process.send(Shutdown())
            await self._process.writer.drain()
        await self._process.kill(SHUTDOWN_SECONDS)

    def _submit(self, request: _Request) -> None:
        message = request.message
        if request.deadline is not None:  # the seconds that remain
            order = replace(message.order, deadline_seconds=max(request.deadline - _now(), 0.0))
            message = replace(message, order=order)
        request.runs += 1
        self._process.send(message)

    async def _run(self) -> None:
        """Receives from one engine process after the other."""
        while True:
            why = await self._receive()
            self.alive, self._down_since = False, _now()
            await self._process.kill(CRASH_SECONDS)
            why = why or f"the engine process ended unexpectedly ({self._process.ending})"
            if not self._supervised:
                log.error("%s", why)
                self._lose(f"{why}: see its output above, then start it again", every=True)
                return
            log.error("%s; it is started again", why)
            self._lose(f"{why}. It starts again by itself: send the request again", every=False)
            self._fruitless = 0 if self._process.stepped else self._fruitless + 1
            await self._start_again()

    async def _start_again(self) -> None:
        begun = _now()
        while True:
            if self._fruitless:
                seconds = min(BACKOFF_SECONDS * 2 ** min(self._fruitless - 1, 10), MAX_BACKOFF_SECONDS)
                log.error("the engine ended without having finished a step: the next try is in %g s", seconds)
                await asyncio.sleep(seconds)
            starting = _now()
            try:
                self._process = await _Process.start(self._launch)
            except EngineError as e:
                log.error("the engine could not be started again: %s", e)
                self._lose(f"the engine could not be started again: {e}", every=True)
                self._fruitless += 1
                continue
            break
        self.info, self.stats = self._process.info, EngineStats()
        self.restarts += 1
        self._start_seconds = _now() - starting
        self._failure, self.alive = None, True
        again = [request for request in self._requests.values() if not request.lost]
        for request in again:
            self._submit(request)
        log.info("the engine is ready again after %.1f s; %d requests run again", _now() - begun, len(again))

    async def _receive(self) -> str | None:
        """Handles messages until the process ends; returns the reason that the process sent, if any."""
        process, why, taken = self._process, None, 0
        try:
            while True:
                messages = await _read(process.reader)
                taken += len(messages)
                if taken >= TURN_MESSAGES:  # while bytes are buffered, reading does not yield to other tasks
                    taken = 0
                    await asyncio.sleep(0)
                for message in messages:
                    if isinstance(message, Delta):
                        process.stepped = process.stepped or bool(message.tokens)
                        # Absent: the request was cancelled before the delta arrived.
                        if (request := self._requests.get(message.rid)) is not None:
                            request.produced = True
                            request.inbox.put(message)
                    elif isinstance(message, Want):
                        if (request := self._requests.get(message.rid)) is not None:
                            picture = request.pictures[message.item]
                            patches = memoryview(picture.patches).cast("B")
                            process.send(Pixels(message.rid, message.item, patches, picture.shared))
                    elif isinstance(message, EngineStats):
                        process.stepped = process.stepped or message.steps > 0
                        self.stats = message
                    elif isinstance(message, Failed):
                        why = message.error
        except (asyncio.IncompleteReadError, ConnectionError):
            return why
        except EngineError as e:
            return str(e)

    def _lose(self, why: str, *, every: bool) -> None:
        """Fails the requests that cannot run again; with `every` all requests, and those submitted from now on."""
        if every:
            self.alive, self._failure = False, self._failure or why
        for rid, request in self._requests.items():
            if every or request.produced or request.runs >= MAX_RUNS:
                request.lost = True
                request.inbox.put(Delta(rid, finish_reason=LOST, error=why))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _read(reader: asyncio.StreamReader) -> list[Any]:
    header = await reader.readexactly(wire.HEADER.size)
    return wire.decode(await reader.readexactly(wire.body_length(header)))


async def _relay(written: asyncio.StreamReader) -> None:
    """Logs the engine's standard error line by line, at the level that a line begins with."""
    rest = b""
    while piece := await written.read(MAX_LINE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _log_line(line)
    _log_line(rest)


def _log_line(line: bytes) -> None:
    if text := line.decode(errors="replace").rstrip():
        found = _LEVELLED.fullmatch(text)
        level, text = (found[1], found[2]) if found else ("INFO", text)
        log.log(logging.getLevelNamesMapping()[level], "%s", text)
