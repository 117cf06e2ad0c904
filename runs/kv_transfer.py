"""What moving KV costs on this machine, at Kimi K2.5's shapes with random weights: the copies, restoring a session
against computing it, and how much steps slow down meanwhile. Without a GPU: the same on kimi-nano, to try the script.

python -m runs.kv_transfer [--layers 9 --context 60000 --disk DIR --ledger bench/results]. Each line is JSON. With
--ledger each is also a row of DIR/kv.jsonl, written when it is measured: what copies and files reach of the link and of
the disk (`fraction` of `link_gb_s` or `disk_gb_s`, measured in the same run with pieces of a block's size),
`ttft_p50_s` beside `ttft_p50_no_tiers_s`, and `decode_slowdown`.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import ledger
from perilune.bench.decode import expert_format
from perilune.bench.microscope import Bench
from perilune.core.config import EngineConfig, build
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.formats.hub import resolve_model
from perilune.kv.copier import block_bytes, copier
from perilune.kv.disk import Directory
from perilune.kv.host_memory import HostMemory
from perilune.kv.mover import Name, Piece, Restored, Stored, Written
from perilune.kv.transfer import READING_THREADS, Transfer, row_bytes
from runs.kv_beside_steps import Say, slowdown

SUFFIX_TOKENS = 2242  # new tokens of a turn of an agent's session
REPEATS = 3
WIDTHS = {"fp8": (640, torch.uint8), "bfloat16": (576, torch.bfloat16)}  # KV elements per token and layer, their type
PARTS = ("copies", "disk", "session", "slowdown")


class Rows:
    """Prints rows as JSON and adds each to the ledger at once, so that a run that is killed keeps its rows.

    common  keys of every row
    """

    def __init__(self, directory: Path | None, common: dict[str, Any]) -> None:
        self._directory, self._circumstances, self.common = directory, ledger.circumstances(), common

    def say(self, part: str, **row: Any) -> None:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        whole = {"bench": "kv", "part": part} | self.common | rounded
        print(json.dumps(whole), flush=True)
        if self._directory is not None:
            ledger.append([whole | self._circumstances], self._directory)


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


def copies(say: Say, pages: Tensor, count: int, *, link_only: bool) -> dict[str, float]:
    """GB/s of four ways to move `count` blocks at random places, each way. Returns GB/s of the link itself, with copies
    of a block's size, to "host" and to "pages"."""
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
            for row in flat:  # the same row each time: the link's speed with copies of a block's size
                (views[0] if out else row).copy_(row if out else views[0], non_blocking=True)

        ways: list[tuple[str, Callable[[bool], None]]] = [
            ("link", link),
            ("2d", engines),
            ("2d, two queues", queues),
            ("layer pieces", pieces),
            ("staged", staged),
        ]
        reached: dict[str, float] = {}
        for name, way in ways[:1] if link_only else ways:
            for out in (True, False):
                taken = seconds(lambda way=way, out=out: way(out), device)  # type: ignore[misc]  # mypy: defaults
                to, gb_s = "host" if out else "pages", total / taken / 1e9
                most = reached.setdefault(to, gb_s)  # the link comes first
                say("copies", way=name, to=to, gb_s=gb_s, link_gb_s=most, fraction=gb_s / most, blocks=count,
                    block_kb=size / 1e3)  # fmt: skip
        return reached
    finally:
        memory.close()


