"""Verify steps and draft chains as CUDA graphs: the same answers, the same chains."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.engine.graphs.decode import MAX_ROWS, DecodeGraphs
from perilune.formats.hub import resolve_model
from tests.cpu.speculation.test_chained_steps import Trailing
from tests.cpu.speculation.test_speculation import PARAMS, PROMPTS, Recorder, Scripted, alike, drafter  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CONFIG: dict[str, Any] = dict(device="cuda", dtype="float32", max_model_len=256, max_num_seqs=8, kv_blocks=300)


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


def captured(llm: LLM) -> DecodeGraphs:
    graphs = llm._engine.runner.graphs  # type: ignore[union-attr]
    assert graphs is not None and graphs.broken is None and graphs._max_rows == MAX_ROWS
    return graphs


def params() -> list[SamplingParams]:
    given = [PARAMS[kind][i % len(PARAMS[kind])] for i, kind in enumerate([*PARAMS, "hot"])]
    return [replace(p, max_tokens=20 + 4 * i) for i, p in enumerate(given)]


@pytest.mark.parametrize("hostile", [False, True])
def test_answers_stay_the_same(tiny: Path, plain: LLM, hostile: bool) -> None:
    expected = plain.generate(PROMPTS, params())
    with LLM(tiny, **CONFIG, draft="off") as llm:
        for seed in range(3):
            scripted = Scripted([c.token_ids for c in expected], random.Random(seed) if hostile else None)
            llm._engine.speculator = scripted  # type: ignore[union-attr, assignment]
            alike(llm.generate(PROMPTS, params()), expected)
            assert scripted.accepted > 50
        assert len(captured(llm)._graphs) > 2


@pytest.mark.parametrize("hostile", [False, True])
def test_graphs_that_draw_say_the_same(tiny: Path, hostile: bool) -> None:
    """Requests that choose freely, through steps that are one graph each, against steps queued call by call."""
    kinds = [PARAMS[kind][1] if kind != "greedy" else PARAMS[kind][0] for kind in ("greedy", "hot", "filters")]
    free = [replace(kinds[i % 3], max_tokens=20 + 4 * i) for i in range(len(PROMPTS))]
    with LLM(tiny, **CONFIG, draft="off") as llm:
        graphs, llm._engine.runner.graphs = llm._engine.runner.graphs, None  # type: ignore[union-attr]
        expected = llm.generate(PROMPTS, free)
        llm._engine.runner.graphs = graphs  # type: ignore[union-attr]
        alike(llm.generate(PROMPTS, free), expected)
        for seed in range(3):
            scripted = Scripted([c.token_ids for c in expected], random.Random(seed) if hostile else None)
            llm._engine.speculator = scripted  # type: ignore[union-attr, assignment]
            alike(llm.generate(PROMPTS, free), expected)
            assert scripted.accepted > 50
        assert {key.whole for key in captured(llm)._graphs} == {True}


@pytest.mark.parametrize("draft, draft_tokens", [("suffix", None), ("eagle3", 3), ("hybrid", None)])
def test_the_engines_own_drafts(
    tiny: Path,
    plain: LLM,
    drafter: Path,  # noqa: F811
    draft: str,
    draft_tokens: int | None,
) -> None:
    expected = plain.generate(PROMPTS, params())
    with LLM(tiny, **CONFIG, draft=draft, draft_tokens=draft_tokens, drafter=str(drafter)) as llm:
        for _ in range(2):
            alike(llm.generate(PROMPTS, params()), expected)
        captured(llm)


def test_chains_behind_graphs_are_those_behind_steps(tiny: Path, plain: LLM, drafter: Path) -> None:  # noqa: F811
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    truths = [c.token_ids for c in plain.generate(PROMPTS, greedy)]
    chains = []
    for graphs in (False, True):
        config = CONFIG | dict(draft="eagle3", draft_tokens=4, drafter=str(drafter), prefix_cache=False)
        with LLM(tiny, **config) as llm:
            if not graphs:
                llm._engine.runner.graphs = None  # type: ignore[union-attr]
            recorder = Recorder(truths, random.Random(2))
            llm._engine.speculator = recorder  # type: ignore[union-attr, assignment]
            llm.generate(PROMPTS, greedy)
            chains.append(recorder.chains)
    assert chains[0].keys() == chains[1].keys() and len(chains[0]) > 30
    same = sum(chains[0][text] == chains[1][text] for text in chains[0])
    assert same >= 0.95 * len(chains[0])


@pytest.mark.parametrize("hostile", [False, True])
def test_steps_behind_drafts_say_the_same(tiny: Path, drafter: Path, hostile: bool) -> None:  # noqa: F811
    """Planned before their predecessors have landed, on chains written by hand."""
    kinds = [PARAMS[kind][1] if kind != "greedy" else PARAMS[kind][0] for kind in ("greedy", "hot", "filters")]
    free = [replace(kinds[i % 3], max_tokens=30 + 4 * i) for i in range(len(PROMPTS))]
    with LLM(tiny, **CONFIG, draft="eagle3", draft_tokens=4, drafter=str(drafter), prefix_cache=False) as llm:
        engine = llm._engine
        assert engine is not None
        engine.speculator = None
        expected = llm.generate(PROMPTS, free)
        for seed in range(3):
            trailing = Trailing([c.token_ids for c in expected], random.Random(seed) if hostile else None)
            trailing.attach(engine)
            alike(llm.generate(PROMPTS, free), expected)
            engine.scheduler.check_integrity()
            assert trailing.behind_steps > 5 and trailing.accepted > 30
        captured(llm)


def test_the_bundled_model_in_bfloat16_says_nearly_the_same() -> None:
    """bf16 kernels round differently for one token and for nine, so a close choice may turn."""
    prompts = ["What is 34 + 58?", "What is 912 - 77?", "Hello", "Count: 1 2 3 4 5 6 7 8"]
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    texts = []
    for draft in ("off", "suffix"):
        with LLM("kimi-nano", device="cuda", max_model_len=512, max_num_seqs=8, draft=draft) as llm:
            texts.append([llm.chat([{"role": "user", "content": p}], greedy).token_ids for p in prompts])
    assert resolve_model("kimi-nano").is_dir()
    assert sum(a == b for a, b in zip(*texts)) >= 3
