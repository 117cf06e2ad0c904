"""The engine process: reads requests from a socket, steps the engine, writes deltas back.

Started by engine/client.py as `python -m perilune.engine.process FD`; the first frame holds the model directory and
the configuration. It ends after a Shutdown message, or when the other side closes the socket.
"""

import gc
import logging
import os
import re
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, PeriluneError, RequestError
from perilune.core.interpreter import end_with_parent
from perilune.core.messages import Cancel, Delta, Failed, Pixels, Shutdown, Submit
from perilune.engine.engine import Engine
from perilune.engine.wire import Channel
from perilune.ops.harness import build, registry

STATS_INTERVAL_SECONDS = 0.5
NO_MEMORY = re.compile(r"\bMemoryError|[Cc]an(no|')t (allocate memory|start new thread)|failed to map")
STARVED_SECONDS = 0.005  # How long to wait for a message when every request waits for pixels.


def serve(engine: Engine, channel: Channel) -> None:
    """The loop: handle the messages that have arrived, run a step, send its deltas."""
    sent_at = 0.0
    while True:
        out: list[Any] = []
        wait_seconds = engine.spare_seconds if engine.busy else engine.idle_seconds
        for message in channel.receive(STARVED_SECONDS if engine.starved else wait_seconds):
            if isinstance(message, Submit | Pixels):
                try:
                    engine.submit(message) if isinstance(message, Submit) else engine.provide(message)
                except RequestError as e:  # the client has checked already
                    engine.cancel(message.rid)
                    out.append(Delta(message.rid, finish_reason="error", error=str(e)))
            elif isinstance(message, Cancel):
                engine.cancel(message.rid)
            elif isinstance(message, Shutdown):
                return
        out += engine.step()
        out += engine.wants()
        now = time.monotonic()
        if now - sent_at >= STATS_INTERVAL_SECONDS or not engine.busy:
            out.append(engine.stats())
            sent_at = now
        if out:
            channel.send(out)


def main() -> None:
    end_with_parent(signal.SIGKILL)  # on other systems the closed socket ends it, when the loop next reads
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("perilune.kv").setLevel(logging.INFO)  # for the line about the KV tiers at the end
    try:
        try:
            model, config = msgspec.msgpack.decode(channel.read_body(), type=tuple[str, EngineConfig])
            on_cpu = config.device != "cuda" and not torch.cuda.is_available()
            if on_cpu and config.tp in (1, "auto") and not config.ops:
                build.compile_aside(registry.forget)
            engine = Engine(Path(model), config, progress=sys.stderr.isatty(), owns_process=True)
            engine.on_lost_rank(partial(_end, channel))
            gc.collect()
            gc.freeze()  # objects made so far live as long as the process: the collector need not scan them
        except (PeriluneError, MemoryError, RuntimeError, OSError, ImportError) as e:
            ours = isinstance(e, PeriluneError)
            if not ours and not NO_MEMORY.search(repr(e)):
                raise
            channel.send([Failed(str(e) if ours else f"no memory to start: {e!r}: free some, or raise `ulimit -v`")])
            return
        channel.send([engine.info])
        channel.send([engine.stats()])  # for /metrics: `serve` sends nothing before the first message
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
    try:
        channel.send([Failed(why)])  # the server logs it
    except OSError:
        print(f"perilune: {why}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
    # The engine is closed; unloading torch would take most of a second.
    sys.stderr.flush()
    os._exit(0)
