"""A server under load: tokens per second per user and in total, by the number of concurrent users.

A request is good if its first text came within one limit and its mean time between tokens is within the other; good
requests per second are the goodput. If the server's process id is known, the row has its CPU time, which is more
reliable than wall time on a shared machine.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bench.aa import EXTENDED, Prompts, fit
from perilune.bench.ledger import percentile
from perilune.bench.load import Client, Level, level
from perilune.client.endpoint import Endpoint, EndpointError
from perilune.core.errors import ConfigError

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of every user. `ttft_seconds`, `gap_seconds`: limits that a good request keeps."""

    prompt_tokens: int = 128
    output_tokens: int = 256
    rounds: int = 2
    ttft_seconds: float = 1.0
    gap_seconds: float = 0.05


async def sweep(
    endpoint: Endpoint,
    client: Client,
    streams: Sequence[int],
    load: Load,
    *,
    server_pid: int | None = None,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each number of users, the smallest first. EndpointError if for one of them no request succeeds."""
    length = fit(load.prompt_tokens, load.output_tokens, endpoint.max_model_len)
    prompts = Prompts(endpoint, length)
    await prompts.calibrate()
    options: dict[str, Any] = {"model": endpoint.model, "max_tokens": load.output_tokens}
    if endpoint.owner.lower() in EXTENDED:
        options["ignore_eos"] = True

    def body() -> Mapping[str, Any]:
        return {"messages": prompts.uncounted(), **options}

    warm = await client.ask(client.encode({**body(), "max_tokens": WARM_UP_TOKENS}))
    if warm.error:
        raise EndpointError(f"{endpoint.base} failed a first request: {warm.error}")
    rows = []
    for count in sorted(streams):
        total = count * load.rounds

        def done(ended: int, count: int = count, total: int = total) -> None:
            if total >= 10 and ended % (total // 4) == 0 and ended < total:
                report(f"{count} streams: {ended} of {total} requests")

        before = cpu_seconds(server_pid)
        found = await level(client, count, load.rounds, body, done)
        rows.append(summary(found, load, spent(before, cpu_seconds(server_pid))))
        report(describe(rows[-1]))
    return [
        {
            "bench": "serve",
            "model": endpoint.model,
            "asked_prompt_tokens": length,
            "asked_output_tokens": load.output_tokens,
            "max_ttft_ms": load.ttft_seconds * 1e3,
            "max_gap_ms": load.gap_seconds * 1e3,
            **row,
        }
        for row in rows
    ]


def summary(found: Level, load: Load, server_seconds: float | None) -> dict[str, Any]:
    """The figures of one level; EndpointError if none of its requests succeeded."""
    good = [t for t in found.timings if not t.error]
    if not good:
        raise EndpointError(f"all {len(found.timings)} requests failed: {found.timings[0].error}")
    tokens = sum(t.tokens for t in good)
    gaps = [gap for t in good for gap in t.gaps]
    kept = sum(t.first_text <= load.ttft_seconds and t.per_token <= load.gap_seconds for t in good)
    speeds = [1 / t.per_token for t in good if t.per_token]
    return {
        "streams": found.streams,
        "requests": len(found.timings),
        "failed": len(found.timings) - len(good),
        "tokens": tokens,
        "tokens_per_piece": round(tokens / sum(len(t.gaps) + 1 for t in good), 2),
        "tokens_per_s": round(tokens / found.seconds, 1),
        "tokens_per_s_user": round(statistics.median(speeds), 2) if speeds else None,
        "first_byte_ms": _ms(statistics.median(t.first_byte for t in good)),
        "ttft_p50_ms": _ms(statistics.median(t.first_text for t in good)),
        "ttft_p99_ms": _ms(percentile([t.first_text for t in good], 0.99)),
        "p50_gap_ms": _ms(percentile(gaps, 0.5)),
        "p99_gap_ms": _ms(percentile(gaps, 0.99)),
        "goodput_requests_per_s": round(kept / found.seconds, 3),
        "good_share": round(kept / len(found.timings), 4),
        "server_us_per_token": None if server_seconds is None else round(server_seconds / tokens * 1e6, 2),
        "client_us_per_token": round(found.cpu_seconds / tokens * 1e6, 2),
        "errors": sorted({t.error for t in found.timings if t.error})[:3],
    }


def describe(row: Mapping[str, Any]) -> str:
    server, user = row["server_us_per_token"], row["tokens_per_s_user"] or 0
    return (
        f"{row['streams']} streams: {row['tokens_per_s']:,.0f} tokens/s, {user:,.1f} per user, "
        f"first byte {row['first_byte_ms']:.1f} ms, first text {row['ttft_p50_ms']:.0f} ms (p99 "
        f"{row['ttft_p99_ms']:.0f}), gap p50 {row['p50_gap_ms']:.1f} ms, p99 {row['p99_gap_ms']:.1f}, "
        f"{row['tokens_per_piece']:.1f} tokens a piece, "
        f"{row['good_share']:.0%} within limits, CPU a token: "
        f"{'' if server is None else f'server {server:.1f} us, '}client {row['client_us_per_token']:.1f} us"
        + (f"; {row['failed']} FAILED: {row['errors'][0]}" if row["failed"] else "")
    )


def cpu_seconds(pid: int | None) -> float | None:
    """CPU seconds that a process has used so far, without its children. ConfigError if they cannot be read."""
    if pid is None:
        return None
    try:
        # The scheduler's own count in ns: /proc/PID/stat counts ticks of 10 ms.
        threads = [Path(f"{task}/schedstat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(text.split()[0]) for text in threads) / 1e9
    except OSError as e:
        raise ConfigError(f"cannot read the CPU time of process {pid}: {e.strerror}; check --server-pid") from e


def spent(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
