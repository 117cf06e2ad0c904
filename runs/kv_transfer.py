"""What moving KV costs on this machine, at Kimi K2.5's shapes with random weights: the copies, restoring a session
against computing it, and how much steps slow down meanwhile. Without a GPU: the same on kimi-nano, to try the script.

python -m runs.kv_transfer [--layers 9 --context 60000 --disk DIR]. Each line is JSON.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench.microscope import Bench
from perilune.core.config import EngineConfig, build
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.formats.hub import resolve_model
from perilune.kv.copier import block_bytes, copier
from perilune.kv.disk import Directory
from perilune.kv.host_memory import HostMemory
from perilune.kv.tiers import Name, Piece, Restored, Stored, Written
from perilune.kv.transfer import READING_THREADS, RESTORE_SHARE, STORE_SHARE, WINDOW_BLOCKS, Transfer, row_bytes
from perilune.ops.rows import host_rows

SUFFIX_TOKENS = 2242  # new tokens of a turn of an agent's session
REPEATS = 3
LARGE_BYTES = 256 << 20
PARTS = ("copies", "disk", "session", "slowdown")


def say(**row: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Median of REPEATS, after one run to warm up."""
    taken = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def copies(pages: Tensor, count: int) -> None:
    """GB/s of four ways to move `count` blocks at random places, each way, and of the link itself."""
    device, size = pages.device, row_bytes([pages])
    memory = HostMemory(count, size, block_bytes([pages]), device, at_once=count)
    try:
        blocks = random.Random(0).sample(range(pages.shape[1]), count)
        rows = [memory.row(i) for i in range(count)]
        views = [torch.from_numpy(row[: block_bytes([pages])]).view(pages.dtype) for row in rows]
        layered = [view.view(pages.shape[0], *pages.shape[2:]) for view in views]
        total = count * size
        pieces_there = [pages[layer, block] for block in blocks for layer in range(pages.shape[0])]
        pieces_here = [row[layer] for row in layered for layer in range(pages.shape[0])]
        staging = torch.empty(count, *layered[0].shape, dtype=pages.dtype, device=device)
        index = torch.tensor(blocks, device=device)
        flat = staging.view(count, -1)
        two, second = copier([pages]), copier([pages])

        def engines(out: bool) -> None:
            (two.out if out else two.into)(list(zip(blocks, rows)))
            two.wait()

        def pieces(out: bool) -> None:
            here, there = pieces_here, pieces_there
            torch._foreach_copy_(here if out else there, there if out else here, non_blocking=True)

        def queues(out: bool) -> None:
            for queue, own in ((two, slice(0, None, 2)), (second, slice(1, None, 2))):
                (queue.out if out else queue.into)(list(zip(blocks, rows))[own])
            second.wait()

        def staged(out: bool) -> None:
            if out:
                staging.copy_(pages[:, index].transpose(0, 1))
            for view, row in zip(views, flat):
                (view if out else row).copy_(row if out else view, non_blocking=True)
            if not out:
                pages[:, index] = staging.transpose(0, 1)

        def link(out: bool) -> None:
            for row in flat:  # one row again and again: what the link does with copies of a block's size
                (views[0] if out else row).copy_(row if out else views[0], non_blocking=True)

        for name, way in (
            ("link", link),
            ("2d", engines),
            ("2d, two queues", queues),
            ("layer pieces", pieces),
            ("staged", staged),
        ):
            for out in (True, False):
                taken = seconds(lambda way=way, out=out: way(out), device)  # type: ignore[misc]  # mypy: defaults
                say(bench="copy", way=name, to="host" if out else "pages", gb_s=total / taken / 1e9, blocks=count,
                    block_kb=size / 1e3)  # fmt: skip
    finally:
        memory.close()


