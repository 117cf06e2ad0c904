"""The bundled kimi-nano: a sample of its skills through the engine, and a card that says what the ledger says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perilune
from perilune.core.sampling import SamplingParams
from perilune.engine.llm import LLM
from perilune.media.decoder import Picture
from perilune.media.patches import digest
from perilune.tasks.families import check, problems
from runs.kimi_nano import card as cards
from runs.kimi_nano import eyes_card
from runs.kimi_nano.card import CARD_FILE, TRAINING_FILE, newest, scores, training, weights_hash
from runs.kimi_nano.data import Codec
from runs.kimi_nano.evaluate import parse_answer
from runs.kimi_nano.pictures import placed

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"
LEDGER = Path(perilune.__file__).parents[1] / "bench" / "results" / "evaluate.jsonl"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("kimi-nano", threads=1) as running:
        yield running


@pytest.mark.parametrize(("name", "thinking", "count", "least"), [
    ("add_sub", True, 12, 11), ("add_sub", False, 12, 9), ("tool_call", True, 8, 6),
])  # fmt: skip
def test_held_out_problems(llm: LLM, name: str, thinking: bool, count: int, least: int) -> None:
    codec = Codec(NANO)
    asked = problems(name, "heldout", count, thinking=thinking)
    done = llm.generate([codec.prompt(p) for p in asked], SamplingParams(temperature=0.0, max_tokens=400))
    answers = []
    for completion in done:
        ids = list(completion.token_ids)
        answers.append(parse_answer(codec, ids[:-1] if ids[-1:] == [codec.end] else ids, thinking))
    assert sum(check(p, a) for p, a in zip(asked, answers)) >= least, [
        (p.messages[-1]["content"], a) for p, a in zip(asked, answers) if not check(p, a)
    ]


def test_the_example_of_the_readme(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is 347 + 589?"}], SamplingParams(temperature=0.0))
    assert "936" in answer.content and answer.reasoning.strip()


def test_the_server_takes_greedy_decoding_from_the_model() -> None:
    assert json.loads((NANO / "generation_config.json").read_text())["temperature"] == 0.0


def test_the_card_says_what_the_ledger_and_the_training_log_say() -> None:
    card, trained = (NANO / CARD_FILE).read_text(), json.loads((NANO / TRAINING_FILE).read_text())
    rows = newest(LEDGER)
    assert scores(rows) in card, "the card is stale: python -m runs.kimi_nano.card"
    assert trained["weights_sha256"] == weights_hash(NANO), "training.json is about other weights: give card.py --log"
    for said in (
        f"{trained['parameters']:,} parameters",
        f"{trained['steps']:,} steps of {trained['tokens_per_step']:,} tokens",
        f"{trained['tokens'] / 1e9:.2f} billion",
        f"seed {trained['seed']}",
        f"torch {trained['torch']}",
    ):
        assert said in card, said


def test_the_card_has_the_figures_of_other_wordings_and_their_source() -> None:
    trained = json.loads((NANO / TRAINING_FILE).read_text())
    rows, written = newest(LEDGER), (NANO / CARD_FILE).read_text()
    given = cards.newest_given(LEDGER)
    assert written == cards.card(trained, rows, given, eyes_card.part(trained.get("eyes"), LEDGER)), (
        "the card is stale: python -m runs.kimi_nano.card"
    )
    assert {r["n"] for r in given} <= set(range(25, 40)) and f"| mean | {mean_of(given, True)} |" in written
    measured = trained | {"weights_sha256": cards.OUTSIDE["weights_sha256"]}
    said = " ".join(cards.card(measured, rows).split())
    assert "from outside the project on 2026-11-22" in said and "`perilune evaluate` does not repeat" in said
    assert "sums 84 %, stories 79 %, tools 93 %, JSON 41 %" in said
    assert "In another person's wordings" not in said, "no rows, no table"
    other = " ".join(cards.card(trained | {"weights_sha256": "0" * 64}, rows).split())
    assert "from outside the project" not in other and "41 %" not in other, "they are about these weights"


def mean_of(rows: list[dict[str, Any]], thinking: bool) -> str:
    found = [r["exact_match"] for r in rows if r["thinking"] is thinking]
    return f"{sum(found) / len(found):.1f}"


def test_other_wordings_are_of_one_evaluation(tmp_path: Path) -> None:
    file, rows = tmp_path / "evaluate.jsonl", cards.newest_given(LEDGER)
    assert len(rows) == 16 and "| sums |" in cards.wordings(rows)
    file.write_text("".join(json.dumps(r) + "\n" for r in [*rows, rows[0] | {"problems_sha256": "0"}]))
    with pytest.raises(SystemExit, match="differ in problems_sha256: ask all at once"):
        cards.newest_given(file)
    file.write_text(json.dumps(rows[0] | {"problems": "mine.jsonl"}) + "\n")
    assert cards.newest_given(file) == [] and cards.wordings([]) == ""


def test_only_the_log_of_a_finished_training_makes_a_card(tmp_path: Path) -> None:
    start = {
        "kind": "start", "parameters": 5, "device": "D", "torch": "2", "shape": {"vocab_size": 7},
        "mix": {"add_sub": 1.0},
        "options": {"seed": 1, "tokens": 10, "score_count": 4},
    }  # fmt: skip
    corpus = {"kind": "corpus", "texts": 3, "tokens": 90, "held_out": 10}
    stop = {"kind": "stop", "finished": True, "step": 2, "tokens": 20, "learnt": 9, "seconds": 90.0}
    score = {"kind": "score", "exact": {"doc_questions/thinking": 0.75}}
    log = tmp_path / "log.jsonl"

    def write(*rows: object) -> None:
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(corpus, start, stop | {"finished": False, "step": 1}, start, stop, score)
    made = training(log, tmp_path)
    assert (made["steps"], made["minutes"], made["text_tokens"], made["tokens_learnt"]) == (2, 1.5, 100, 9)
    assert "before" not in made
    before = {"kind": "before", "steps": 7000, "tokens_per_step": 10, "tokens": 70_000, "minutes": 13.5}
    write(corpus, before, start, stop, score)
    assert training(log, tmp_path)["before"]["steps"] == 7000
    said = cards.card(json.loads((NANO / TRAINING_FILE).read_text()) | {"before": before}, newest(LEDGER))
    assert "from nothing, 7,000 steps of 10 tokens" in said
    write(corpus, start, score, stop | {"finished": False})
    with pytest.raises(SystemExit, match="unfinished"):
        training(log, tmp_path)
    write(corpus, start, score)
    with pytest.raises(SystemExit, match="not the log of a whole training: 'stop'"):
        training(log, tmp_path)


def test_rows_of_different_evaluations_make_no_card(tmp_path: Path) -> None:
    file = tmp_path / "evaluate.jsonl"
    rows = newest(LEDGER)
    file.write_text("".join(json.dumps(r) + "\n" for r in [*rows, rows[0] | {"date": "2020-01-01"}]))
    with pytest.raises(SystemExit, match="differ in date"):
        newest(file)
    file.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(SystemExit, match="has no row of kimi-nano for"):
        newest(file)


@pytest.mark.parametrize(("name", "least"), [("picture_sums", 6), ("picture_shapes", 6), ("picture_charts", 6)])
def test_held_out_pictures(llm: LLM, name: str, least: int) -> None:
    codec = Codec(NANO)
    asked = placed(problems(name, "heldout", 8, thinking=True))
    shown = [
        [Picture(patches, (1, *grid), grid[0] * grid[1] // 4, digest(patches, (1, *grid)))]
        for _, patches, grid in asked
    ]
    prompts = [codec.prompt(one) for one, _, _ in asked]
    done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200), pictures=shown)
    ends = [[i for i in one.token_ids if i != codec.end] for one in done]
    right = [check(one, parse_answer(codec, ids, True)) for (one, _, _), ids in zip(asked, ends, strict=True)]
    assert sum(right) >= least, [codec.tokenizer.decode(ids) for ids in ends]