def plain_disk(say: Say, directory: Path, total: int, block: int) -> dict[str, float]:
    """GB/s of one large file: written and synchronised, read in large pieces, read past the page cache in pieces of a
    block's size at random places, and read again from the page cache. Returns the speeds to compare files of blocks
    with, by operation."""
    large, path = 8 << 20, directory / "plain"
    directory.mkdir(exist_ok=True)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as f:
        for _ in range(total // large):
            f.write(bytes(large))
        os.fsync(f.fileno())
    reached = {"write": total / (time.perf_counter() - begin) / 1e9}
    say("disk", what="write", gb_s=reached["write"], piece_kb=large / 1e3, threads=1)
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
            with path.open("rb", buffering=0) as f:  # fills the page cache for the next measurement
                while f.read(large):
                    pass
        os.close(file)
        gb_s = len(pieces) * size / taken / 1e9
        say("disk", what=what, piece_kb=size / 1e3, threads=threads, gb_s=gb_s)
        if size == block:
            reached["read"] = gb_s
        elif what.endswith("cache"):
            reached[what] = gb_s
    path.unlink()
    return reached


def forget(directory: Path) -> None:
    """Drops the directory's files from the page cache."""
    for path in directory.rglob("*.kv"):
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def transfer(say: Say, pages: Tensor, count: int, directory: Path, most: dict[str, float]) -> None:
    """GB/s of whole stores, restores, writes and reads, checksums included; `most`: speeds of the link and the disk, by
    operation."""
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
            gb_s = total / taken / 1e9
            say("transfer", what=name, gb_s=gb_s, ms=taken * 1e3, fraction=gb_s / most[name], blocks=count,
                block_kb=row_bytes([pages]) / 1e3,
                **{"link_gb_s" if name in ("store", "restore") else "disk_gb_s": most[name]})  # fmt: skip

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


def sessions(say: Say, engine: Engine, context: int, count: int, vocab: int) -> None:
    """TTFT of sessions that continue, from the tiers and computed."""
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
    restored, without = statistics.median(f[0] for f in found), statistics.median(computed)
    say("session", context=context, sessions=count, tiers="+".join(name for name, _, _, limit in stats.tiers if limit),
        cold_s=statistics.median(cold), ttft_p50_s=restored, ttft_p50_no_tiers_s=without, ratio=without / restored,
        cached=[f[1] for f in found], hit_tokens={name: hits for name, hits, _, _ in stats.tiers},
        restore_s=stats.restore_seconds, saved_s=stats.saved_seconds, dropped=stats.blocks_dropped)  # fmt: skip


def engine_rows(rows: Rows, args: argparse.Namespace, where: Path, parts: list[str], count: int) -> None:
    """Parts "slowdown" and "session", of engines with host memory and with a disk. `count`: blocks of a session."""
    cuda, layers, context, block = torch.cuda.is_available(), args.layers, args.context, args.block
    config: dict[str, Any] = {"max_num_seqs": 8, "kv_host_gb": 6.0 if cuda else 0.2, "seed": 1}
    config |= {
        "max_model_len": context + 4096 if cuda else 1024,
        "kv_blocks": int(2.4 * count) if cuda else 100,
        "block_size": block,
    }
    bench = Bench("kimi-k2.5", layers) if cuda else None
    for tier in ("host", "disk") if "session" in parts else ("host",):
        if tier == "disk":
            config |= {"kv_host_gb": 0.5 if cuda else 0.012, "kv_disk": str(where / "tier")}
        if bench is not None:
            engine, vocab = bench.engine(layers, **config), 160_000
        else:
            path = resolve_model("kimi-nano")
            engine, vocab = Engine(path, build(EngineConfig, {"draft": "off", **config})), 1000
            rows.common.pop("layers", None)
        rows.common |= {"kv_dtype": engine.config.kv_dtype, "rest_dtype": engine.config.dtype}
        rows.common |= {"expert_format": expert_format(engine.runner.model)}
        try:
            for batch in (1, 8) if tier == "host" and "slowdown" in parts else ():
                slowdown(rows.say, engine, batch, context // 16, vocab, args.steps)
            if "session" in parts:
                sessions(rows.say, engine, context, 4, vocab)
        finally:
            engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--context", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=100, help="that each case of the slowdown is measured for")
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, of %(default)s")
    parser.add_argument("--ledger", type=Path, help="also append each row to DIR/kv.jsonl (bench/results)")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}: name some of {', '.join(PARTS)}")
    cuda = torch.cuda.is_available()
    if not cuda:
        args.context, args.steps = min(args.context, 512), min(args.steps, 2)
    args.block, blocks = (64, 4096) if cuda else (16, 256)
    count = args.context // args.block
    common: dict[str, Any] = {"shape": "kimi-k2.5"} if cuda else {}
    common |= {"layers": args.layers, "tp": 1, "ep": 1, "exchange": "none", "kv_layout": "replicated"}
    rows = Rows(args.ledger, common)
    with tempfile.TemporaryDirectory() as made:
        where = args.disk or Path(made)
        where.mkdir(parents=True, exist_ok=True)
        device = torch.device("cuda" if cuda else "cpu")
        for kv_dtype, (width, dtype) in WIDTHS.items() if {"copies", "disk"} & set(parts) else ():
            rows.common["kv_dtype"] = kv_dtype
            pages = torch.zeros(args.layers, blocks, args.block, width, dtype=dtype, device=device)
            link = copies(rows.say, pages, count, link_only="copies" not in parts)
            if "disk" in parts and kv_dtype == "bfloat16":
                size = row_bytes([pages])
                most = plain_disk(rows.say, where, max(count * size, 64 << 20 if cuda else 16 << 20), size)
                most |= {"store": link["host"], "restore": link["pages"]}
                transfer(rows.say, pages, count, where / "blocks", most)
            del pages
        if {"session", "slowdown"} & set(parts):
            engine_rows(rows, args, where, parts, count)


if __name__ == "__main__":
    main()
