"""Rank 0's side of the other ranks: starts one process for each, sends orders, watches heartbeats and results.

Every rank runs every step. Orders (plan_wire.py) go through shared memory (order_ring.py). Each process also inherits
two socket pairs, so that no port is opened. The first carries its Start, and a byte that wakes it when it sleeps on the
ring. The second carries a heartbeat every second in both directions, and a digest of each step's tokens from the rank.

The group ends, with all its processes killed and the reason sent to every request in flight, when a rank
- has ended, or has sent nothing for SILENT_SECONDS,
- has sampled other tokens than rank 0,
- does not end a step in time, or waits in a step that no rank ends (step_times/lateness.py).
"""

import atexit
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
from perilune.core.interpreter import environment
from perilune.core.step import StepPlan
from perilune.dist.group import ALONE, Group
from perilune.dist.peer_memory import ExchangeError
from perilune.dist.slicing import Slicing
from perilune.engine.order_ring import OrderWriter
from perilune.engine.plan_wire import HEADER, MAX_FRAME_BYTES, Order, Writer
from perilune.engine.step_times.lateness import BEAT_SECONDS, SILENT_SECONDS, Lateness, Seen
from perilune.ops.harness import build

log = logging.getLogger("perilune.engine")

Progress = Callable[[int, int, int], None]

RANK_MODULE = "perilune.engine.rank"
DIAGNOSIS_SECONDS = 8.0  # After an error in an exchange, wait this long for the watching thread to find the lost rank.
# How long a process may take to end after its socket has closed. Shorter: while the kernel still frees its memory, or
# on a busy machine, the reason lacks the signal that killed the process. Longer: DIAGNOSIS_SECONDS would be too short.
ENDING_SECONDS = 4.0
CLOSE_SECONDS = 3.0  # Ranks that have not ended by themselves after this are killed.
MEASURED_STEPS = 512  # `costs` takes medians over at most the last 512 plans.


class Place(msgspec.Struct, frozen=True):
    """Where a rank computes, and where it finds the others.

    whole_experts  as in Slicing: the config has ep > 1
    cores    CPU cores of its own; empty: all
    gpu      index of its GPU; None: the current one
    shared   whether several ranks use one GPU: NCCL and CUDA graphs do not work then
    meeting  path of the rendezvous file of torch.distributed, alone in its folder; empty with one rank
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
    """A rank's first frame. `leader`: the id of the process to kill when rank 0's heartbeats stop; 0: none."""

    model: str
    config: EngineConfig
    place: Place
    leader: int
    reader: int = 0  # its index among the readers of the order ring
    progress: bool = False  # whether it reports how many bytes of weights it has read


class Report(msgspec.Struct, array_like=True, frozen=True):
    """A message from a rank. Its kinds: "beat", a heartbeat; "loading"; "loaded"; "digest" of a step's tokens; "moved",
    copies of its KV tiers that have ended; "failed", with the reason in `text`.

    decode_seconds  time to decode the step's frame to a plan: with "digest"
    building        whether it compiles kernels: with "beat"
    progress, begun   of the rank's Group (dist/group.py): with "beat"
    read, to_read   bytes of weights: with "loading"
    """

    kind: str
    digest: int = 0
    text: str = ""
    decode_seconds: float = 0.0
    building: bool = False
    progress: int = 0
    begun: int = 0
    read: int = 0
    to_read: int = 0
    moved: bytes = b""


@dataclass(frozen=True, slots=True)
class OrderCosts:
    """Median seconds per step: rank 0 encodes and sends a plan; the slowest of the other ranks decodes it."""

    send: float
    decode: float


class Frames:
    """Length-prefixed frames of a socket, as they arrive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._data = sock, bytearray()

    def arrived(self) -> list[bytes]:
        """Reads once and returns the frames that are complete. EOFError when the other side has closed the socket."""
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
    """One of the other ranks, as rank 0 sees it."""

    def __init__(self, place: Place, process: "subprocess.Popen[bytes]", orders: socket.socket, pulse: socket.socket):
        self.place, self.process, self.orders, self.pulse = place, process, orders, pulse
        self.frames = Frames(pulse)
        self.digests: deque[int] = deque()  # digests of steps that rank 0 has no result of yet
        self.loaded = False
        self.silent_seconds = 0.0
        self.beat = Report("beat")  # its last heartbeat
        self.decode_seconds: deque[float] = deque(maxlen=MEASURED_STEPS)

    def __str__(self) -> str:
        return f"rank {self.place.rank} of {self.place.ranks} (process {self.process.pid})"


