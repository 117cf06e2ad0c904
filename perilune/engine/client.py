"""The server's side of the engine process: starts it, submits requests, hands each its deltas. No torch here."""

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from perilune.core.config import EngineConfig
from perilune.core.constraint import Constraint
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Cancel, Delta, EngineInfo, EngineStats, Failed, Shutdown, Submit, joined
from perilune.core.sampling import SamplingParams
from perilune.engine import wire

SHUTDOWN_SECONDS = 1.5
ENGINE_COMMAND = (sys.executable, "-m", "perilune.engine.process")  # the socket's number follows


def check_prompt(prompt: Sequence[int], info: EngineInfo) -> None:
    """RequestError unless the prompt can be run: not empty, known ids, room for at least one token after it."""
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if len(prompt) >= info.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the context holds {info.max_model_len} tokens including at "
            "least one of the answer: shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        raise RequestError(f"prompt token ids must be between 0 and {info.vocab_size - 1}", param="prompt")


def room(prompt: Sequence[int], params: SamplingParams, info: EngineInfo) -> int:
    """Tokens that may follow the prompt."""
    rest = info.max_model_len - len(prompt)
    return rest if params.max_tokens is None else min(params.max_tokens, rest)


class Inbox:
    """A request's deltas that were not taken yet. One task takes them."""

    __slots__ = ("_deltas", "_waiter")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """All that have come, at least one."""
        if not self._deltas:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._deltas = self._deltas, []
        return taken


class EngineClient:
    """A running engine process. All methods belong to the event loop that started it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: EngineInfo,
        end_tokens: frozenset[int],
    ) -> None:
        self.info = info
        self.stats = EngineStats()
        self.end_tokens = end_tokens
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        # Bounded by the number of live requests, which the server bounds; a queue holds one request's own tokens.
        self._inboxes: dict[int, Inbox] = {}
        self._failure: str | None = None
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def start(
        cls,
        model: Path,
        config: EngineConfig,
        *,
        stop_token_ids: Iterable[int] = (),
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> "EngineClient":
        """Spawns the engine on a checkpoint directory and waits until it is loaded.

        `stop_token_ids` are the tokenizer's end tokens, which come on top of those in config.json. `command` starts
        another process that speaks engine/wire.py.
        Raises EngineError with the engine's own message when it cannot start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which then ends this process
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        body = msgspec.msgpack.encode((str(model), config))
        writer.write(wire.HEADER.pack(len(body)) + body)
        try:
            (first,) = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            code = await process.wait()
            raise EngineError(f"the engine process ended with exit code {code} before it was ready") from e
        except asyncio.CancelledError:
            process.kill()
            raise
        if isinstance(first, Failed):
            await process.wait()
            writer.close()
            raise EngineError(first.error)
        assert isinstance(first, EngineInfo), f"unexpected first message {first!r}"
        return cls(process, reader, writer, first, frozenset(stop_token_ids) | set(first.stop_token_ids))

    @property
    def alive(self) -> bool:
        return self._failure is None

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one request until its last. Closing the iterator early cancels the request in the engine.

        Deltas that came while the consumer was busy are joined to one, so that a server behind its engine catches up;
        with stop strings they are not, as the consumer counts each delta's drafts up to where it stops.
        Cached KV is shared only with requests of equal `cache_keys`.

        Raises RequestError for a prompt that cannot run or has no room for the shortest answer that its constraint
        allows, and EngineError if the engine is down or ends meanwhile.
        """
        check_prompt(prompt, self.info)
        if constraint is not None:
            constraint.check_room(room(prompt, params, self.info))
        if self._failure is not None:
            raise EngineError(self._failure)
        rid = next(self._ids)
        inbox = Inbox()
        self._inboxes[rid] = inbox
        finished = False
        try:
            self._send(Submit(rid, tuple(prompt), params.ending_with(self.end_tokens), constraint, cache_keys))
            while not finished:
                taken = await inbox.take()
                for delta in taken if params.stop or len(taken) == 1 else joined(taken):
                    finished = delta.finish_reason is not None
                    if self._failure is not None and delta.finish_reason == "error":
                        raise EngineError(self._failure)
                    yield delta
        finally:
            del self._inboxes[rid]
            if not finished and self._failure is None:
                self._send(Cancel(rid))

    async def close(self) -> None:
        """Ends the engine process, by force if it does not end in time; live requests get an EngineError."""
        self._fail("the engine was shut down")
        with contextlib.suppress(ConnectionError):
            self._send(Shutdown())
            await self._writer.drain()
        try:
            await asyncio.wait_for(self._process.wait(), SHUTDOWN_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._writer.close()

    def _send(self, message: Any) -> None:
        self._writer.write(wire.encode([message]))

    async def _receive(self) -> None:
        try:
            while True:
                for message in await _read(self._reader):
                    if isinstance(message, Delta):
                        # Absent: cancelled before the delta arrived.
                        if (inbox := self._inboxes.get(message.rid)) is not None:
                            inbox.put(message)
                    elif isinstance(message, EngineStats):
                        self.stats = message
                    elif isinstance(message, Failed):
                        self._fail(message.error)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail("the engine process ended unexpectedly: see its output above, then restart the server")
        except EngineError as e:
            self._fail(str(e))

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
            for rid, inbox in self._inboxes.items():
                inbox.put(Delta(rid, finish_reason="error", error=why))


async def _read(reader: asyncio.StreamReader) -> list[Any]:
    header = await reader.readexactly(wire.HEADER.size)
    return wire.decode(await reader.readexactly(wire.body_length(header)))
