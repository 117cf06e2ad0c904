"""The engine process: reads requests from a socket, steps the engine, writes deltas back.

Started by engine/client.py as `python -m perilune.engine.process FD`; the first frame holds the model directory and
the configuration. It ends after a Shutdown message, or when the other side closes the socket.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, PeriluneError, RequestError
from perilune.core.messages import Cancel, Delta, Failed, Shutdown, Submit
from perilune.engine import wire
from perilune.engine.engine import Engine
from perilune.ops.harness import build, registry

STATS_INTERVAL = 0.5  # seconds


class Channel:
    """The engine's blocking end of the socket."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._lock = threading.Lock()  # the thread that watches other ranks sends too

    def receive(self, *, wait: bool) -> list[Any]:
        """All messages of the frames that have arrived; with `wait`, at least one frame's. EOFError when closed."""
        batch: list[Any] = []
        while wait or select.select([self.sock], [], [], 0)[0]:
            batch += wire.decode(self.read_body())
            wait = False
        return batch

    def read_body(self) -> bytes:
        return self._exactly(wire.body_length(self._exactly(wire.HEADER.size)))

    def send(self, batch: list[Any]) -> None:
        with self._lock:
            self.sock.sendall(wire.encode(batch))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def serve(engine: Engine, channel: Channel) -> None:
    """The loop: take what arrived, step, send what came out."""
    sent_at = 0.0
    while True:
        deltas: list[Delta] = []
        for message in channel.receive(wait=not engine.busy):
            if isinstance(message, Submit):
                try:
                    engine.submit(message)
                except RequestError as e:  # the client has checked; this is the second check
                    deltas.append(Delta(message.rid, finish_reason="error", error=str(e)))
            elif isinstance(message, Cancel):
                engine.cancel(message.rid)
            elif isinstance(message, Shutdown):
                return
        deltas += engine.step()
        out: list[Any] = [*deltas]
        now = time.monotonic()
        if now - sent_at >= STATS_INTERVAL or not engine.busy:
            out.append(engine.stats())
            sent_at = now
        if out:
            channel.send(out)


def end_with_server() -> None:
    """The kernel ends this process when its server dies, however that dies and whatever this process does then: loading
    weights, or waiting for a device. Elsewhere than on Linux the closed socket ends it, at its next look."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    end_with_server()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        try:
            model, config = msgspec.msgpack.decode(channel.read_body(), type=tuple[str, EngineConfig])
            if config.tp == 1 and not config.ops and config.device != "cuda" and not torch.cuda.is_available():
                build.compile_aside(registry.forget)
            engine = Engine(Path(model), config, progress=sys.stderr.isatty(), owns_process=True)
            engine.on_lost_rank(partial(_end, channel))
        except PeriluneError as e:
            channel.send([Failed(str(e))])
            return
        channel.send([engine.info])
        try:
            serve(engine, channel)
        except (EngineError, RuntimeError, MemoryError) as e:
            # A broken step breaks the engine: say why to every request in flight, then show the traceback.
            channel.send([Failed(f"the engine stopped: {type(e).__name__}: {e}")])
            raise
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server is gone, and all its clients with it


def _end(channel: Channel, why: str) -> None:
    """Ends this process at once: a step that waits for a lost rank may never return."""
    with contextlib.suppress(OSError):
        channel.send([Failed(why)])
    print(f"perilune: {why}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
    # The engine is closed; unloading torch as well would take most of a second at every stop of a server.
    sys.stderr.flush()
    os._exit(0)