class Ranks:
    """All ranks but rank 0. One thread at a time may send orders.

    on_failure  called once with the reason, mostly on the watching thread, before `check` raises. Unlike the error of
                `check`, the reason does not advise to start the engine again, because a server does that itself
    """

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        places: list[Place],
        *,
        owns_process: bool,
        progress: Progress | None = None,
    ) -> None:
        """`owns_process` as in Engine. `progress` is called with (rank, bytes read, bytes to read) for other ranks, on
        a thread."""
        self._progress = progress
        self._sent = 0  # plans sent so far
        self._plans: deque[StepPlan] = deque(maxlen=2)  # the last plans: those that may be in flight
        self._writer = Writer()
        self._ring = OrderWriter(self._check_open)
        self._ranks: list[_Rank] = []
        self._group: Group = ALONE
        self._own: deque[int] = deque()  # rank 0's digests of steps that some rank has not sent its digest of
        self._compared = {place.rank: 0 for place in places[1:]}  # steps compared so far
        self._read = 0  # steps compared with all ranks, so that their digests have left _own
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._closing = self._watching_silence = False
        self._lateness = Lateness()
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] | None = None
        self.on_moved: Callable[[int, bytes], None] | None = None  # gets (rank, report of its KV tiers)
        self._order_seconds: deque[float] = deque(maxlen=MEASURED_STEPS)
        self.place = places[0]
        leader = os.getpid() if owns_process else 0
        atexit.register(self._exit, os.getpid())
        try:
            for place in places[1:]:
                self._ranks.append(
                    _spawn(Start(str(model), config, place, leader, progress=progress is not None), self._ring)
                )
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="perilune-ranks", daemon=True)
        self._watcher.start()

    @property
    def gpus(self) -> list[int]:
        """Indices of the GPUs of all ranks, in order; empty on a CPU."""
        places = (self.place, *(rank.place for rank in self._ranks))
        return [place.gpu for place in places if place.gpu is not None]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of these ranks: 1, 2, ..."""
        return tuple(rank.place.rank for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self._ranks)

    # ---- orders

    def plan(self, plan: StepPlan, kind: str = "plan") -> None:
        """Orders the ranks to run this step next. `kind` "time": without sending a digest."""
        begin = time.perf_counter()
        if kind == "plan":
            self._plans.append(plan)
            self._sent += 1
        for own in plan.slices:
            if own.patches is not None and own.rank > 0:
                self._send(self._writer.order(Order("pixels", own.rank, pixels=(own.digest, own.patches))))
        self._send(self._writer.plan(plan, kind))
        self._order_seconds.append(time.perf_counter() - begin)

    def costs(self) -> "OrderCosts":
        """Times of the plans since the last call, of at most the last MEASURED_STEPS."""
        with self._lock:
            decode = max(statistics.median(rank.decode_seconds or [0.0]) for rank in self._ranks)
            send = statistics.median(self._order_seconds or [0.0])
            for seconds in (self._order_seconds, *(rank.decode_seconds for rank in self._ranks)):
                seconds.clear()
        return OrderCosts(send, decode)

    def order(self, kind: str, number: int = 0) -> None:
        self._send(self._writer.order(Order(kind, number)))

    def move(self, body: bytes) -> None:
        """Orders the ranks to copy blocks of KV (engine/kv_tiers/ranked.py) once they have ended the steps that rank 0
        has read the results of; later steps may still be in flight."""
        with self._lock:
            unread = self._sent - self._read - len(self._own)
        self._send(self._writer.order(Order("move", unread, move=body)))

    def _send(self, body: bytes) -> None:
        with self.explained():
            self._ring.send(body)

    # ---- what rank 0 waits for, and what goes wrong

    def wait_loaded(self) -> None:
        """Returns when every rank has its weights. EngineError if one fails before."""
        while not all(rank.loaded for rank in self._ranks):
            self.check()
            self._changed.wait(BEAT_SECONDS)
            self._changed.clear()
        self.check()

    def joined(self, group: Group) -> None:
        """All ranks have joined `group`, which is aborted when one is lost. Deletes the rendezvous file."""
        self._group = group
        shutil.rmtree(Path(self.place.meeting).parent, ignore_errors=True)

    def ready(self) -> None:
        """From now on a rank without heartbeats for SILENT_SECONDS is lost."""
        self._watching_silence = True

    def read(self, digest: int) -> None:
        """Takes rank 0's digest of its next step, to be compared with those of the other ranks."""
        with self._lock:
            self._own.append(digest)
        self._compare()

    def check(self) -> None:
        """EngineError if a rank is lost."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def _check_open(self) -> None:
        self.check()
        if self._closing:
            raise EngineError("the ranks are being closed")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an error of an exchange that failed because a rank was lost into an EngineError with the reason."""
        try:
            yield
        except (RuntimeError, OSError, ExchangeError):
            self._over.wait(DIAGNOSIS_SECONDS)
            self.check()
            raise
        self.check()

    def _exit(self, process: int) -> None:
        """Closes the ranks when `process` exits without `close`: its heartbeats would end before its sockets close."""
        if os.getpid() != process:
            return  # a fork of the process ends
        self.close()
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            self._group.close()

    def close(self) -> None:
        """Ends all ranks, by force if they do not end in time."""
        self._closing = True
        atexit.unregister(self._exit)
        with contextlib.suppress(OSError, EngineError):
            self._ring.send(self._writer.order(Order("close")))
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
        self._ring.close()
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
            # Silence is counted in rounds of this loop, not in seconds: a machine that was suspended loses no rank.
            next_beat = now + BEAT_SECONDS
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.pulse.send(beat, socket.MSG_DONTWAIT)
                quiet = rank.place.rank not in heard and self._watching_silence
                rank.silent_seconds = rank.silent_seconds + BEAT_SECONDS if quiet else 0.0
                if rank.silent_seconds >= SILENT_SECONDS:
                    self._fail(f"{rank} has not answered for {SILENT_SECONDS:.0f} s")
            if self._watching_silence and (why := self._lateness.look(self._seen())) is not None:
                self._fail(why)
            heard.clear()

    def _seen(self) -> Seen:
        beats = [rank.beat for rank in self._ranks]
        with self._lock:
            return Seen(
                ended={str(rank): self._compared[rank.place.rank] + len(rank.digests) for rank in self._ranks},
                own=self._read + len(self._own),
                sent=self._sent,
                tokens=max((plan.tokens for plan in self._plans), default=0),
                building=build.building() or any(beat.building for beat in beats),
                progress=(self._group.progress(), *(beat.progress for beat in beats)),
                begun=(self._group.begun, *(beat.begun for beat in beats)),
                silent=max(rank.silent_seconds for rank in self._ranks) > BEAT_SECONDS,
            )

    def _hear(self, rank: _Rank) -> None:
        try:
            for frame in rank.frames.arrived():
                report = msgspec.msgpack.decode(frame, type=Report)
                if report.kind == "beat":
                    rank.beat = report
                elif report.kind == "loading" and self._progress is not None:
                    self._progress(rank.place.rank, report.read, report.to_read)
                elif report.kind == "loaded":
                    rank.loaded = True
                elif report.kind == "digest":
                    with self._lock:
                        rank.digests.append(report.digest)
                        rank.decode_seconds.append(report.decode_seconds)
                elif report.kind == "moved" and self.on_moved is not None:
                    self.on_moved(rank.place.rank, report.moved)
                elif report.kind == "failed":
                    # This rank may report the consequence of another rank's death: then name the killed rank.
                    killed = next((r for r in self._ranks if (r.process.poll() or 0) < 0), None)
                    self._fail(report.text if killed is None else f"{killed} {_ending(killed.process)}")
        except (EOFError, msgspec.DecodeError, EngineError):
            if not self._closing:
                self._fail(f"{rank} {_ending(rank.process)}")
        self._changed.set()
        self._compare()

    def _compare(self) -> None:
        """Compares rank 0's digests with those that the other ranks have sent for the same steps."""
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
        """Ends the group, once: kills the other ranks, reports `why`, aborts exchanges in flight."""
        with self._lock:
            if self.failure is not None or self._closing:
                return
            why = f"the engine stopped: {why}; its other ranks were ended too"
            for rank in self._ranks:
                rank.process.kill()
            if self.on_failure is not None:
                self.on_failure(why)
            self.failure = f"{why}: start it again"
        self._over.set()
        self._changed.set()
        # Last, because aborting NCCL takes seconds when a rank has ended; its calls in flight fail at once.
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def places(config: EngineConfig, gpus: list[int] | None) -> list[Place]:
    """A place for every rank. `gpus` None: on the CPU, with its cores divided among the ranks."""
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


def _spawn(start: Start, ring: OrderWriter) -> _Rank:
    orders, their_orders = socket.socketpair()
    pulse, their_pulse = socket.socketpair()
    start = msgspec.structs.replace(start, reader=ring.add(orders))
    with their_orders, their_pulse:
        fds = their_orders.fileno(), their_pulse.fileno(), ring.fd
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, *map(str, fds)],
            pass_fds=fds,
            env=environment(),
            start_new_session=True,  # Ctrl-C is for rank 0, which then ends this process
        )
    body = msgspec.msgpack.encode(start)
    orders.sendall(HEADER.pack(len(body)) + body)
    return _Rank(start.place, process, orders, pulse)


def _ending(process: "subprocess.Popen[bytes]") -> str:
    """The end of an error line: the exit status or signal of a process that has closed its socket."""
    try:
        code = process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"ended by {signal.Signals(-code).name}{signal_note(code)}" if code < 0 else f"ended with exit code {code}"


def report(kind: str, **values: Any) -> bytes:
    """A frame from a rank."""
    body = msgspec.msgpack.encode(Report(kind, **values))
    return HEADER.pack(len(body)) + body
