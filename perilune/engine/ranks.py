"""The other ranks of an engine, seen from rank 0: one process each, which runs every step that rank 0 runs.

Two socket pairs lead to each process, inherited, so nothing listens. Over the first go the orders (plan_wire.py). Over
the second both sides say every second that they are there, and the rank sends a digest of the tokens of every step. A
rank that ends, that says nothing for SILENT_SECONDS, or that chooses other tokens ends the group: all are killed,
and every request in flight gets the reason. Only silence counts, not a step that lasts: a build of kernels or a long
prompt may take minutes.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError, EngineError, signal_note
from perilune.core.step import StepPlan
from perilune.dist.group import ALONE, Group
from perilune.dist.slicing import Slicing
from perilune.engine.plan_wire import HEADER, MAX_FRAME_BYTES, Order, Writer

log = logging.getLogger("perilune.engine")

RANK_MODULE = "perilune.engine.rank"
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # Longer: requests wait longer for their error. Shorter: a machine that swaps loses its ranks.
DIAGNOSIS_SECONDS = 8.0  # for a failed exchange to be explained by the rank that caused it
CLOSE_SECONDS = 3.0  # for ranks to end by themselves
MEASURED_STEPS = 512  # the last orders that are timed


class Place(msgspec.Struct, frozen=True):
    """Where a rank computes, and where it meets the others.

    cores    of the CPU, its own; empty: all
    gpu      number of its GPU; None: the current one
    shared   several ranks have the same GPU, where NCCL and graphs do not work
    meeting  file in which the ranks find each other; empty with one rank
    """

    rank: int = 0
    ranks: int = 1
    whole_experts: bool = False
    cores: tuple[int, ...] = ()
    gpu: int | None = None
    shared: bool = False
    meeting: str = ""

    @property
    def slicing(self) -> Slicing:
        return Slicing(self.rank, self.ranks, self.whole_experts)


class Start(msgspec.Struct, frozen=True):
    """A rank's first frame. `leader`: the process to kill when rank 0 says nothing any more; 0: none."""

    model: str
    config: EngineConfig
    place: Place
    leader: int


class Report(msgspec.Struct, array_like=True, frozen=True):
    """From a rank: "beat"; "loaded"; "digest" of a step's tokens; "failed", with the reason in `text`.

    decode_seconds  from the step's frame in memory to its plan
    """

    kind: str
    digest: int = 0
    text: str = ""
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class OrderCosts:
    """Seconds per step, medians: rank 0 encodes and sends a plan, and the slowest of the other ranks decodes it."""

    send: float
    decode: float


