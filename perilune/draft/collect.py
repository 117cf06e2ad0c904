"""Makes training rows of the target's answers to prompts: half of them greedy, half at temperature 1.

If a generator knows the answer, `Forced` makes greedy rows faster: the target reads prompt and expected answer in one
pass. Up to the first token at which its likeliest token differs from the expected one, greedy decoding would give the
same tokens.
"""

import hashlib
import itertools
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from perilune.core.interpreter import end_with_parent
from perilune.core.sampling import SamplingParams
from perilune.draft.capture import Capture
from perilune.draft.corpus import Corpus, Row, Shard
from perilune.draft.prompts import Prompt, Source
from perilune.engine.llm import LLM
from perilune.formats import checksums
from perilune.formats.checkpoint import INDEX
from perilune.formats.progress import progress

JOB = 256  # prompts that a worker makes at a time
LOGIT_ROWS = 8192  # rows of logits computed at a time. Larger: more memory
LEAST_ANSWER = 3  # least tokens of an answer in which a chain can begin


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to collect. After `minutes` no further shard is begun; 0: no limit."""

    rows: int
    shard_rows: int
    max_tokens: int
    seed: int
    minutes: float = 0.0
    workers: int = 0  # other processes that make prompts; 0: this one makes them
    forced: bool = False


def about(source: Source, plan: Plan, model: Path) -> dict[str, object]:
    """Identifies a corpus: everything that its rows depend on, but not their number."""
    return {
        **source.about(),
        "families": list(source.families),
        "model": fingerprint(model),
        "shard_rows": plan.shard_rows,
        "max_tokens": plan.max_tokens,
        "answers": "forced" if plan.forced else plan.seed,
    }


class Answers(Protocol):
    """Makes rows of prompts; `first` is the number of the first prompt."""

    def __call__(self, prompts: Sequence[Prompt], first: int) -> list[Row]: ...


Generate = Callable[[Sequence[tuple[int, ...]], Sequence[SamplingParams]], list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answers decoded by an engine, in this process or behind a server. `generate` returns their token ids."""

    generate: Generate
    max_model_len: int
    plan: Plan

    @classmethod
    def by(cls, llm: LLM, plan: Plan) -> "Decoded":
        def generate(prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
            return [answer.token_ids for answer in llm.generate(prompts, params)]

        return cls(generate, llm.info.max_model_len, plan)

    def __call__(self, prompts: Sequence[Prompt], first: int) -> list[Row]:
        params = [_params(self.plan, first + i) for i in range(len(prompts))]
        room = [len(p.ids) + LEAST_ANSWER < self.max_model_len for p in prompts]
        asked = [(p, q) for p, q, fits in zip(prompts, params, room) if fits]
        answers = self.generate([p.ids for p, _ in asked], [q for _, q in asked])
        return [Row(p.ids + ids, len(p.ids), p.family, q.temperature == 0) for (p, q), ids in zip(asked, answers)]


@dataclass(frozen=True, slots=True)
class Forced:
    """The expected answers, each up to the first token that the target would not have chosen; the target's token there
    ends the answer."""

    capture: Capture
    plan: Plan

    def __call__(self, prompts: Sequence[Prompt], first: int) -> list[Row]:
        texts = [p.ids + p.expected[: self.plan.max_tokens] for p in prompts]
        model = self.capture.model
        ends = list(itertools.accumulate(map(len, texts)))
        rows: list[Row] = []
        begin = 0
        while begin < len(texts):
            count = self.capture.rows_that_fit([len(t) for t in texts[begin:]])
            hidden = self.capture(texts[begin : begin + count]).hidden
            at = ends[begin] - len(texts[begin])
            read = [
                ends[i] - at - n
                for i in range(begin, begin + count)
                for n in range(len(texts[i]) - len(prompts[i].ids) + 1, 1, -1)
            ]
            rows_read = torch.split(hidden[torch.tensor(read, device=hidden.device)], LOGIT_ROWS)
            said = iter(torch.cat([model.logits(some).argmax(-1) for some in rows_read]).tolist())
            for i in range(begin, begin + count):
                ids = list(prompts[i].ids)
                # Take every token from the iterator, also those after the row's end.
                answer = [(token, next(said)) for token in texts[i][len(ids) :]]
                for token, spoken in answer:
                    ids.append(spoken)
                    if spoken != token:
                        break
                rows.append(Row(tuple(ids), len(prompts[i].ids), prompts[i].family, True))
            begin += count
        return rows


def collect(
    answers: Answers, source: Source, plan: Plan, corpus: Corpus, *, done: Callable[[Shard], None] = lambda shard: None
) -> None:
    """Adds the shards that `corpus` lacks. A row depends only on its prompt's number, so a killed run can be continued,
    and one that has ended with more rows."""
    began = time.monotonic()
    limit = source.limit()
    rows = plan.rows if limit is None else min(plan.rows, limit)
    starts = range(asked(corpus, plan.shard_rows), rows, plan.shard_rows)
    sizes = [min(plan.shard_rows, rows - start) for start in starts]
    for start, prompts in zip(starts, _ahead(source, list(zip(starts, sizes)), plan.workers)):
        made = answers(prompts, start)
        done(corpus.add([row for row in made if len(row.ids) - row.given >= LEAST_ANSWER], len(prompts)))
        if plan.minutes and time.monotonic() - began > plan.minutes * 60:
            break


def asked(corpus: Corpus, shard_rows: int) -> int:
    """Prompts that the corpus was made of. The last shard of a run may have fewer than `shard_rows`."""
    return sum(shard.prompts or shard_rows for shard in corpus.shards)


def _params(plan: Plan, number: int) -> SamplingParams:
    if number % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=plan.max_tokens)
    seed = int.from_bytes(hashlib.blake2b(f"{plan.seed}:{number}".encode(), digest_size=7).digest(), "big")
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=plan.max_tokens)


