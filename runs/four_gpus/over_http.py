"""Parts that send requests to a private server, as users would."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from perilune.bench import aa, ledger
from perilune.client.endpoint import Endpoint, EndpointError
from perilune.client.target import serving
from perilune.core.config import EngineConfig, build
from runs.four_gpus.setting import CACHED_SHARE, DECODING, Setting

BEGIN_SECONDS = 120.0  # limit of the time until all users have their first token
ANSWER_TOKENS = 16  # tokens of an answer for TTFT. Among fewer random tokens, perhaps none has text
LONG_PROMPTS = 3  # sent one after the other while users decode
SHORT_PROMPTS = 8  # likewise

Row = dict[str, Any]


def options(setting: Setting, start: str) -> list[str]:
    """Arguments of `perilune serve` for a start."""
    return [word for key, value in setting.engine(start).items() for word in ("--set", f"{key}={value}")]


async def rows(path: Path, setting: Setting, start: str, parts: str) -> AsyncGenerator[Row, None]:
    """The rows of these parts, each as soon as it is measured; the first says how long the server took to start."""
    begin = time.perf_counter()
    async with serving(str(path), options(setting, start)) as url, Endpoint(url) as endpoint:
        started = time.perf_counter() - begin
        common = setting.keys() | {"shape": setting.shape, "layers": setting.layers, "kv_layout": "replicated"}
        common |= {"kv_dtype": setting.kv_dtype, "rest_dtype": "fp8", "expert_format": "int4-compact"}
        common |= {"decode_stretch": build(EngineConfig, setting.engine(start)).decode_stretch}
        common |= {"start_s": round(started, 1), "model": endpoint.model, **endpoint.marks}
        if setting.shape is not None:
            common["layers"] = setting.depth
        for part in parts:
            async for row in _firsts(endpoint, setting) if part == "e" else _protocol(endpoint, setting):
                row = common | {"part": part} | row | ledger.circumstances()
                yield row | {"gpus": setting.tp if row["gpus"] else 0}


async def _protocol(endpoint: Endpoint, setting: Setting) -> AsyncGenerator[Row, None]:
    sizes = setting.sizes
    row = await aa.measure(
        endpoint, prompt_tokens=sizes.prompt, output_tokens=sizes.answer, runs=sizes.rounds, parallel=1,
        ignore_eos=True, thinking=None, report=print,
    )  # fmt: skip
    name = "output_tokens_per_s" + ("" if "acceptance" in endpoint.marks or setting.model else " plain")
    yield row | {"figure": name, "measured": row["output_tokens_per_s"]}


async def _firsts(endpoint: Endpoint, setting: Setting) -> AsyncGenerator[Row, None]:
    sizes = setting.sizes
    prompts = aa.Prompts(endpoint, sizes.prompt)
    await prompts.calibrate()
    cold, cached, shares = list[float](), list[float](), list[float]()
    for _ in range(sizes.rounds):
        messages = await prompts.new()
        cold.append((await first_token(endpoint, messages))[0])
        seconds, share = await first_token(endpoint, _other_end(messages))
        cached.append(seconds)
        shares.append(share)
    common = {
        "bench": "aa",
        "asked_prompt_tokens": sizes.prompt,
        "asked_output_tokens": ANSWER_TOKENS,
        "samples": sizes.rounds,
    }
    common["method"] = "time from sending a streamed request to its first token, medians"
    for name, times, share in (("cold", cold, 0.0), ("cached", cached, statistics.median(shares))):
        ttft = round(statistics.median(times), 4)
        row = {"ttft_s": ttft, "cached_share": round(share, 4), "figure": f"ttft_s {name}", "measured": ttft}
        yield common | row
    async for row in _while_decoding(endpoint, setting):
        yield common | row


async def first_token(endpoint: Endpoint, messages: list[dict[str, Any]]) -> tuple[float, float]:
    """(seconds until the first token of a streamed answer, share of the prompt that the cache had)."""
    first, share, sent = 0.0, 0.0, time.perf_counter()
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    async with contextlib.aclosing(endpoint.stream(body)) as stream:
        async for chunk in stream:
            if chunk.events and not first:
                first = chunk.at - sent
            if chunk.usage is not None:
                share = (chunk.usage.cached or 0) / chunk.usage.prompt
    if not first:
        raise EndpointError("the endpoint streamed an answer without any token")
    return first, share


def _other_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt of the same length of which CACHED_SHARE, from the beginning, is the same text."""
    text = str(messages[0]["content"])
    kept = int(CACHED_SHARE * len(text))
    (other,) = aa.ask(len(text), "the other end")
    return [{"role": "user", "content": text[:kept] + str(other["content"])[kept - len(text) :]}]


async def _while_decoding(endpoint: Endpoint, setting: Setting) -> AsyncGenerator[Row, None]:
    """Times of prompts to their first tokens while DECODING users decode, and the users' pace meanwhile."""
    short, long = aa.Prompts(endpoint, setting.sizes.short), aa.Prompts(endpoint, setting.sizes.prompt)
    await short.calibrate()
    await long.calibrate()
    gaps, begun = list[float](), [asyncio.Event() for _ in range(DECODING)]

    async def user(number: int, messages: list[dict[str, Any]]) -> None:
        most = setting.sizes.prompt + setting.sizes.answer - setting.sizes.short  # what the context has room for
        body = {"messages": messages, "max_tokens": most, "ignore_eos": True}
        before = None
        async with contextlib.aclosing(endpoint.stream(body)) as stream:
            async for chunk in stream:
                if before is not None:
                    gaps.append(chunk.at - before)
                before = chunk.at
                begun[number].set()

    users = [asyncio.create_task(user(i, await short.new())) for i in range(DECODING)]
    try:
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), BEGIN_SECONDS)
        for kind, count in ((short, SHORT_PROMPTS), (long, LONG_PROMPTS)):
            asked = [await kind.new() for _ in range(count)]
            gaps.clear()
            times = list[float]()
            for messages in asked:
                await asyncio.sleep(setting.sizes.every_seconds)
                times.append((await first_token(endpoint, messages))[0])
            if ended := sum(task.done() for task in users):
                raise EndpointError(f"{ended} of {DECODING} users' answers ended before the prompts did")
            row = _pace(kind.tokens, times, sorted(gaps)) | {"every_s": setting.sizes.every_seconds}
            if kind is long:
                row |= {"figure": f"p99 over median of {DECODING} over HTTP", "measured": row["p99_over_median"]}
            yield row
    finally:
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)


def _pace(tokens: int, times: list[float], gaps: list[float]) -> Row:
    """The row of prompts of `tokens` tokens. times: seconds to first tokens; gaps: seconds between pieces of users'
    answers, sorted; a piece may hold several tokens."""
    if not gaps:
        raise EndpointError("no user's answer went on while prompts were computed")
    median, p99 = statistics.median(gaps), gaps[int(0.99 * len(gaps))]
    ttft, over = round(statistics.median(times), 4), round(p99 / median, 3)
    return {
        "asked_prompt_tokens": tokens, "decoding": DECODING, "samples": len(times), "ttft_s": ttft,
        "ttft_min_s": round(min(times), 4), "ttft_max_s": round(max(times), 4), "intervals": len(gaps),
        "interval_median_ms": round(1e3 * median, 3), "interval_p99_ms": round(1e3 * p99, 3), "p99_over_median": over,
        "figure": f"ttft_s beside {DECODING}", "measured": ttft,
    }  # fmt: skip
