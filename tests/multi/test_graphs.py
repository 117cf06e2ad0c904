"""Decode and verify steps of several ranks through the classes of CUDA graphs, running instead of replaying; and the
self-test of a graph when it is captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.errors import EngineError
from perilune.core.step import MAX_DRAFTS
from perilune.dist.group import ALONE
from perilune.engine import build, ranks
from perilune.engine.graphs.decode import CHAIN_COLUMN
from perilune.engine.graphs.self_test import Probe, check, check_chains
from perilune.engine.step_times.cost_table import capture_first
from tests.cpu.engine.test_graphs import Running, Uncaptured
from tests.cpu.speculation.test_speculation import PROMPTS
from tests.multi.conftest import CONFIG
from tests.multi.graphed_rank import graphed, joined


def test_answers_through_graphs_are_those_of_one_rank(monkeypatch: pytest.MonkeyPatch, one: LLM) -> None:
    monkeypatch.setattr(ranks, "RANK_MODULE", "tests.multi.graphed_rank")
    monkeypatch.setattr(build, "join", joined)
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
        assert {key.requests for key in graphs.keys} == {1, 2, 3, 4, 6}
        assert graphs.recorder.longest_test_seconds > 0
        for some in (slice(0, 2), slice(1, 3), slice(0, 4)):
            found = llm.generate(PROMPTS[some], ways[some])
            expected = one.generate(PROMPTS[some], ways[some])
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert {key.whole for key in graphs.keys} == {True, False}


def test_a_graph_that_computes_something_else_is_an_error() -> None:
    hidden, logits = torch.randn(2, 8), torch.randn(2, 32)
    check(Probe(hidden, logits), Probe(hidden, logits * 1.001), ALONE, "a step")
    with pytest.raises(EngineError, match=r"self-test: the CUDA graph of a step gives logits that differ by \d+\.\d%"):
        check(Probe(hidden, logits), Probe(hidden, logits.roll(1)), ALONE, "a step")
    with pytest.raises(EngineError, match="self-test"):
        check(Probe(hidden, logits), Probe(hidden, torch.full_like(logits, torch.nan)), ALONE, "a step")


def test_a_graph_of_chains_that_drafts_something_else_is_an_error() -> None:
    eager = torch.tensor([[5.0, 6.0, 7.0, 0.5, 0.4, 0.3], [8.0, 9.0, 1.0, 0.9, 0.8, 0.7]]).double()
    tie = eager.clone()
    tie[1, 1:3], tie[1, 4:] = torch.tensor([2.0, 3.0]), torch.tensor([0.75, 0.01])  # as likely as 9; then anything
    check_chains(eager, tie, ALONE, "chains")
    for column, value in ((4, 0.2), (5, torch.nan)):
        wrong = eager.clone()
        wrong[0, column] = value
        with pytest.raises(EngineError, match="self-test: the CUDA graph of chains gives probabilities that differ by"):
            check_chains(eager, wrong, ALONE, "chains")


class Twice(Running):
    """A chain's replay finds other probabilities than the run that was recorded."""

    out: torch.Tensor

    def record(self, work: Any, name: str) -> Any:
        super().record(work, name)
        return lambda: (work(), self.out[:, 2:].mul_(0.5)) if name.startswith("chains") else work()


def test_the_first_replay_of_a_chain_is_compared() -> None:
    with LLM("kimi-nano", **CONFIG, kv_blocks=64, draft="eagle3", draft_tokens=2) as llm:
        assert llm._engine is not None
        runner = llm._engine.runner
        recorder = Twice(runner.last_tokens.device)
        runner.graphs = graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, 320, recorder)
        recorder.out = graphs._out[:1, CHAIN_COLUMN:].view(1, -1)[:, MAX_DRAFTS - 2 :]
        graphs.follow(runner.drafter)
        with pytest.raises(EngineError, match="self-test: the CUDA graph of chains of 2"):
            llm.generate("Once upon", SamplingParams(temperature=0.0, max_tokens=8))


class Differing:
    """A group in which the other rank has another digest."""

    def gather(self, x: Any) -> Any:
        return torch.stack([x, torch.stack([x[0], x[1] + 1])])


def test_ranks_that_compute_different_things_are_an_error() -> None:
    same = Probe(torch.randn(2, 8), torch.randn(2, 32))
    with pytest.raises(EngineError, match="the ranks compute different hidden states"):
        check(same, same, Differing(), "a step")  # type: ignore[arg-type]