def _ahead(source: Source, shards: list[tuple[int, int]], workers: int) -> Iterator[list[Prompt]]:
    """The prompts of each (start, rows), made while earlier ones are answered."""
    if not workers:
        for start, count in shards:
            yield source.prompts(start, count)
        return
    # Spawned, not forked: this process has threads, and perhaps uses CUDA. Workers would outlive it if it is killed.
    spawn, end = multiprocessing.get_context("spawn"), (signal.SIGKILL, os.getpid())
    pool = ProcessPoolExecutor(workers, spawn, end_with_parent, end)
    jobs = itertools.chain.from_iterable(
        [(at, min(JOB, start + count - at)) for at in range(start, start + count, JOB)] for start, count in shards
    )
    most = 2 * max(workers, -(-max((count for _, count in shards), default=0) // JOB))
    queued: deque[Future[list[Prompt]]] = deque()
    try:
        for _, count in shards:
            prompts: list[Prompt] = []
            while len(prompts) < count:
                while len(queued) < most and (job := next(jobs, None)) is not None:
                    queued.append(pool.submit(source.prompts, *job))
                prompts += queued.popleft().result()
            yield prompts
    finally:
        pool.shutdown(cancel_futures=True)


def fingerprint(model: Path) -> str:
    """A digest of the target's configuration, vocabulary and weights: another checkpoint gives other answers. Reads all
    bytes: training changes neither names nor sizes of files."""
    known = ("config.json", INDEX, "tiktoken.model", *sorted(file.name for file in model.glob("*.safetensors")))
    names = [name for name in known if (model / name).is_file()]
    with progress(f"reading {model.name}", checksums.nbytes(model, dict.fromkeys(names, "")), True) as advance:
        sums = checksums.in_threads(lambda name, read: checksums.sha256(model / name, read), names, advance)
    return hashlib.sha256(repr([*zip(names, sums)]).encode()).hexdigest()
