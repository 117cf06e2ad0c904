"""Measures step times before an engine's first request: drafts are chosen by this table (speculation/step_cost.py)."""

import dataclasses
import hashlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from perilune.core.config import EngineConfig
from perilune.core.files import read_regular
from perilune.core.sampling import SamplingParams
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan, Work
from perilune.engine.graphs.decode import rounded_up
from perilune.engine.runner import Runner
from perilune.ops.harness import build
from perilune.speculation import step_cost

KEPT_SECONDS = 7 * 86_400  # A table is measured again after a week: the machine may have been busy the first time.
KEPT_TABLES = 32  # on disk, one per model and configuration; the oldest are deleted first

log = logging.getLogger("perilune.engine")

GREEDY = SamplingParams(temperature=0.0)
# Prompts that are timed, besides one of max_step_tokens. More: a slower start. Fewer: the first short prompts wait for
# kernels to be loaded, 1.6 s for one of 16 tokens.
PROMPT_TOKENS = (16, 64, 256, 1024, 4096)
# Graphs for 1 to 8 requests are captured at start. More: a slower start. Fewer: more steps wait 0.3 s or more for a
# capture.
FIRST_REQUESTS = 8


def measure_costs(runner: Runner, config: EngineConfig) -> step_cost.Costs:
    """Seconds of steps of this runner, by their size. Overwrites the cache, which must be empty.

    On a CPU, where measuring takes longer than the rest of a start, the table is kept on disk for KEPT_SECONDS. Its key
    is a digest of the model's and the engine's configuration, the kernels and the processor.
    """
    if runner.pages.data.device.type != "cpu":
        return time_steps(runner, config)
    path = build.cache_directory("costs") / f"{_digest(runner, config)}.json"
    try:
        if time.time() - path.stat().st_mtime < KEPT_SECONDS:
            return msgspec.json.decode(read_regular(path), type=step_cost.Costs)
    except (OSError, msgspec.DecodeError):
        pass  # no file, or a damaged one: measure again
    costs = time_steps(runner, config)
    try:
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(costs))
        scratch.replace(path)
        kept = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-KEPT_TABLES]:
            old.unlink(missing_ok=True)
    except OSError as e:
        log.info("the measured costs of steps are not kept: %s", e)
    return costs


def _digest(runner: Runner, config: EngineConfig) -> str:
    """A digest of everything that step times depend on."""
    files = sorted(p for p in build.SOURCES.rglob("*") if p.suffix in (".py", ".cpp", ".h"))
    sources = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    # Left out: they differ from start to start, and step times do not depend on them.
    config = replace(config, kv_blocks=None, seed=None)
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    parts = (runner.model.config, config, runner.drafter is not None, torch.__version__, processors, build.processor())
    kinds = [_kind(leaf) for leaf in _leaves(runner.model.weights)]
    return hashlib.sha256(repr((parts, kinds, sources)).encode()).hexdigest()[:24]


def _kind(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]


