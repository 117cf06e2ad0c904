"""Decode and verify steps of several ranks through the classes of CUDA graphs, running instead of replaying; and the
self-test of a graph when it is captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.errors import EngineError
from perilune.dist.group import ALONE
from perilune.engine import ranks
from perilune.engine.graphs.self_test import Probe, check
from perilune.engine.step_times.cost_table import capture_first
from tests.cpu.speculation.test_speculation import PROMPTS
from tests.multi.conftest import CONFIG
from tests.multi.graphed_rank import graphed


def test_answers_through_graphs_are_those_of_one_rank(monkeypatch: pytest.MonkeyPatch, one: LLM) -> None:
    monkeypatch.setattr(ranks, "RANK_MODULE", "tests.multi.graphed_rank")
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=12, seed=1),
        SamplingParams(temperature=0.9, top_p=0.9, seed=2),
        SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=1),
    ]
    ways = [replace(p, max_tokens=12, ignore_eos=True) for p in ways]
    with LLM("kimi-nano", **CONFIG, kv_blocks=64, draft="eagle3", draft_tokens=2, tp=2) as llm:
        assert llm._engine is not None
        graphs = graphed(llm._engine.runner, 320)
        capture_first(llm._engine.runner, llm._engine.config)
        assert {(key.requests, key.narrow) for key in graphs.keys} == {(n, b) for n in (1, 2, 3, 4, 6) for b in (0, 1)}
        for some in (slice(0, 2), slice(1, 3), slice(0, 4)):
            found = llm.generate(PROMPTS[some], ways[some])
            expected = one.generate(PROMPTS[some], ways[some])
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert {(key.whole, key.narrow) for key in graphs.keys} >= {(True, True), (True, False), (False, False)}


def test_a_graph_that_computes_something_else_is_an_error() -> None:
    hidden, logits = torch.randn(2, 8), torch.randn(2, 32)
    check(Probe(hidden, logits), Probe(hidden, logits * 1.001), ALONE, "a step")
    with pytest.raises(EngineError, match=r"self-test: the CUDA graph of a step gives logits that differ by \d+\.\d%"):
        check(Probe(hidden, logits), Probe(hidden, logits.roll(1)), ALONE, "a step")
    with pytest.raises(EngineError, match="self-test"):
        check(Probe(hidden, logits), Probe(hidden, torch.full_like(logits, torch.nan)), ALONE, "a step")


class Differing:
    """A group in which the other rank has another digest."""

    def gather(self, x: Any) -> Any:
        return torch.stack([x, torch.stack([x[0], x[1] + 1])])


def test_ranks_that_compute_different_things_are_an_error() -> None:
    same = Probe(torch.randn(2, 8), torch.randn(2, 32))
    with pytest.raises(EngineError, match="the ranks compute different hidden states"):
        check(same, same, Differing(), "a step")  # type: ignore[arg-type]
