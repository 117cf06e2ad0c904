"""What the server costs a token: `perilune serve` on a scripted engine, asked by the client of `bench serve`.

    python -m runs.host_cost [--streams 1,64] [--step-ms 0] [--ledger bench/results]

The engine computes nothing, so this measures the server's process: detokenizer, parsers, JSON, HTTP. The first line is
the scheduler's time per step of 64 requests.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from perilune.bench import ledger, serve
from perilune.bench.load import Client
from perilune.bench.planning import Mode, planning_us
from perilune.client.endpoint import Endpoint
from perilune.client.target import run
from tests.scripted_engine import command

PLANNED_REQUESTS = 64
MODES: tuple[Mode, ...] = ("plain", "drafts", "chained")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--streams", default="1,64", help="users at once, separated by commas")
    p.add_argument("--rounds", type=int, default=2, help="requests of each user")
    p.add_argument("--output-tokens", type=int, default=1500, help="tokens of an answer")
    p.add_argument("--step-ms", default="0", help="time of a step; 0: as fast as the server takes them")
    p.add_argument("--ledger", type=Path, help="also append the rows to LEDGER/serve.jsonl")
    o = p.parse_args()
    for mode in MODES:
        print(
            f"planner, {PLANNED_REQUESTS} requests, {mode}: {planning_us(PLANNED_REQUESTS, mode):.0f} us a step",
            file=sys.stderr,
        )
    server = subprocess.Popen(
        command("--step-ms", o.step_ms, "serve", "kimi-nano", "--port", "0"), stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        address = next((m[1] for line in server.stderr if (m := re.match(r"curl (http://[^/]+)/v1", line))), None)
        if address is None:
            sys.exit("the server did not start")
        rows = run(measure(address, server.pid, o))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    if o.ledger is not None:
        ledger.append(rows, o.ledger)
    for row in rows:
        print(json.dumps(row))


async def measure(address: str, pid: int, o: argparse.Namespace) -> list[dict[str, Any]]:
    load = serve.Load(prompt_tokens=64, output_tokens=o.output_tokens, rounds=o.rounds)
    async with Endpoint(address) as endpoint:
        client = Client(endpoint.base, api_key=None, timeout=60)
        streams = [int(n) for n in o.streams.split(",")]
        rows = await serve.sweep(
            endpoint, client, streams, load, server_pid=pid, report=lambda line: print(line, file=sys.stderr)
        )
    about = {"engine": "scripted", "step_ms": float(o.step_ms), **ledger.circumstances()}
    return [{**row, **about} for row in rows]


if __name__ == "__main__":
    main()