class Frames:
    """Length-prefixed frames of a socket, as they arrive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._data = sock, bytearray()

    def arrived(self) -> list[bytes]:
        """The frames that are complete; reads once. EOFError when the other side is gone."""
        try:
            piece = self._sock.recv(1 << 20)
        except ConnectionError:
            piece = b""
        if not piece:
            raise EOFError
        self._data += piece
        found = []
        while len(self._data) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data)
            if size > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {size} bytes exceeds the bound of {MAX_FRAME_BYTES}")
            if len(self._data) < HEADER.size + size:
                break
            found.append(bytes(self._data[HEADER.size : HEADER.size + size]))
            del self._data[: HEADER.size + size]
        return found


class _Rank:
    """One of the other processes."""

    def __init__(self, place: Place, process: "subprocess.Popen[bytes]", orders: socket.socket, pulse: socket.socket):
        self.place, self.process, self.orders, self.pulse = place, process, orders, pulse
        self.frames = Frames(pulse)
        self.digests: deque[int] = deque()  # of steps that rank 0 has not read yet
        self.loaded = False
        self.silent_seconds = 0.0
        self.decode_seconds: deque[float] = deque(maxlen=MEASURED_STEPS)

    def __str__(self) -> str:
        return f"rank {self.place.rank} of {self.place.ranks} (process {self.process.pid})"


class Ranks:
    """All but rank 0. Orders come from one thread at a time.

    on_failure  called once, from a thread of this class, with the reason, before `check` knows it. It does not ask to
                start the engine again, as `check` does: a server does that by itself
    """

    def __init__(self, model: Path, config: EngineConfig, places: list[Place], *, kills_leader: bool) -> None:
        self._writer = Writer()
        self._ranks: list[_Rank] = []
        self._group: Group = ALONE
        self._own: deque[int] = deque()  # digests of rank 0's steps that not all ranks have sent yet
        self._compared = {place.rank: 0 for place in places[1:]}
        self._read = 0  # steps taken off the front of _own
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._closing = self._watching_silence = False
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] | None = None
        self._order_seconds: deque[float] = deque(maxlen=MEASURED_STEPS)
        self.place = places[0]
        leader = os.getpid() if kills_leader else 0
        try:
            for place in places[1:]:
                self._ranks.append(_spawn(Start(str(model), config, place, leader)))
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="perilune-ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    # ---- orders

    def plan(self, plan: StepPlan, kind: str = "plan") -> None:
        """The ranks run this step next. `kind` "time": without a digest."""
        begin = time.perf_counter()
        for own in plan.slices:
            if own.patches is not None and own.rank > 0:
                frame = self._writer.order(Order("pixels", pixels=(own.digest, own.patches)))
                with self.explained():
                    self._ranks[own.rank - 1].orders.sendall(frame)
        self._send(self._writer.plan(plan, kind))
        self._order_seconds.append(time.perf_counter() - begin)

    def costs(self) -> "OrderCosts":
        """Of plans since the last call, the last MEASURED_STEPS."""
        with self._lock:
            decode = max(statistics.median(rank.decode_seconds or [0.0]) for rank in self._ranks)
            send = statistics.median(self._order_seconds or [0.0])
            for seconds in (self._order_seconds, *(rank.decode_seconds for rank in self._ranks)):
                seconds.clear()
        return OrderCosts(send, decode)

    def order(self, kind: str, number: int = 0) -> None:
        self._send(self._writer.order(Order(kind, number)))

    def _send(self, frame: bytes) -> None:
        with self.explained():
            for rank in self._ranks:
                rank.orders.sendall(frame)

    # ---- what rank 0 waits for, and what goes wrong

    def wait_loaded(self) -> None:
        """Returns when every rank has its weights. EngineError if one fails before."""
        while not all(rank.loaded for rank in self._ranks):
            self.check()
            self._changed.wait(BEAT_SECONDS)
            self._changed.clear()
        self.check()

    def joined(self, group: Group) -> None:
        """`group` connects the ranks; it is aborted when one is lost."""
        self._group = group
        shutil.rmtree(Path(self.place.meeting).parent, ignore_errors=True)

    def ready(self) -> None:
        """From now on a rank that says nothing is lost."""
        self._watching_silence = True

    def read(self, digest: int) -> None:
        """Rank 0's digest of its next step."""
        with self._lock:
            self._own.append(digest)
        self._compare()

    def check(self) -> None:
        """EngineError if a rank is lost."""
        if self.failure is not None:
            raise EngineError(self.failure)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An exchange that fails because a rank is lost raises EngineError with the reason."""
        try:
            yield
        except (RuntimeError, OSError):
            self._over.wait(DIAGNOSIS_SECONDS)
            self.check()
            raise
        self.check()

    def close(self) -> None:
        """Ends all ranks, by force if they do not end in time."""
        self._closing = True
        frame = self._writer.order(Order("close"))
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.orders.sendall(frame)
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.orders.close()
        self._over.set()
        if hasattr(self, "_watcher") and threading.current_thread() is not self._watcher:
            self._watcher.join(2 * BEAT_SECONDS)
        for rank in self._ranks:
            rank.pulse.close()
        if self.place.meeting:
            shutil.rmtree(Path(self.place.meeting).parent, ignore_errors=True)

    # ---- the watching thread

    def _watch(self) -> None:
        beat = HEADER.pack(0)
        heard: set[int] = set()
        next_beat = time.monotonic()
        by_socket = {rank.pulse: rank for rank in self._ranks}
        while not self._closing and self.failure is None:
            for sock in select.select(list(by_socket), [], [], BEAT_SECONDS / 4)[0]:
                rank = by_socket[sock]
                heard.add(rank.place.rank)
                self._hear(rank)
            if (now := time.monotonic()) < next_beat:
                continue
            # Rounds are counted, not time: the whole machine may have been stopped in between.
            next_beat = now + BEAT_SECONDS
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.pulse.send(beat, socket.MSG_DONTWAIT)
                quiet = rank.place.rank not in heard and self._watching_silence
                rank.silent_seconds = rank.silent_seconds + BEAT_SECONDS if quiet else 0.0
                if rank.silent_seconds >= SILENT_SECONDS:
                    self._fail(f"{rank} has not answered for {SILENT_SECONDS:.0f} s")
            heard.clear()

    def _hear(self, rank: _Rank) -> None:
        try:
            for frame in rank.frames.arrived():
                report = msgspec.msgpack.decode(frame, type=Report)
                if report.kind == "loaded":
                    rank.loaded = True
                elif report.kind == "digest":
                    with self._lock:
                        rank.digests.append(report.digest)
                        rank.decode_seconds.append(report.decode_seconds)
                elif report.kind == "failed":
                    self._fail(report.text)
        except (EOFError, msgspec.DecodeError, EngineError):
            if not self._closing:
                self._fail(f"{rank} {_ending(rank.process)}")
        self._changed.set()
        self._compare()

    def _compare(self) -> None:
        """The digests that both sides have sent."""
        wrong = None
        with self._lock:
            for rank in self._ranks:
                number = rank.place.rank
                while rank.digests and self._compared[number] < self._read + len(self._own):
                    if rank.digests.popleft() != self._own[self._compared[number] - self._read] and wrong is None:
                        wrong = rank
                    self._compared[number] += 1
            done = min(self._compared.values())
            while self._read < done:
                self._own.popleft()
                self._read += 1
        if wrong is not None:
            self._fail(f"{wrong} chose other tokens than rank 0: they no longer compute the same")

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure is not None or self._closing:
                return
            why = f"the engine stopped: {why}; its other ranks were ended too"
            for rank in self._ranks:
                rank.process.kill()
            if self.on_failure is not None:
                self.on_failure(why)
            self.failure = f"{why}: start it again"
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        self._over.set()
        self._changed.set()


def places(config: EngineConfig, gpus: list[int] | None) -> list[Place]:
    """A place for every rank; `gpus` None: on the CPU; the ranks share out its cores."""
    count = config.ranks
    if gpus is not None and len(gpus) < count:
        raise ConfigError(f"{count} ranks need {count} GPUs, but there are {len(gpus)}: lower tp, or name more in gpus")
    meeting = str(Path(tempfile.mkdtemp(prefix="perilune-ranks-")) / "meeting") if count > 1 else ""
    cores = sorted(os.sched_getaffinity(0))
    own = max(len(cores) // count, 1)
    shared = gpus is not None and len(set(gpus[:count])) < count
    return [
        Place(
            rank,
            count,
            config.ep > 1,
            tuple(cores[(rank * own + i) % len(cores)] for i in range(own)) if count > 1 else (),
            None if gpus is None else gpus[rank],
            shared,
            meeting,
        )
        for rank in range(count)
    ]


def _spawn(start: Start) -> _Rank:
    orders, their_orders = socket.socketpair()
    pulse, their_pulse = socket.socketpair()
    with their_orders, their_pulse:
        fds = their_orders.fileno(), their_pulse.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, *map(str, fds)],
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for rank 0, which then ends this process
        )
    body = msgspec.msgpack.encode(start)
    orders.sendall(HEADER.pack(len(body)) + body)
    return _Rank(start.place, process, orders, pulse)


def _ending(process: "subprocess.Popen[bytes]") -> str:
    """How the process ended that closed its socket."""
    try:
        code = process.wait(BEAT_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"ended by {signal.Signals(-code).name}{signal_note(code)}" if code < 0 else f"ended with exit code {code}"


def report(kind: str, **values: Any) -> bytes:
    """A frame from a rank."""
    body = msgspec.msgpack.encode(Report(kind, **values))
    return HEADER.pack(len(body)) + body