def plain_disk(directory: Path, total: int, block: int) -> None:
    """GB/s of one large file: written and synchronised, read in large pieces, read past the page cache in pieces of a
    block's size at random places, and read again from the page cache."""
    large, path = 8 << 20, directory / "plain"
    directory.mkdir(exist_ok=True)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as f:
        for _ in range(total // large):
            f.write(bytes(large))
        os.fsync(f.fileno())
    say(bench="disk", what="write", gb_s=total / (time.perf_counter() - begin) / 1e9)
    total = total // large * large
    for what, size, threads, direct in (
        ("read", large, 8, False), ("read directly", block, READING_THREADS, True),
        ("read directly", large, 8, True), ("read from the page cache", large, 8, False),
    ):  # fmt: skip
        pieces = list(range(0, total - size + 1, size))
        random.Random(0).shuffle(pieces)
        local = threading.local()
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

        def read(at: int, size: int = size, file: int = file, local: Any = local) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = mmap.mmap(-1, size)
            os.preadv(file, [local.buffer], at)

        with ThreadPoolExecutor(threads) as pool:
            if what != "read from the page cache":
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            list(pool.map(read, pieces))
            taken = time.perf_counter() - begin
        if direct and size == large:
            with path.open("rb", buffering=0) as f:  # for what comes next
                while f.read(large):
                    pass
        os.close(file)
        say(bench="disk", what=what, piece_kb=size / 1e3, threads=threads, gb_s=len(pieces) * size / taken / 1e9)
    path.unlink()


def forget(directory: Path) -> None:
    """Drops the directory's files from the page cache."""
    for path in directory.rglob("*.kv"):
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def transfer(pages: Tensor, count: int, directory: Path) -> None:
    """GB/s of whole stores, restores, writes and reads, checksums included."""
    disk = Directory(directory, b"0" * 16, row_bytes([pages]))
    moved = Transfer([pages], count, disk)
    try:
        while moved.rows < count:
            time.sleep(0.01)
        names = [Name(i.to_bytes(16, "big"), bytes(16)) for i in range(count)]
        total = count * row_bytes([pages])
        blocks = random.Random(0).sample(range(pages.shape[1]), count)

        def until(kind: type, number: int) -> None:
            while number:
                moved.wait(1.0)
                for done in moved.poll():
                    assert getattr(done, "error", None) is None, done
                    number -= isinstance(done, kind)

        def timed(name: str, work: Callable[[], None], kind: type, number: int, *, cold: bool = False) -> None:
            for _ in range(2):
                if cold:
                    forget(directory)
                begin = time.perf_counter()
                work()
                until(kind, number)
                taken = time.perf_counter() - begin
            say(bench="transfer", what=name, gb_s=total / taken / 1e9, ms=taken * 1e3)

        stores = [(name, block, row) for row, (name, block) in enumerate(zip(names, blocks))]
        host = [Piece(name, row, block) for name, block, row in stores]
        timed("store", lambda: moved.store(stores), Stored, count)
        timed("restore", lambda: moved.restore(0, host), Restored, 1)

        def write() -> None:
            for row, name in enumerate(names):
                moved.write(name, row)

        timed("write", write, Written, count)
        files = [Piece(p.name, None, p.block) for p in host]
        timed("read", lambda: moved.restore(0, files), Restored, 1, cold=True)
        timed("read from the page cache", lambda: moved.restore(0, files), Restored, 1)
    finally:
        moved.close()


def first_token(engine: Engine, rid: int, prompt: list[int], keys: tuple[str, ...] = ()) -> tuple[float, int]:
    """(seconds until the request's first token, cached tokens); the request ends there."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit(Submit(rid, tuple(prompt), params, cache_keys=keys))
    begin, cached = time.perf_counter(), 0
    while True:
        for delta in engine.step():
            if delta.rid == rid:
                cached += delta.cached_tokens
                if delta.tokens:
                    taken = time.perf_counter() - begin
                    while engine.busy:
                        engine.step()
                    return taken, cached


def sessions(engine: Engine, context: int, count: int, vocab: int) -> None:
    """TTFT of sessions that continue, from host memory and computed."""
    rng = random.Random(1)
    texts = [[rng.randrange(vocab) for _ in range(context)] for _ in range(count)]
    cold = [first_token(engine, rid, text)[0] for rid, text in enumerate(texts)]
    found = []
    for turn in range(2):
        for rid, text in enumerate(texts):
            suffix = [rng.randrange(vocab) for _ in range(min(SUFFIX_TOKENS, context // 8))]
            found.append(first_token(engine, 100 * (turn + 1) + rid, [*text, *suffix]))
    computed = [
        first_token(engine, 900 + i, [*text, *text[: min(SUFFIX_TOKENS, context // 8)]], ("salt:other",))[0]
        for i, text in enumerate(texts[:2])
    ]
    stats = engine.stats()
    say(bench="session", context=context, cold_s=statistics.median(cold), ttft_s=statistics.median(f[0] for f in found),
        computed_s=statistics.median(computed), cached=[f[1] for f in found], tiers=str(stats.tiers),
        restore_s=stats.restore_seconds, saved_s=stats.saved_seconds, dropped=stats.blocks_dropped)  # fmt: skip


@dataclass
class Load:
    """What is copied beside steps, by one thread each way until `stop`; `moved` bytes out and in."""

    work: Callable[["Load", int], None]
    ways: tuple[int, ...]
    stop: threading.Event = field(default_factory=threading.Event)
    moved: list[int] = field(default_factory=lambda: [0, 0])

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Gives a list that gets GB/s out and in at the end."""
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
        """One copy of LARGE_BYTES after the other: hardly any call of the driver."""
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
        """As quickly as the driver takes them, in windows of which two are in flight."""
        self._blocks(load, way, WINDOW_BLOCKS, 0.0)

    def paced(self, share: float) -> Callable[[Load, int], None]:
        """As `windows`, at this share of the link's speed."""
        return lambda load, way: self._blocks(load, way, WINDOW_BLOCKS, self.block_seconds[way] / share)

    def calls(self, load: Load, way: int) -> None:
        """The calls of `windows`, without the driver: what the processor and Python's lock cost."""
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


def slowdown(engine: Engine, batch: int, context: int, vocab: int, steps: int) -> None:
    """Step time of `batch` requests that decode, beside copies of every kind, with the step's own small copies by
    kernels (mapped) and by copy engines; then the step's graph alone, on the device's clock. Each case has a quiet
    measurement of its own before it."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=60 * steps, ignore_eos=True)
    for rid in range(batch):
        engine.submit(Submit(5000 + rid, tuple(rng.randrange(vocab) for _ in range(context)), params))
    for _ in range(40):
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
        say(bench="slowdown", batch=batch, copies=name, ways="".join("oi"[w] for w in ways), own=own,
            quiet_ms=quiet * 1e3, busy_ms=busy * 1e3, slowdown=busy / quiet - 1,
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--context", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=100, help="that each case of the slowdown is measured for")
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, of %(default)s")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}: name some of {', '.join(PARTS)}")
    cuda = torch.cuda.is_available()
    context = args.context if cuda else 512
    with tempfile.TemporaryDirectory() as made:
        where = args.disk or Path(made)
        device = torch.device("cuda" if cuda else "cpu")
        block, blocks = (64, 4096) if cuda else (16, 256)
        count = context // block
        for width, dtype in ((640, torch.uint8), (576, torch.bfloat16)):
            pages = torch.zeros(args.layers, blocks, block, width, dtype=dtype, device=device)
            if "copies" in parts:
                copies(pages, count)
        if "disk" in parts:
            plain_disk(where, max(count * row_bytes([pages]), 64 << 20), row_bytes([pages]))
            transfer(pages, count, where / "blocks")
        del pages
        config: dict[str, Any] = {"max_num_seqs": 8, "kv_host_gb": 6.0 if cuda else 0.2, "seed": 1}
        config |= {
            "max_model_len": context + 4096 if cuda else 1024,
            "kv_blocks": int(2.4 * count) if cuda else 100,
            "block_size": block,
        }
        bench = Bench("kimi-k2.5", args.layers) if cuda and {"session", "slowdown"} & set(parts) else None
        tiers = [tier for tier in ("host", "disk") if "session" in parts or ("slowdown" in parts and tier == "host")]
        for tier in tiers:
            if tier == "disk":
                config |= {"kv_host_gb": 0.5 if cuda else 0.02, "kv_disk": str(where / "tier")}
            if bench is not None:
                engine, vocab = bench.engine(args.layers, **config), 160_000
            else:
                path = resolve_model("kimi-nano")
                engine, vocab = Engine(path, build(EngineConfig, {"draft": "off", **config})), 1000
            try:
                for batch in (1, 8) if tier == "host" and "slowdown" in parts else ():
                    slowdown(engine, batch, context // 16, vocab, args.steps if cuda else 2)
                if "session" in parts:
                    sessions(engine, context, 4, vocab)
            finally:
                engine.close()


if __name__ == "__main__":
    main()
