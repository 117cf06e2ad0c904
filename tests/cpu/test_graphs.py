"""What decode and verify graphs are fed and what is read from them: the same classes, running instead of replaying.

Captures themselves need a GPU: tests/gpu/test_speculation.py.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.engine.graphs import DecodeGraphs, Replay, Run
from tests import oracle
from tests.cpu.test_speculation import CONFIG, PARAMS, PROMPTS, TIGHT, Recorder, Scripted, alike, drafter  # noqa: F401


class Uncaptured(DecodeGraphs):
    """Replays by running."""

    keys: set[tuple[Any, ...]]

    def _record(self, work: Callable[[], None]) -> Replay:
        work()
        return work

    def run(self, plan: Any) -> Run | None:
        found = super().run(plan)
        assert found is not None, self.broken
        self.keys = getattr(self, "keys", set()) | {found.key}
        return found


def ungraphed(llm: LLM) -> Uncaptured:
    runner = llm._engine.runner  # type: ignore[union-attr]
    graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, llm.config.max_model_len or 0)
    runner.graphs = graphs
    runner.follow(runner.drafter)
    return graphs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.make(tmp_path_factory.mktemp("tiny") / "model").path


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Any:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


@pytest.mark.parametrize("setting", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("draft", ["off", "hostile", "perfect"])
def test_answers_through_graphs_are_those_without(tiny: Path, plain: LLM, setting: dict[str, Any], draft: str) -> None:
    params = [PARAMS[kind][i % len(PARAMS[kind])] for i, kind in enumerate([*PARAMS, "hot"])]
    params = [replace(p, max_tokens=20 + 4 * i) for i, p in enumerate(params)]
    expected = plain.generate(PROMPTS, params)
    with LLM(tiny, **(CONFIG | setting), draft="off") as llm:
        graphs = ungraphed(llm)
        if draft != "off":
            rng = random.Random(1) if draft == "hostile" else None
            llm._engine.speculator = Scripted([c.token_ids for c in expected], rng)  # type: ignore[union-attr, assignment]
        alike(llm.generate(PROMPTS, params), expected)
        sizes = {key[1] for key in graphs.keys}
        assert sizes == {1} if draft == "off" else len(sizes) > 1 and max(sizes) == 9
        assert len({key[0] for key in graphs.keys}) > 1


def test_chains_behind_graphs_are_those_behind_steps(tiny: Path, plain: LLM, drafter: Path) -> None:  # noqa: F811
    params = SamplingParams(temperature=0.0, max_tokens=20)
    truths = [c.token_ids for c in plain.generate(PROMPTS, params)]
    config = CONFIG | dict(draft="eagle3", draft_tokens=4, drafter=str(drafter), prefix_cache=False)
    chains = []
    for graphs in (False, True):
        with LLM(tiny, **config) as llm:
            if graphs:
                ungraphed(llm)
            recorder = Recorder(truths, random.Random(2))
            llm._engine.speculator = recorder  # type: ignore[union-attr, assignment]
            llm.generate(PROMPTS, params)
            chains.append(recorder.chains)
    assert chains[0].keys() == chains[1].keys() and len(chains[0]) > 30
    same = sum(chains[0][text] == chains[1][text] for text in chains[0])
    assert same >= len(chains[0]) - 2  # float32 in another order may turn a close choice