def _leaves(value: Any) -> Iterator[Any]:
    """The types of nested dataclasses, and their tensors and other values."""
    if dataclasses.is_dataclass(value):
        yield value.__class__
        for f in dataclasses.fields(value):
            yield from _leaves(getattr(value, f.name))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def time_steps(runner: Runner, config: EngineConfig) -> step_cost.Costs:
    """As measure_costs, without the file."""
    assert config.max_step_tokens and config.max_model_len and config.kv_blocks and config.block_size
    begin = time.perf_counter()
    max_requests = max(min(config.max_num_seqs, config.kv_blocks // 2), 1)
    held = config.kv_blocks * config.block_size
    context = min(config.max_model_len, held) - MAX_DRAFTS - 1
    table = step_cost.measure(
        _Timer(runner, config),
        max_requests=max_requests,
        # If a request has no room for a token of context and all drafts, the largest steps end at its last position.
        max_tokens=config.max_step_tokens if context > 0 else min(config.max_step_tokens, config.max_model_len - 1),
        max_context=max(context, 1),
        drafter=runner.drafter is not None,
        can_chain=runner.can_chain,
    )
    log.info("costs measured in %.1f s: %s", time.perf_counter() - begin, table)
    return table


def capture_first(runner: Runner, config: EngineConfig) -> None:
    """Captures and self-tests the graphs of steps in which 1 to FIRST_REQUESTS requests decode, and the draft model's,
    so that the first requests do not wait for captures. Overwrites the KV cache, which must be empty."""
    if runner.graphs is None:
        return
    assert config.kv_blocks
    chain = 0 if runner.drafter is None else min(config.draft_tokens or 1, runner.drafter.longest)
    most = min(FIRST_REQUESTS, config.max_num_seqs, config.kv_blocks)
    timer = _Timer(runner, config)
    for requests in sorted({rounded_up(n) for n in range(1, most + 1)} & set(range(1, most + 1))):
        timer((1,) * requests, 1, chain)


def measure_prompts(runner: Runner, config: EngineConfig, record: Callable[[int, float], None]) -> None:
    """Calls `record(tokens, seconds)` for steps that compute a prompt. Only on GPUs: on a CPU it would take longer than
    the rest of a start, and seconds are nearly proportional to tokens. Overwrites the KV cache, which must be empty."""
    if runner.pages.data.device.type == "cpu" or not config.decode_stretch:
        return
    assert config.max_step_tokens and config.max_model_len and config.kv_blocks and config.block_size
    most = min(config.max_step_tokens, config.max_model_len - 1, config.kv_blocks * config.block_size)
    timer = _Timer(runner, config)
    for tokens in (*(n for n in PROMPT_TOKENS if n < most), most):
        timer.prompt(tokens)  # loads kernels
        record(tokens, timer.prompt(tokens))


class _Timer:
    """A step_cost.Timer. If the pool has too few blocks, requests share them: the time does not depend on contents."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        assert config.block_size and config.kv_blocks
        self._runner = runner
        self._block_size = config.block_size
        self._num_blocks = config.kv_blocks
        self._random = random.Random(0)
        self._cleared = 0

    def __call__(self, counts: Sequence[int], context: int, chain: int = 0, steps: int = 1) -> float:
        return self._runner.call(self._time, counts, context, chain, steps)

    def prompt(self, tokens: int) -> float:
        """Seconds of a step that computes one prompt."""
        return self._runner.call(self._time, (tokens,), 0, LEFT_OUT, 1, False)

    def _time(self, counts: Sequence[int], context: int, chain: int, steps: int, drafts: bool = True) -> float:
        """`drafts`: a request's tokens after the first are drafts; else all are tokens of a prompt."""
        each = -(-(context + max(counts)) // self._block_size)
        self._clear(min(each * len(counts), self._num_blocks))
        vocabulary = self._runner.model.config.vocab_size
        work = tuple(
            Work(
                rid=i,
                slot=i,
                start=context,
                tokens=tuple(self._random.randrange(vocabulary) for _ in range(count)),
                blocks=tuple((i * each + b) % self._num_blocks for b in range(each)),
                sample=True,
                output_index=0,
                params=GREEDY,
                seed=0,
                left=count,
                drafts=count - 1 if drafts else 0,
            )
            for i, count in enumerate(counts)
        )
        begin = time.perf_counter()
        before = None
        for _ in range(steps):  # like the engine, queue a step before the result of the previous one is read
            queued = self._runner.run(self._runner.ordered(StepPlan(0, work, chain), "time"))
            if before is not None:
                before.wait().result()
            before = queued
        assert before is not None
        before.wait().result()
        return (time.perf_counter() - begin) / steps

    def _clear(self, blocks: int) -> None:
        """Zeroes the first blocks: CPUs are slow with the denormal numbers that fresh memory may hold."""
        if blocks > self._cleared:
            self._runner.zero(blocks)
            self._cleared = blocks
