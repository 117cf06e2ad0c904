"""Time of sending a step to other ranks: rank 0 encodes its plan and sends it, the others read it.

The other processes only read plans, as engine/rank.py does; there is no model. Every plan is a decode step of `batch`
requests, made just before it is sent, as by the scheduler; block tables grow like those of real steps.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perilune.core.errors import EngineError
from perilune.core.sampling import SamplingParams
from perilune.core.step import PENDING, StepPlan, Work
from perilune.engine.order_ring import SPIN_SECONDS, OrderReader, OrderWriter
from perilune.engine.plan_wire import Order, Reader, Writer

STEPS = 300
STEP_SECONDS = 0.004  # between two plans: a step of a large model
BLOCK_TOKENS = 64


def measure(
    ranks: int, batches: Sequence[int], report: Callable[[str], None], *, polling: bool
) -> list[dict[str, Any]]:
    """One row per batch size. `polling`: ranks poll for plans, as they do with GPUs, instead of sleeping."""
    rows = []
    for batch in batches:
        send, arrive, read = _times(ranks, batch, polling)
        row = {
            "bench": "orders",
            "tp": ranks,
            "batch": batch,
            "polling": polling,
            "send_us": round(send * 1e6, 1),
            "arrive_us": round(arrive * 1e6, 1),
            "read_us": round(read * 1e6, 1),
        }
        rows.append(row)
        report(
            f"{ranks} ranks, batch {batch:>3}: rank 0 encodes and sends a step in {row['send_us']:6.1f} us; decoded on "
            f"the last rank {row['arrive_us']:6.1f} us after rank 0 began, {row['read_us']:5.1f} us of it decoding"
        )
    return rows


def _times(ranks: int, batch: int, polling: bool) -> tuple[float, float, float]:
    """(sending, from its begin until the slowest rank has the plan, decoding there): medians, seconds."""
    ring = OrderWriter(lambda: None)
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    readers = []
    for ours, theirs in pairs:
        command = [
            sys.executable,
            "-m",
            "perilune.bench.ranks.orders",
            *map(str, (ring.fd, ring.add(ours), theirs.fileno())),
        ]
        readers.append(
            subprocess.Popen(
                [*command, str(SPIN_SECONDS if polling else 0.0)],
                pass_fds=(ring.fd, theirs.fileno()),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        theirs.close()
    writer, sent, took = Writer(), list[float](), list[float]()
    try:
        for process in readers:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise EngineError("a reading process did not start")
        plans = _plans(batch)
        for _ in range(STEPS):
            until = time.perf_counter() + STEP_SECONDS
            while time.perf_counter() < until:
                pass  # busy-wait, as rank 0 does for the GPU's step
            plan = next(plans)
            begin = time.perf_counter()
            ring.send(writer.plan(plan))
            took.append(time.perf_counter() - begin)
            sent.append(begin)
        ring.send(writer.order(Order("close")))
        outs = [process.communicate(timeout=60)[0].split() for process in readers]
    finally:
        for process in readers:
            process.kill()
            process.wait()
        for ours, _ in pairs:
            ours.close()
        ring.close()
    at, decoding = zip(*(([float(t) for t in out[::2]], [float(t) for t in out[1::2]]) for out in outs))
    arrive = [max(times) - begin for begin, *times in zip(sent, *at, strict=True)]
    return statistics.median(took), statistics.median(arrive), max(statistics.median(times) for times in decoding)


def _plans(batch: int) -> Iterator[StepPlan]:
    params = [SamplingParams(temperature=0.0) for _ in range(batch)]
    tables = [tuple(range(32 * i, 32 * i + 8)) for i in range(batch)]
    series = list(range(1, batch + 1))  # as the scheduler numbers them
    for step in range(STEPS):
        for i in range(batch):
            if (step + i) % BLOCK_TOKENS == 0:
                tables[i] = (*tables[i], step)
                series[i] += batch
        work = [
            Work(i, i, 500 + step, (PENDING,), tables[i], True, step, params[i], i, left=STEPS - step, series=series[i])
            for i in range(batch)
        ]
        yield StepPlan(step, tuple(work))


def main() -> None:
    ring, number, wake, spin = sys.argv[1:]
    orders = OrderReader(int(ring), int(number), socket.socket(fileno=int(wake)), float(spin))
    reader, found = Reader(), []
    print("ready", flush=True)
    while True:
        body = orders.next()
        begin = time.perf_counter()
        order = reader.order(body)
        if order.kind == "close":
            break
        reader.plan(order)
        end = time.perf_counter()
        found.append(f"{end:.9f} {end - begin:.9f}")
    print("\n".join(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
