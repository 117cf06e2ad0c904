"""A rank other than 0: loads its part of the model and runs the steps that rank 0 plans.

Started by engine/ranks.py as `python -m perilune.engine.rank ORDERS PULSE`, two socket descriptors. It ends when rank 0
says so, is gone, or says nothing any more.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from perilune.core.errors import EngineError, PeriluneError
from perilune.engine.build import build
from perilune.engine.plan_wire import Order, Reader
from perilune.engine.ranks import BEAT_SECONDS, SILENT_SECONDS, Frames, Start, report
from perilune.engine.readout import Readout
from perilune.engine.runner import Runner

BLAME_SECONDS = 2.0  # before reporting a failed step: its cause may be another rank, which rank 0 has to see first


class Leader:
    """Rank 0, seen from here: a thread says every second that this rank is there, and listens for the same."""

    def __init__(self, pulse: socket.socket) -> None:
        self._pulse, self._lock = pulse, threading.Lock()
        self._process = 0
        threading.Thread(target=self._beat, name="perilune-pulse", daemon=True).start()

    def watch(self, process: int) -> None:
        """Kills `process` when rank 0 says nothing any more, unless it is 0."""
        self._process = process

    def send(self, kind: str, *, digest: int = 0, text: str = "", decode_seconds: float = 0.0) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pulse.sendall(report(kind, digest=digest, text=text, decode_seconds=decode_seconds))

    def _beat(self) -> None:
        frames, silent_seconds = Frames(self._pulse), 0.0
        while True:
            self.send("beat")
            end, heard = time.monotonic() + BEAT_SECONDS, False
            while (rest := end - time.monotonic()) > 0:
                if select.select([self._pulse], [], [], rest)[0]:
                    try:
                        heard |= bool(frames.arrived())
                    except (EOFError, EngineError):
                        os._exit(0)  # rank 0 is gone, and all requests with it
            silent_seconds = 0.0 if heard else silent_seconds + BEAT_SECONDS
            if silent_seconds >= SILENT_SECONDS:
                print(
                    f"perilune: rank 0 has not answered for {SILENT_SECONDS:.0f} s: ended", file=sys.stderr, flush=True
                )
                if self._process:
                    with contextlib.suppress(OSError):
                        os.kill(self._process, signal.SIGKILL)
                os._exit(1)


def follow(runner: Runner, orders: "queue.SimpleQueue[bytes | None]", leader: Leader) -> None:
    """Runs what rank 0 orders, until it says that this is all. Digests are sent by a thread of their own, as soon as a
    step is over."""
    reader, drafter = Reader(), runner.drafter
    running: deque[Future[None]] = deque()

    def finish(queued: "Future[Readout]", counts: bool, decode_seconds: float) -> None:
        try:
            result = queued.result().wait().result()
        except BaseException as e:
            fail(leader, e)
            return
        if counts:
            leader.send("digest", digest=result.digest, decode_seconds=decode_seconds)

    with ThreadPoolExecutor(1, "perilune-digests") as reporting:
        while (body := orders.get()) is not None:
            begin = time.perf_counter()
            order: Order = reader.order(body)
            if order.kind in ("plan", "time"):
                plan = reader.plan(order)
                seconds = time.perf_counter() - begin
                if len(running) == 2:  # as the engine: two steps are in flight, no more
                    running.popleft().result()
                running.append(reporting.submit(finish, runner.launch(plan), order.kind == "plan", seconds))
                continue
            if order.kind == "pixels" and order.pixels is not None and runner.tower is not None:
                runner.tower.provide(*order.pixels)
                continue
            while running:
                running.popleft().result()
            if order.kind == "zero":
                runner.call(runner.zero, order.number)
            elif order.kind == "drafter":
                runner.follow(drafter if order.number else None)
            elif order.kind == "close":
                return


def fail(leader: Leader, error: BaseException) -> None:
    """Reports why this rank cannot go on; does not return."""
    if not isinstance(error, PeriluneError):
        time.sleep(BLAME_SECONDS)
    why = str(error).splitlines()[0] if str(error) else ""
    leader.send("failed", text=why if isinstance(error, PeriluneError) else f"{type(error).__name__}: {why}")
    os._exit(1)


def main() -> None:
    orders, pulse = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    leader = Leader(pulse)
    frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # Its own thread: rank 0 must not wait for a socket buffer while this rank computes.
    threading.Thread(target=_receive, args=(orders, frames), name="perilune-orders", daemon=True).start()
    body = frames.get()
    if body is None:
        return
    start = msgspec.msgpack.decode(body, type=Start)
    leader.watch(start.leader)
    if start.place.cores:
        os.sched_setaffinity(0, start.place.cores)
    try:
        parts = build(
            Path(start.model), start.config, progress=False, place=start.place, loaded=lambda: leader.send("loaded")
        )
        follow(parts.runner, frames, leader)
    except BaseException as e:
        fail(leader, e)


def _receive(sock: socket.socket, frames: "queue.SimpleQueue[bytes | None]") -> None:
    received = Frames(sock)
    with contextlib.suppress(EOFError):
        while True:
            for body in received.arrived():
                frames.put(body)
    frames.put(None)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes most of a second
