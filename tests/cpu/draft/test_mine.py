"""Mining: what chains lose, which windows are learnt again and with what weight, and that training heeds it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from perilune.cli.draft.group import command
from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft.batch import Batch
from perilune.draft.capture import Captured
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Corpus, Row
from perilune.draft.mine import GAP, HEAVIEST, LIGHTEST, Rule, Scored, mine, of_records, windows_of
from perilune.draft.mine_group import group, names
from perilune.draft.mine_score import score
from perilune.draft.prompts import Problems
from perilune.draft.trainee import Trainee
from perilune.formats.hub import resolve_model
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.speculation.rejection_log import Record, RejectedLog, Rejection
from runs.kimi_nano.mining_setting import BASE, PART, SETTINGS, parts
from runs.kimi_nano.mining_table import compare
from tests.cpu.draft.test_draft import drafts_config, some_rows
from tests.cpu.model.eagle3_equations import Plain
from tests.cpu.model.test_eagle3 import TARGET, D, V
from tests.cpu.speculation.test_rejection_log import step

LENGTH = 3


class Told:
    """Stands in for a Capture: features and final states by text."""

    def __init__(self, states: dict[tuple[int, ...], tuple[Tensor, Tensor]]) -> None:
        self.states = states

    def rows_that_fit(self, lengths: list[int]) -> int:
        return min(len(lengths), 3)

    def __call__(self, texts: list[tuple[int, ...]]) -> Captured:
        aux, hidden = zip(*(self.states[t] for t in texts))
        return Captured(torch.cat(aux), torch.cat(hidden))


def guesses(plain: Plain, aux: Tensor, known: list[int]) -> list[int]:
    """The chain behind `known`, a draft at a time; aux of all of them but the last."""
    g, tokens = plain.features(aux[: len(known) - 1]), known[1:]
    for _ in range(LENGTH):
        logits, after = plain(g, torch.tensor(tokens))
        tokens = [*tokens, int(logits[-1].argmax())]
        g = torch.cat([g, after[-1:]])
    return tokens[-LENGTH:]


def test_losses_are_those_of_chains_drafted_one_by_one() -> None:
    config = KimiConfig.from_dict(TARGET)
    weights = random_weights(config, dtype=torch.float32, device="cpu")
    assert weights.lm_head.format == "dense"
    head = weights.lm_head.weight
    raw, draft = drafts_config(config)
    trainee = Trainee(draft, weights.embed, head, seed=3)
    plain = Plain(
        raw, dict(trainee.named_parameters()) | {"embed_tokens.weight": weights.embed, "lm_head.weight": head}
    )
    rng, generator = Random(4), torch.Generator().manual_seed(4)
    rows, states, expected = [], {}, []
    with torch.no_grad():
        for n in range(7):
            aux, given = torch.randn(40, 3 * D, generator=generator), rng.randrange(1, 6)
            ids = [rng.randrange(V) for _ in range(given + 1)]
            while len(ids) < given + 4 + 2 * n:  # often what the draft says, so that chains stand
                ids += guesses(plain, aux, ids)[: rng.randrange(4)] or [rng.randrange(V)]
            # The target's likeliest token is mostly the true one.
            likeliest = [t if rng.random() < 0.8 else rng.randrange(V) for t in ids[1:]] + [0]
            hidden = torch.linalg.lstsq(head, torch.eye(V)[likeliest].T * 50).solution.T
            likeliest = (hidden @ head.T).argmax(-1).tolist()
            lost = []
            for known in range(given + 1, len(ids)):
                truth = ids[known : known + LENGTH]
                ends = []
                for chain in (guesses(plain, aux, ids[:known]), likeliest[known - 1 : known - 1 + LENGTH]):
                    ends.append(next((i for i, (c, t) in enumerate(zip(chain, truth)) if c != t), len(truth)))
                lost.append(max(ends[1] - ends[0], 0))
            rows.append(Row(tuple(ids), given, 0, True))
            states[tuple(ids)] = aux[: len(ids)], hidden
            expected.append(tuple(lost))
    short = Row((1, 2, 3), 2, 0, True)
    told: Any = Told(states)
    done: list[int] = []
    found = score(trainee, told, [short, *rows], LENGTH, chains=20, advance=done.append)
    assert found == [(), *expected] and sum(done) == len(rows)
    values = {x for lost in expected for x in lost}
    assert values >= {0, 1, 2}, "the cases must tell something"


def scored_at_random(rng: Random, domain: int = 0, chance: float = 0.1) -> Scored:
    given, answer = rng.randrange(1, 9), rng.randrange(LEAST_ANSWER, 60)
    row = Row(tuple(rng.randrange(1000) for _ in range(given + answer)), given, 5, True)
    lost = [
        (rng.choice([1.0, 2.0, 3.0]) if rng.random() < chance else rng.choice([0.0, None])) for _ in range(answer - 1)
    ]
    return Scored(row, tuple(lost), domain)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_windows_hold_every_loss_once_with_all_that_precedes_it(after: int) -> None:
    rng, count = Random(after), 0
    for _ in range(300):
        scored = scored_at_random(rng, domain=2)
        row = scored.row
        losing = {row.given + c for c, lost in enumerate(scored.lost) if lost}
        found = windows_of(scored, after)
        count += len(found)
        for window in found:
            own = window.row
            assert own.ids == row.ids[: len(own.ids)] and own.family == 2 and own.greedy
            assert own.given >= row.given and len(own.ids) - own.given >= LEAST_ANSWER
            begins = range(own.given, own.given + window.taught)
            mine_ = sorted(losing & set(begins))
            # Behind the last loss there is enough for its whole chain, if the text goes on.
            assert len(own.ids) >= min(mine_[-1] + 1 + after, len(row.ids))
            assert all(b - a <= GAP for a, b in itertools.pairwise(mine_) if b < own.given + window.taught - after)
        assert sum(w.lost for w in found) == sum(x or 0 for x in scored.lost)
        assert losing <= {b for w in found for b in range(w.row.given, w.row.given + w.taught)}
    assert count > 300


def a_pool() -> list[Scored]:
    """Domain 0 loses much and is rare, 1 loses little and is frequent, 2 loses nothing."""
    rng = Random(0)
    pool = [scored_at_random(rng, 0, 0.3) for _ in range(40)] + [scored_at_random(rng, 1, 0.1) for _ in range(160)]
    return pool + [scored_at_random(rng, 2, 0.0) for _ in range(20)]


def test_windows_are_shared_out_by_loss_and_frequency() -> None:
    pool, labels = a_pool(), ("rare", "frequent", "perfect")
    shares = {}
    for focus, balance in ((2.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        windows, domains = mine(pool, labels, Rule(400, focus=focus, balance=balance, guard=0.0, seed=1))
        shares[focus, balance] = [d.share for d in domains]
        assert sum(d.share for d in domains) == pytest.approx(1) and domains[2].kept == domains[2].share == 0
        assert len(windows) == sum(d.kept for d in domains)
        for d in domains[:2]:
            own = [w for w in windows if labels[w.row.family] == d.name]
            assert sum(w.taught for w in own) == d.taught
            assert d.taught - max(w.taught for w in own) < d.share * 400 <= d.taught
            assert d.weight * d.taught == pytest.approx(d.share * 400, rel=0.1)
    rare, frequent = (sum(x or 0 for s in pool if s.domain == i for x in s.lost) for i in (0, 1))
    chains = [sum(x is not None for s in pool if s.domain == i for x in s.lost) for i in (0, 1)]
    rates = rare / chains[0], frequent / chains[1]
    assert shares[2.0, 1.0][0] == pytest.approx(rates[0] ** 2 / (rates[0] ** 2 + rates[1] ** 2))
    lengths = [sum(len(s.lost) for s in pool if s.domain == i) for i in (0, 1)]
    text = [n / sum(lengths) for n in lengths]  # of the domains that have windows
    lost = [rate * t for rate, t in zip(rates, text)]
    assert shares[1.0, 0.0][0] == pytest.approx(lost[0] / sum(lost)), "by what is lost in all, also where none looked"
    assert shares[0.0, 1.0][:2] == [0.5, 0.5]

    _, plain = mine(pool, labels, Rule(400, guard=0.0, seed=1))
    _, guarded = mine(pool, labels, Rule(400, guard=0.25, seed=1))
    assert [d.share for d in guarded[:2]] == pytest.approx([0.75 * d.share + 0.25 * t for d, t in zip(plain, text)])
    assert guarded[2].share == 0 and sum(d.share for d in guarded) == pytest.approx(1)
    _, all_text = mine(pool, labels, Rule(400, guard=1.0, seed=1))
    assert [d.share for d in all_text[:2]] == pytest.approx(text)
    with pytest.raises(ConfigError, match="guard must be between 0 and 1"):
        Rule(1, guard=1.5)


def test_a_large_focus_chooses_the_domain_that_loses_most() -> None:
    for focus in (1e3, 1e308, float("inf")):
        _, domains = mine(a_pool(), ("rare", "frequent", "perfect"), Rule(400, focus=focus, guard=0.0))
        assert [d.share for d in domains] == [1, 0, 0]


def test_what_is_scarce_weighs_more_and_weights_are_bounded() -> None:
    pool = a_pool()
    windows, domains = mine(pool, ("a", "b", "c"), Rule(100_000, seed=1))
    assert all(LIGHTEST <= w.row.weight <= HEAVIEST for w in windows)
    assert [d.kept for d in domains] == [d.windows for d in domains], "all there are"
    assert domains[0].weight == HEAVIEST
    windows, domains = mine(pool, ("a", "b", "c"), Rule(300, seed=1))
    again, _ = mine(pool, ("a", "b", "c"), Rule(300, seed=1))
    other, _ = mine(pool, ("a", "b", "c"), Rule(300, seed=2))
    assert windows == again and windows != other
    own = [w for w in windows if w.row.family == 1]
    dense, sparse = (f(own, key=lambda w: w.lost / w.taught) for f in (max, min))
    assert dense.row.weight > sparse.row.weight
    with pytest.raises(ConfigError, match="balance between 0 and 1"):
        Rule(1, balance=2.0)
    assert mine([], ("a",), Rule(5))[0] == []


def test_windows_with_greater_losses_are_drawn_more_often() -> None:
    row = Row(tuple(range(40)), 5, 0, True)
    light, heavy = ((0.0,) * 10 + (x,) + (0.0,) * 23 for x in (1.0, 4.0))
    pool = [Scored(row, lost, 0) for lost in (light, heavy) for _ in range(50)]
    windows, _ = mine(pool, ("a",), Rule(300, seed=0))
    assert len(windows) == 60 and sum(w.lost == 4.0 for w in windows) > 40


def test_a_weight_counts_as_so_many_rows() -> None:
    config = KimiConfig.from_dict(TARGET)
    weights = random_weights(config, dtype=torch.float32, device="cpu")
    assert weights.lm_head.format == "dense"
    trainee = Trainee(drafts_config(config)[1], weights.embed, weights.lm_head.weight, seed=3)
    rows, generator = some_rows(3, seed=2), torch.Generator().manual_seed(0)
    # The target is sure of different tokens in different rows, so the rows' losses differ.
    states = {
        r.ids: (torch.randn(len(r.ids), 3 * D, generator=generator), (i + 1) * torch.ones(len(r.ids), D))
        for i, r in enumerate(rows)
    }

    def loss(some: list[Row]) -> float:
        batch, told = Batch.of(some, torch.device("cpu")), Told(states)([r.ids for r in some])
        return float(trainee.lesson(batch, told.aux, told.hidden[batch.taught], 3, 0.8).loss.detach())

    weighted = loss([replace(rows[0], weight=3.0), rows[1], rows[2]])
    assert weighted == pytest.approx(loss([rows[0]] * 3 + rows[1:]), rel=1e-5)
    assert weighted != pytest.approx(loss(rows), rel=1e-3)


def test_groups_of_like_texts() -> None:
    rng = Random(0)
    texts, kinds = [], []
    for _ in range(90):
        kinds.append(rng.choice([0, 1, 1, 2, 2, 2]))
        own = [100 * kinds[-1] + rng.randrange(30) for _ in range(20)]
        texts.append(own + [900 + rng.randrange(5) for _ in range(20)])
    found = group(texts, 3)
    by_size = sorted(range(3), key=lambda kind: -kinds.count(kind))
    assert found == [by_size.index(kind) for kind in kinds]
    assert all(
        int(word) // 100 == by_size[i] for i, name in enumerate(names(texts, found, str)) for word in name.split()[1:]
    )
    assert group(texts[:1], 3) == [0] and group([], 3) == [] and set(group([[1, 2]] * 5, 3)) <= {0, 1, 2}


def test_what_a_server_logged_is_scored_where_drafts_were_wrong() -> None:
    record = Record((1, 2, 3, 4, 5, 6, 7, 8), 3, False, (Rejection(5, (6, 0, 0), 1), Rejection(3, (0,), 0)))
    (found,) = of_records([record])
    # The chain whose first guess is for place 5 knows the token of place 4, and begins with the feature of 3.
    assert found.lost == (None, 2.0, None, None) and found.row.ids == record.ids and not found.row.greedy
    (window,) = windows_of(found, after=5)
    assert window.row.given == 4 and window.lost == 2.0


def test_from_answers_and_a_server_s_log_to_a_trained_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nano = resolve_model("kimi-nano")
    prompts = Problems(nano, 5).prompts(0, 20)
    corpus = Corpus(Path("corpus"), {"families": Problems(nano, 5).families})
    corpus.add([Row(p.ids + p.expected[:12], len(p.ids), p.family, True) for p in prompts])
    log = RejectedLog(Path("log"), share=1.0, limit_bytes=1 << 20)
    for rid, p in enumerate(prompts[:6]):
        log.open(rid, p.ids)
        log.observe(*step(rid, (), p.expected[:3]))
        log.observe(*step(rid, (4000, 4001), p.expected[3:4]))
        log.observe(*step(rid, (), p.expected[4:12], ends=True))
    log.close()

    def perilune(given: str) -> dict[str, Any]:
        outcome = CliRunner().invoke(command, given.split(), catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        found: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
        return found

    mined = perilune("mine --out windows --corpus corpus --rejected log --groups 2 --tokens 200")
    windows = Corpus(Path("windows"))
    rows = windows.rows()
    assert len(rows) == mined["windows"] and {row.family for row in rows} >= {9, 10}, "both sources, the log in groups"
    assert [d["name"] for d in mined["domains"]] == list(windows.families)
    assert any(row.weight != 1.0 for row in rows)
    asked = {p.ids for p in prompts}
    assert all(any(row.ids[: len(ids)] == ids for ids in asked) for row in rows)
    with pytest.raises(ConfigError, match="already holds windows"):
        perilune("mine --out windows --corpus corpus --rejected log")
    with pytest.raises(ConfigError, match="nothing to mine from"):
        perilune("mine --out other")
    with pytest.raises(CheckpointError, match="serve with --log-rejected"):
        perilune("mine --out other --rejected corpus")

    trained = perilune(
        f"train --corpus corpus --windows windows --window-share 0.4 --from {nano / 'drafter'} --run run --out draft "
        "--steps 2 --chains 64 --device cpu"
    )
    assert trained["bytes"] > 4e6 and Path("draft/model.safetensors").is_file()
    again = perilune("mine --out again --corpus corpus --drafter draft --device cpu")
    assert again["windows"] > 0


def test_no_two_parts_of_the_answers_have_the_same_problems(tmp_path: Path) -> None:
    asked = [part for setting in SETTINGS.values() for part in parts(setting, tmp_path, 4096)]
    assert len({part.seed for part in asked}) == len({part.directory for part in asked}) == len(asked) > 8
    assert all(0 < part.rows <= PART for part in asked)
    rare = SETTINGS["rare"]
    wanted = sum(part.rows for part in asked if part.directory.name.startswith("rare-begin"))
    assert wanted * 2 * 58 == pytest.approx(rare.begin * 4096, rel=0.01), "read twice"


def test_ways_to_train_are_compared_by_family() -> None:
    rng = Random(0)
    family = [0] * 30 + [1] * 50

    def measured(lengths: tuple[float, float]) -> list[tuple[int, int]]:
        cycles = [rng.randrange(20, 200) for _ in family]
        return [(round(c * lengths[f]), c) for f, c in zip(family, cycles)]

    by_seed = [{BASE: measured((2.0, 3.0)), "mined": measured((2.0 * gain, 2.94))} for gain in (1.1, 1.2, 1.3)]
    found = compare(by_seed, family, ("a", "b"))
    assert found["ways"]["mined"]["families"] == pytest.approx({"a": 2.4, "b": 2.94}, rel=2e-3)
    assert found["ways"]["mined"]["worst"] == pytest.approx(2.4, rel=2e-3)
    gains = found["gains"]["mined"]
    assert gains["a"]["by_seed"] == pytest.approx([0.1, 0.2, 0.3], abs=2e-3) and gains["a"]["gain"] == pytest.approx(
        0.2, abs=2e-3
    )
    half = 4.303 * 0.1 / 3**0.5
    assert gains["worst"]["seeds_95"] == pytest.approx([0.2 - half, 0.2 + half], abs=5e-3)
    assert gains["b"]["gain"] == pytest.approx(-0.02, abs=2e-3) and -0.03 < gains["b"]["prompts_95"][0] < -0.015
