"""Declared acceptance: steps bring so many tokens on average, on random weights alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.cli.shared.synthetic import directory
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Work
from perilune.engine.declared import Declared
from perilune.engine.engine import Engine
from perilune.engine.graphs.decode import DecodeGraphs
from perilune.text.tokenizer import Tokenizer
from tests.cpu.engine.test_graphs import Running
from tests.e2e.server import NANO


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with directory("tiny", 4) as path:
        yield path


def engine(path: Path, **config: Any) -> Engine:
    return Engine(path, EngineConfig(device="cpu", max_model_len=512, seed=1, threads=1, **config))


def run(e: Engine, requests: int, tokens: int, **params: Any) -> tuple[dict[int, list[int]], float, int]:
    """(tokens by request, tokens per verified step, tokens drafted)"""
    for rid in range(requests):
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, **params)
        e.submit(Submit(rid, tuple(range(5, 12 + rid)), sampling))
    got: dict[int, list[int]] = {rid: [] for rid in range(requests)}
    drafted = 0
    while e.busy:
        for delta in e.step():
            assert delta.error is None, delta
            got[delta.rid] += delta.tokens
            drafted += delta.drafted
    stats = e.stats()
    accepted = sum(a for *_, a in stats.drafts)
    return got, 1 + accepted / stats.verified if stats.verified else 1.0, drafted


@pytest.mark.parametrize(("declared", "drafts"), [(1.0, 1), (1.9, 3), (2.5, 2), (3.0, 2), (4.0, 3)])
def test_steps_bring_so_many_tokens_on_average(tiny: Path, declared: float, drafts: int) -> None:
    e = engine(tiny, declared_acceptance=declared, draft_tokens=drafts)
    try:
        assert e.info.synthetic == "random weights of tiny, 4 of 4 layers" and e.info.declared_acceptance == declared
        got, mean, drafted = run(e, 3, 121)
        assert all(len(tokens) == 121 for tokens in got.values())
        assert mean == pytest.approx(declared, abs=0.06)
        assert drafted > (drafts - 0.3) * 3 * 120 / declared  # every step verified so many
        e.scheduler.check_integrity()
    finally:
        e.close()


def test_graphs_bring_what_calls_bring(tiny: Path) -> None:
    """The classes of CUDA graphs, running: chained steps, and their positions on the device alone."""
    answers = []
    for graphs in (False, True):
        e = engine(tiny, declared_acceptance=2.5, draft_tokens=3)
        try:
            if graphs:
                recorder = Running(torch.device("cpu"))
                runner = e.runner
                runner.graphs = DecodeGraphs(
                    runner.model, runner.pages, runner.last_tokens, 512, recorder, declared=runner._declared
                )
                runner.follow(runner.drafter)
                assert runner.can_chain
            got, mean, _ = run(e, 3, 81)
            assert mean == pytest.approx(2.5, abs=0.06)
            assert not graphs or len(runner.graphs) > 0
            answers.append(got)
        finally:
            e.close()
    # The last step may have fewer drafts in one mode than in the other.
    assert all(answers[0][rid][:77] == answers[1][rid][:77] for rid in range(3))


def test_log_probabilities_are_those_of_the_tokens_that_count(tiny: Path) -> None:
    e = engine(tiny, declared_acceptance=2.0)
    try:
        assert e.config.draft_tokens == 1 and e.config.draft == "eagle3"
        e.submit(Submit(0, (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)))
        best = 0
        while e.busy:
            for delta in e.step():
                assert [r.token for r in delta.logprobs] == list(delta.tokens)
                best += sum(r.top[0][0] == r.token for r in delta.logprobs)
        assert 10 <= best < 25  # the drafts are not what the model would have said
    finally:
        e.close()


@pytest.mark.parametrize("mean", [1.0, 1.5, 1.93, 2.0, 3.3])
def test_the_grid_is_the_same_as_rows(mean: float) -> None:
    """`grid` then the op, against `rows` then what it allows, for requests of all widths at all positions."""
    g = torch.Generator().manual_seed(int(mean * 100))
    declared = Declared(mean, 64, torch.device("cpu"))
    B, m = 40, 5
    ids, sampled = torch.randint(0, 9, (B, m), generator=g), torch.randint(-1, 9, (B, m), generator=g)
    front = torch.randint(0, m, (B,), generator=g, dtype=torch.int32)
    positions = torch.randint(0, 60 - m, (B, 1), generator=g) + torch.arange(m)
    stop = torch.full((B,), m - 1, dtype=torch.int32)
    drawn, end = declared.grid(sampled.flatten(), ids.flatten(), positions.flatten(), front, stop)
    params = SamplingParams()
    work = tuple(
        Work(b, b, int(positions[b, f]), tuple(ids[b, f:].tolist()), (), True, 0, params, 0, drafts=m - 1 - f)
        for b, f in enumerate(front.tolist())
    )
    flat = torch.cat([sampled[b, f:] for b, f in enumerate(front.tolist())])
    tokens, allowed = declared.rows(flat.clamp_min(0), work, {})
    first = 0
    for b, w in enumerate(work):
        f, own = int(front[b]), tokens[first : first + w.count].tolist()
        first += w.count
        n = min(allowed.get(b, 0), w.drafts)
        assert int(end[b]) - f == n
        expected = [own[j] if sampled[b, f + j] >= 0 else -1 for j in range(w.count)]
        assert drawn.view(B, m)[b, f:].tolist() == expected
        assert own[:n] == list(w.draft_tokens[:n])


def test_it_is_refused_without_random_weights_or_a_draft_model(tiny: Path) -> None:
    for path, options, words in (
        (NANO, {}, "random weights"),
        (tiny, {"draft": "off"}, "needs the draft model"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine(path, declared_acceptance=2.0, **options)
    for options, words in (
        ({"declared_acceptance": 0.5}, "1 to 9"),
        ({"declared_acceptance": 3.5, "draft_tokens": 2}, "1 to 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(**options)


@pytest.mark.parametrize(
    ("name", "layers", "words"), [("kimi-k9", None, "kimi-k2.5, tiny"), ("tiny", 5, "has 4 layers")]
)
def test_shapes_that_do_not_exist(name: str, layers: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words), directory(name, layers):
        pass


def test_the_vocabulary_of_the_full_shape_round_trips() -> None:
    with directory("kimi-k2.5", 3) as path:
        tokenizer = Tokenizer.from_directory(path)
        assert tokenizer.vocab_size == 163_840 and not (path / "drafter").exists()
        text = "Grüße, w7 and w12345: 你好 <|im_end|>"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode([9, 100_000])[-7:] == " w100000"[-7:]
        assert 163_586 in tokenizer.stop_ids
    assert not path.exists()
