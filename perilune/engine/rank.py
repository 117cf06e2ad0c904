"""A rank other than 0: loads its part of the model and runs the steps that rank 0 plans.

Started by engine/ranks.py as `python -m perilune.engine.rank WAKE PULSE RING`: file descriptors of two sockets
(wake-ups, heartbeats) and of the shared memory with the orders. It ends on the order "close", or when rank 0 has ended
or its heartbeats stop.
"""

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from perilune.core.errors import EngineError, PeriluneError
from perilune.dist.group import ALONE, Group
from perilune.dist.peer_memory import ExchangeError
from perilune.engine.build import build
from perilune.engine.kv_tiers.ranked import Follower
from perilune.engine.order_ring import SPIN_SECONDS, OrderReader
from perilune.engine.plan_wire import Order, Reader
from perilune.engine.ranks import Frames, Start, report
from perilune.engine.readout import Readout
from perilune.engine.runner import Runner
from perilune.engine.step_times.lateness import BEAT_SECONDS, SILENT_SECONDS
from perilune.kv.transfer import Transfer
from perilune.ops.harness import build as ops_build

# A rank with at least 4 cores polls the order ring. With fewer, polling would slow the threads that launch and report.
POLLING_CORES = 4
# A rank waits 2 s before it reports a failed step, so that rank 0 first sees the death of another rank that caused it.
BLAME_SECONDS = 2.0
REMOVALS = 9  # times that the rendezvous folder is removed, at most


class Leader:
    """The connection to rank 0: a thread sends a heartbeat every second and listens for those of rank 0."""

    def __init__(self, pulse: socket.socket, start: Start) -> None:
        self._pulse, self._lock = pulse, threading.Lock()
        self._start = start
        self.rank_0_ended = False  # known once a report could not be sent
        self.group: Group = ALONE  # its progress goes into heartbeats
        threading.Thread(target=self._beat, name="perilune-pulse", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """`values`: fields of Report."""
        with self._lock:
            try:
                self._pulse.sendall(report(kind, **values))
            except OSError:
                self.rank_0_ended = True

    def _beat(self) -> None:
        frames, silent_seconds = Frames(self._pulse), 0.0
        while True:
            state = dict(progress=self.group.progress(), begun=self.group.begun)
            self.send("beat", building=ops_build.building(), **state)
            end, heard = time.monotonic() + BEAT_SECONDS, False
            while (rest := end - time.monotonic()) > 0:
                if select.select([self._pulse], [], [], rest)[0]:
                    try:
                        heard |= bool(frames.arrived())
                    except (EOFError, EngineError):
                        self.end(0)  # rank 0 has ended, so no request is left
            silent_seconds = 0.0 if heard else silent_seconds + BEAT_SECONDS
            if silent_seconds >= SILENT_SECONDS:
                print(
                    f"perilune: rank 0 has not answered for {SILENT_SECONDS:.0f} s: ended", file=sys.stderr, flush=True
                )
                if self._start.leader:
                    with contextlib.suppress(OSError):
                        os.kill(self._start.leader, signal.SIGKILL)
                self.end(1)

    def end(self, code: int) -> None:
        """Ends this process after rank 0's. Removes the rendezvous file, which a killed rank 0 leaves behind."""
        if self._start.place.meeting:
            folder = Path(self._start.place.meeting).parent
            for _ in range(REMOVALS):  # another thread may be joining the group and make the file again
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
        os._exit(code)


def follow(runner: Runner, orders: OrderReader, leader: Leader, tiers: Follower | None) -> None:
    """Carries out the orders of rank 0 up to "close". A second thread waits for the end of each step and sends its
    digest."""
    reader, drafter = Reader(), runner.drafter
    running: deque[Future[None]] = deque()
    launched: Future[Readout] | None = None

    def finish(queued: "Future[Readout]", sends_digest: bool, decode_seconds: float) -> None:
        try:
            readout = queued.result().wait()
            runner.group.check()
            result = readout.result()
        except BaseException as e:
            fail(leader, e)
            return
        if sends_digest:
            leader.send("digest", digest=result.digest, decode_seconds=decode_seconds)

    with ThreadPoolExecutor(1, "perilune-digests") as reporting:
        while True:
            if launched is not None:
                # Do not poll yet: polls take the GIL, which the thread that launches a prompt needs after each kernel.
                wait((launched,))
            body = orders.next()
            begin = time.perf_counter()
            order: Order = reader.order(body)
            if order.kind in ("plan", "time"):
                plan = reader.plan(order)
                seconds = time.perf_counter() - begin
                if len(running) == 2:  # as in the engine: at most two steps in flight
                    running.popleft().result()
                launched = runner.launch(plan)
                running.append(reporting.submit(finish, launched, order.kind == "plan", seconds))
                continue
            if order.kind == "move" and tiers is not None:
                while len(running) > order.number:
                    running.popleft().result()
                tiers.own.steps_run = bool(running)
                tiers.run(order.move)
                continue
            if order.kind == "pixels" and order.pixels is not None and runner.tower is not None:
                if order.number == runner.group.slicing.rank:
                    runner.tower.provide(*order.pixels)
                continue
            while running:
                running.popleft().result()
            if order.kind == "zero":
                runner.call(runner.zero, order.number)
            elif order.kind == "replay":
                runner.time_graph(order.number)
            elif order.kind == "drafter":
                runner.follow(drafter if order.number else None)
            elif order.kind == "close":
                return


def fail(leader: Leader, error: BaseException) -> None:
    """Reports why this rank cannot go on; does not return."""
    if not isinstance(error, PeriluneError) or isinstance(error, ExchangeError):
        time.sleep(BLAME_SECONDS)
    why = str(error).splitlines()[0] if str(error) else ""
    text = why if isinstance(error, PeriluneError) else f"{type(error).__name__}: {why}"
    leader.send("failed", text=text)
    if leader.rank_0_ended:
        leader.end(1)
    os._exit(1)


def main() -> None:
    wake, pulse = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    try:
        start = _start(wake)
    except EOFError:
        return  # rank 0 is gone
    leader = Leader(pulse, start)
    if start.place.cores:
        os.sched_setaffinity(0, start.place.cores)
    try:
        parts = build(
            Path(start.model),
            start.config,
            progress=(lambda read, of: leader.send("loading", read=read, to_read=of)) if start.progress else False,
            place=start.place,
            loaded=lambda: leader.send("loaded"),
        )
        leader.group = parts.runner.group
        gc.collect()
        gc.freeze()  # objects made so far live as long as the process: the collector need not scan them
        # Ranks on a CPU sleep instead: polling would take a core from the step.
        polls = start.place.gpu is not None and len(start.place.cores) >= POLLING_CORES
        orders = OrderReader(int(sys.argv[3]), start.reader, wake, SPIN_SECONDS if polls else 0.0)
        tiers = None
        if isinstance(parts.transfer, Transfer):
            tiers = Follower(parts.transfer, lambda moved: leader.send("moved", moved=moved))
        follow(parts.runner, orders, leader, tiers)
    except EOFError:
        leader.end(0)  # rank 0 is gone
    except BaseException as e:
        fail(leader, e)


def _start(sock: socket.socket) -> Start:
    received = Frames(sock)
    while not (found := received.arrived()):
        pass
    return msgspec.msgpack.decode(found[0], type=Start)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes most of a second
