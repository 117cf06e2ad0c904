"""What moving KV costs on this machine, at Kimi K2.5's shapes with random weights: the copies, restoring a session
against computing it, and how much steps slow down meanwhile. Without a GPU: the same on kimi-nano, to try the script.

python -m runs.kv_transfer [--layers 9 --context 60000 --disk DIR]. Each line is JSON.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from perilune.kv.transfer import Transfer, row_bytes

SUFFIX_TOKENS = 2242  # new tokens of a turn of an agent's session
REPEATS = 3


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
        two = copier([pages])

        def engines(out: bool) -> None:
            (two.out if out else two.into)(list(zip(blocks, rows)))
            two.wait()

        def pieces(out: bool) -> None:
            here, there = pieces_here, pieces_there
            torch._foreach_copy_(here if out else there, there if out else here, non_blocking=True)

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

        for name, way in (("link", link), ("2d", engines), ("layer pieces", pieces), ("staged", staged)):
            for out in (True, False):
                taken = seconds(lambda way=way, out=out: way(out), device)  # type: ignore[misc]  # mypy: defaults
                say(bench="copy", way=name, to="host" if out else "pages", gb_s=total / taken / 1e9, blocks=count,
                    block_kb=size / 1e3)  # fmt: skip
    finally:
        memory.close()


def plain_disk(directory: Path, total: int) -> None:
    """GB/s of one large file: written and synchronised, read from the disk, and read again from the page cache."""
    piece, path = bytes(8 << 20), directory / "plain"
    directory.mkdir(exist_ok=True)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as f:
        for _ in range(total // len(piece)):
            f.write(piece)
        os.fsync(f.fileno())
    say(bench="disk", what="write", gb_s=total / (time.perf_counter() - begin) / 1e9)
    for what in ("read", "read from the page cache"):
        with path.open("rb", buffering=0) as f, ThreadPoolExecutor(8) as pool:
            if what == "read":
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            list(pool.map(lambda at, f=f: os.pread(f.fileno(), len(piece), at), range(0, total, len(piece))))
            say(bench="disk", what=what, gb_s=total / (time.perf_counter() - begin) / 1e9)
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


def slowdown(engine: Engine, batch: int, context: int, vocab: int, steps: int) -> None:
    """Step time of `batch` requests that decode, quiet and while blocks that none of them has are copied both ways."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=4 * steps + 64, ignore_eos=True)
    for rid in range(batch):
        engine.submit(Submit(5000 + rid, tuple(rng.randrange(vocab) for _ in range(context)), params))
    for _ in range(40):
        engine.step()
    tree = engine.scheduler.blocks.tree
    spare = [tree.allocate() for _ in range(tree.num_free // 2)]
    pages = engine.runner.pages.data
    memory = HostMemory(2 * len(spare), row_bytes([pages]), block_bytes([pages]), pages.device, at_once=2 * len(spare))
    halves = spare[: len(spare) // 2], spare[len(spare) // 2 :]
    moved = [0, 0]
    stop = threading.Event()

    def copying(way: int) -> None:
        queue = copier([pages])
        pairs = [(block, memory.row(way * len(spare) + i)) for i, block in enumerate(halves[way])]
        while not stop.is_set():
            (queue.into if way else queue.out)(pairs)
            queue.wait()
            moved[way] += len(pairs)

    def timed() -> float:
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - begin)
        return statistics.fmean(sorted(taken)[: int(0.95 * steps)])

    quiet = [timed()]
    threads = [threading.Thread(target=copying, args=(way,)) for way in (0, 1)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    busy = timed()
    stop.set()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begin
    quiet.append(timed())
    size = row_bytes([pages])
    say(bench="slowdown", batch=batch, context=context, quiet_ms=[q * 1e3 for q in quiet], busy_ms=busy * 1e3,
        slowdown=busy / statistics.fmean(quiet) - 1, out_gb_s=moved[0] * size / wall / 1e9,
        in_gb_s=moved[1] * size / wall / 1e9)  # fmt: skip
    for rid in range(batch):
        engine.cancel(5000 + rid)
    while engine.busy:
        engine.step()
    tree.release(spare)
    memory.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--context", type=int, default=60_000)
    parser.add_argument("--disk", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    context = args.context if cuda else 512
    with tempfile.TemporaryDirectory() as made:
        where = args.disk or Path(made)
        device = torch.device("cuda" if cuda else "cpu")
        block, blocks = (64, 4096) if cuda else (16, 256)
        count = context // block
        for width, dtype in ((576, torch.bfloat16), (640, torch.uint8)):
            pages = torch.zeros(args.layers, blocks, block, width, dtype=dtype, device=device)
            copies(pages, count)
        plain_disk(where, max(count * row_bytes([pages]), 64 << 20))
        transfer(pages, count, where / "fp8")
        del pages
        config: dict[str, Any] = {"max_num_seqs": 8, "kv_host_gb": 6.0 if cuda else 0.2, "seed": 1}
        config |= {
            "max_model_len": context + 4096 if cuda else 1024,
            "kv_blocks": int(2.4 * count),
            "block_size": block,
        }
        bench = Bench("kimi-k2.5", args.layers) if cuda else None
        for tier in ("host", "disk"):
            if tier == "disk":
                config |= {"kv_host_gb": 0.5 if cuda else 0.02, "kv_disk": str(where / "tier")}
            if bench is not None:
                engine, vocab = bench.engine(args.layers, **config), 160_000
            else:
                path = resolve_model("kimi-nano")
                engine, vocab = Engine(path, build(EngineConfig, {"draft": "off", **config})), 1000
            try:
                sessions(engine, context, 4, vocab)
                for batch in (1, 8) if tier == "host" else ():
                    slowdown(engine, batch, context // 16, vocab, 300 if cuda else 10)
            finally:
                engine.close()


if __name__ == "__main__":
    main()
