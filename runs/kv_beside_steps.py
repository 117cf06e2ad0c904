"""How much steps of requests that decode slow down beside copies of KV of every kind: part "slowdown" of
runs/kv_transfer.py."""

import ctypes
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.kv.copier import block_bytes, copier
from perilune.kv.host_memory import HostMemory
from perilune.kv.transfer import RESTORE_SHARE, STORE_SHARE, WINDOW_BLOCKS, row_bytes
from perilune.ops.rows import host_rows

LARGE_BYTES = 256 << 20
SETTLE_STEPS = 40
CASES = 24  # most cases; each takes `steps` steps twice, quiet and busy
Say = Callable[..., None]


@dataclass
class Load:
    """Copies that run beside steps until `stop`, a thread per direction (0: out, 1: in); `moved`: bytes of each."""

    work: Callable[["Load", int], None]
    ways: tuple[int, ...]
    stop: threading.Event = field(default_factory=threading.Event)
    moved: list[int] = field(default_factory=lambda: [0, 0])

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Runs the copies. The list that it gives is filled at the end: GB/s out, GB/s in."""
        threads, speeds = [threading.Thread(target=self.work, args=(self, way)) for way in self.ways], list[float]()
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            yield speeds
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
            wall = time.perf_counter() - begin
            speeds += [moved / wall / 1e9 for moved in self.moved]


class Copying:
    """The ways to keep the link busy beside steps, on blocks that no request has."""

    def __init__(self, pages: Tensor, spare: list[int]) -> None:
        self._pages, size = pages, row_bytes([pages])
        self._size, half = size, len(spare) // 2
        self._memory = HostMemory(2 * half, size, block_bytes([pages]), pages.device, at_once=2 * half)
        self._pairs = [
            [(block, self._memory.row(way * half + i)) for i, block in enumerate(spare[way * half : (way + 1) * half])]
            for way in (0, 1)
        ]
        cuda = pages.device.type == "cuda"
        self._host = [torch.empty(LARGE_BYTES if cuda else 1 << 20, dtype=torch.uint8, pin_memory=cuda) for _ in "01"]
        self._there = [torch.empty_like(host, device=pages.device, pin_memory=False) for host in self._host]
        queue = copier([pages])
        self.block_seconds = []
        for move in (queue.out, queue.into):
            begin = time.perf_counter()
            move(self._pairs[0])
            queue.wait()
            self.block_seconds.append((time.perf_counter() - begin) / half)

    def large(self, load: Load, way: int) -> None:
        """Copies of LARGE_BYTES one after the other, so with few driver calls."""
        here, there = self._host[way], self._there[way]
        cuda = there.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
            while not load.stop.is_set():
                (there if way else here).copy_(here if way else there, non_blocking=True)
                if cuda:
                    event = torch.cuda.Event(blocking=True)
                    event.record()
                    event.synchronize()
                load.moved[way] += here.nbytes

    def windows(self, load: Load, way: int) -> None:
        """Copies of blocks in windows, two of them in flight, as fast as the driver takes them."""
        self._blocks(load, way, WINDOW_BLOCKS, 0.0)

    def paced(self, share: float) -> Callable[[Load, int], None]:
        """As `windows`, at this share of the link's speed."""
        return lambda load, way: self._blocks(load, way, WINDOW_BLOCKS, self.block_seconds[way] / share)

    def calls(self, load: Load, way: int) -> None:
        """The calls of `windows` without the driver: what CPU and GIL cost."""
        places = [host_rows.Places(0, self._pages.shape[0], 4096, 4096)]
        while not load.stop.is_set():
            host_rows.copy(ctypes.CDLL(None).sched_yield, 0, self._pairs[way][:WINDOW_BLOCKS], places, out=not way,
                           block_seconds=self.block_seconds[way])  # fmt: skip

    def _blocks(self, load: Load, way: int, window: int, block_seconds: float) -> None:
        queue, pairs, marks = copier([self._pages]), self._pairs[way], deque[object]()
        queue.block_seconds = block_seconds
        while not load.stop.is_set():
            for first in range(0, len(pairs), window):
                if len(marks) == 2:
                    queue.wait(marks.popleft())
                (queue.into if way else queue.out)(pairs[first : first + window])
                marks.append(queue.mark())
                load.moved[way] += self._size * len(pairs[first : first + window])
                if load.stop.is_set():
                    break
        queue.wait()

    def close(self) -> None:
        self._memory.close()


def slowdown(say: Say, engine: Engine, batch: int, context: int, vocab: int, steps: int) -> None:
    """Step time of `batch` requests that decode, beside copies of every kind, with the step's own small copies by
    kernels (mapped) and by copy engines; then the step's graph alone, on the device's clock. Each case has a quiet
    measurement of its own before it."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=SETTLE_STEPS + 2 * CASES * steps, ignore_eos=True)
    for rid in range(batch):
        engine.submit(Submit(5000 + rid, tuple(rng.randrange(vocab) for _ in range(context)), params))
    for _ in range(SETTLE_STEPS):
        engine.step()
    tree = engine.scheduler.blocks.tree
    spare = [tree.allocate() for _ in range(min(tree.num_free // 2, 800))]
    copying = Copying(engine.runner.pages.data, spare)
    overrides = engine.runner.overrides

    def timed() -> float:
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - begin)
        return statistics.fmean(sorted(taken)[: int(0.95 * steps)])

    def graph_alone() -> float:
        return engine.runner.time_graph(16) or 0.0

    def case(name: str, work: Callable[[Load, int], None], ways: tuple[int, ...], measure: Callable[[], float]) -> None:
        quiet = measure()
        with Load(work, ways).running() as speeds:
            busy = measure()
        own = "copy engine" if "mapped_copy" in overrides else "kernel"
        say("slowdown", batch=batch, copies=name, ways="".join("oi"[w] for w in ways), own=own, context=context,
            quiet_ms=quiet * 1e3, step_ms=busy * 1e3, decode_slowdown=busy / quiet - 1,
            out_gb_s=speeds[0], in_gb_s=speeds[1])  # fmt: skip

    def served(load: Load, way: int) -> None:
        copying.paced((STORE_SHARE, RESTORE_SHARE)[way])(load, way)

    for own in ("kernel", "copy engine"):
        if own != "kernel":
            overrides["mapped_copy"] = "reference"
        timed()
        case("served", served, (0, 1), timed)
        case("served", served, (1,), timed)
        case("paced 0.9", copying.paced(0.9), (0, 1), timed)
        case("paced 0.7", copying.paced(0.7), (0, 1), timed)
        case("paced 0.5", copying.paced(0.5), (0, 1), timed)
        for ways in ((0, 1), (0,), (1,)):
            case("windows", copying.windows, ways, timed)
        case("large", copying.large, (0, 1), timed)
    del overrides["mapped_copy"]
    case("calls only", copying.calls, (0, 1), timed)
    for rid in range(batch):
        engine.cancel(5000 + rid)
    while engine.busy:
        engine.step()
    if engine.runner.graphs is not None:
        for ways in ((0, 1), (0,), (1,)):
            case("large, beside the graph alone", copying.large, ways, graph_alone)
        case("windows, beside the graph alone", copying.windows, (0, 1), graph_alone)
    tree.release(spare)
    copying.close()
