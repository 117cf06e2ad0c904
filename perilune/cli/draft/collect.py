"""`perilune draft collect`: the target answers prompts."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from perilune.cli.shared import display, options, targets
from perilune.client.endpoint import Endpoint
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError
from perilune.core.sampling import SamplingParams
from perilune.draft.capture import Capture
from perilune.draft.collect import Answers, Decoded, Forced, Plan, about, asked, collect
from perilune.draft.corpus import Corpus, Shard
from perilune.draft.prompts import Chats, Problems, Source, Topics
from perilune.draft.shards import alone
from perilune.draft.topics import DOMAINS
from perilune.engine.llm import LLM
from perilune.engine.resolve import Choices, resolve_device, resolve_dtypes
from perilune.formats.hub import resolve_model
from perilune.loading.load import load
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.tasks.problem import SEED

TOKEN_BYTES = 4
CAPTURED = 65536  # tokens per forward pass
ASKED = 64  # requests to a server at once


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--out", type=options.OUT_FOLDER, required=True, help="Directory of the corpus.")
@click.option(
    "--chats",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSONL file of conversations: MODEL answers every turn.  [default: generated problems of the training split]",
)
@click.option(
    "--topics",
    metavar="LIST",
    help=f"Ask about topics, a comma-separated list of {', '.join(DOMAINS)}, or all; for models that know the world.",
)
@click.option("--rows", type=click.IntRange(1), default=40_000, help="Answers, at most.")
@click.option("--shard-rows", type=click.IntRange(1), default=8192, help="Answers per file.")
@click.option(
    "--minutes",
    type=options.FloatRange(0),
    default=0.0,
    show_default=False,
    help="Minutes after which no file is begun.  [default: no limit]",
)
@click.option("--max-tokens", type=click.IntRange(4), default=1024, help="Tokens of an answer, at most.")
@click.option("--seed", type=int, default=SEED, help="Seed of problems and of sampled answers.")
@click.option("--workers", type=click.IntRange(0), help="Processes that make prompts.  [default: CPUs - 1, at most 16]")
@click.option(
    "--forced",
    is_flag=True,
    help="Do not decode: keep the problems' known answers as far as MODEL, greedy, says the same. Faster.",
)
@click.option("--url", help="Server of MODEL that answers (perilune serve, or vLLM).  [default: this process]")
@targets.target_options
@options.engine_options("device", "max_num_seqs", "max_model_len")
def command(
    model: str,
    out: Path,
    chats: Path | None,
    topics: str | None,
    rows: int,
    shard_rows: int,
    minutes: float,
    max_tokens: int,
    seed: int,
    workers: int | None,
    forced: bool,
    url: str | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    **engine: Any,
) -> None:
    """Have MODEL answer prompts, half greedily and half at temperature 1, as training rows of a drafter.

    Repeat the same command to go on where it stopped. With --url a server answers, --max-num-seqs prompts at a time,
    and MODEL is the directory that it serves: prompts are rendered here. The last line of output is JSON.
    """
    access.require_server(url is not None, "address with --url")
    path = resolve_model(model)
    if chats is not None and topics is not None:
        raise ConfigError("--chats and --topics are two sources: give one of them")
    source = _source(path, seed, chats, topics)
    if workers is None:
        workers = min(16, (os.cpu_count() or 1) - 1)
    if forced and not isinstance(source, Problems):
        raise ConfigError("--forced needs answers that are known, which only generated problems have: leave it out")
    plan = Plan(rows, shard_rows, max_tokens, seed, minutes, workers, forced)
    click.get_current_context().with_resource(alone(out))
    corpus = Corpus(out, about(source, plan, path))
    limit = source.limit()
    wanted = rows if limit is None else min(rows, limit)
    free = shutil.disk_usage(out).free
    worst = max(wanted - asked(corpus, shard_rows), 0) * (max_tokens + 1024) * TOKEN_BYTES
    click.echo(
        f"{wanted:,} answers of up to {max_tokens} tokens: at most about {worst / 1e9:.2f} GB to write, "
        f"{free / 1e9:.1f} GB free; {sum(s.rows for s in corpus.shards):,} are there",
        err=True,
    )
    if worst > free:
        raise ConfigError(f"{out} has no room for the corpus: lower --rows or --max-tokens")
    began = time.monotonic()
    # Large batches gain nothing by speculation.
    values = options.engine_values(engine, assignments, {} if url is not None else {"draft": "off"})
    remote = None if url is None else access.endpoint(url)
    with (
        _answers(path, plan, values) if remote is None else _served(remote, path, plan, values) as answers,
        display.progress() as bar,
    ):
        task = bar.add_task("answers", total=wanted, completed=asked(corpus, shard_rows))
        before = len(corpus.shards)

        def done(shard: Shard) -> None:
            bar.advance(task, shard.prompts)
            click.echo(
                f"{shard.file}: {shard.rows} rows, {shard.answers} tokens of answers, {time.monotonic() - began:.1f} s",
                err=True,
            )

        collect(answers, source, plan, corpus, done=done)
    record = {
        "rows": sum(s.rows for s in corpus.shards),
        "tokens": sum(s.tokens for s in corpus.shards),
        "answer_tokens": sum(s.answers for s in corpus.shards),
        "new_answer_tokens": sum(s.answers for s in corpus.shards[before:]),
        "seconds": round(time.monotonic() - began, 1),
    }
    click.echo(json.dumps({"draft": "collect", "model": path.name, "out": str(out), **record}))


def _source(model: Path, seed: int, chats: Path | None, topics: str | None) -> Source:
    if chats is not None:
        return Chats(model, chats)
    if topics is not None:
        return Topics(model, seed, tuple(DOMAINS) if topics == "all" else tuple(topics.split(",")))
    return Problems(model, seed)


@contextlib.contextmanager
def _answers(path: Path, plan: Plan, values: dict[str, Any]) -> Iterator[Answers]:
    if not plan.forced:
        with LLM(path, **values) as llm:
            yield Decoded.by(llm, plan)
        return
    config = build(EngineConfig, values)
    choices = Choices([])
    device = resolve_device(config, choices)
    _, dtype, _ = resolve_dtypes(config, device, choices)
    target, weights = load(path, dtype=dtype, device=device, progress=sys.stderr.isatty())
    model = KimiK2(target, weights, max_positions=config.max_model_len or target.max_position_embeddings)
    yield Forced(Capture(model, (), tokens=CAPTURED), plan)


@contextlib.contextmanager
def _served(endpoint: Endpoint, path: Path, plan: Plan, values: dict[str, Any]) -> Iterator[Answers]:
    if plan.forced:
        raise ConfigError("--forced reads answers instead of asking for them: leave out --url")
    if other := sorted(values.keys() - {"max_num_seqs"}):
        raise ConfigError(f"{', '.join(other)} configure an engine here, but {endpoint.base} answers: leave them out")
    config = KimiConfig.from_directory(path)
    at_once = asyncio.Semaphore(values.get("max_num_seqs") or ASKED)

    async def one(prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        # Every parameter for which the server may have another default.
        body = {"temperature": params.temperature, "top_p": 1.0, "top_k": -1, "seed": params.seed}
        async with at_once:
            ids = await endpoint.continued(prompt, {**body, "max_tokens": params.max_tokens})
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise ConfigError(f"{endpoint.base} answers with tokens that {path} does not have: it serves another model")
        return ids

    async def all_of(prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
        asked = [asyncio.ensure_future(one(*pair)) for pair in zip(prompts, params)]
        try:
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()

    with asyncio.Runner() as runner:
        runner.run(endpoint.__aenter__())
        try:
            yield Decoded(
                lambda prompts, params: runner.run(all_of(prompts, params)),
                endpoint.max_model_len or config.max_position_embeddings,
                plan,
            )
        finally:
            runner.run(endpoint.__aexit__())
