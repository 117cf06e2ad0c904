"""What is told of a drafter: the table, the picture, the card, and its speed in the engine."""

import xml.etree.ElementTree
from typing import Any

from rich.console import Console

from perilune.draft import plot, report, speed
from perilune.draft.corpus import Row
from perilune.formats.hub import resolve_model
from perilune.text.chat import template_for
from perilune.text.tokenizer import Tokenizer
from runs.kimi_nano import drafter_card

LENGTHS = {("heldout", "a"): 3.25, ("heldout", "b"): 2.0, ("structural", "a"): 1.75}


def records() -> list[dict[str, Any]]:
    found = []
    for (split, family), length in LENGTHS.items():
        for drafter, less in (("eagle3", 0.0), ("lookup", 0.5)):
            for temperature in (0.0, 1.0):
                for k in (1, 3):
                    value = round(length - less - 0.1 * temperature - (0.2 if k == 1 else 0.0), 4)
                    about = {"split": split, "drafter": drafter, "temperature": temperature, "length": k}
                    found.append({**about, "family": family, "acceptance_length": value, "by_position": [0.9, 0.5]})
    return found


def test_one_table_has_it_all() -> None:
    speeds: list[dict[str, Any]] = [
        {"way": "off", "users": 1, "speed_up": 1.0, "speed_up_by_family": {"a": 1.0}},
        {"way": "n-gram", "users": 1, "speed_up": 1.2, "speed_up_by_family": {"a": 1.31}},
    ]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(records(), speeds))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    rows = {line[0]: line[1:] for line in reversed(lines) if len(line) > 1}
    # T = 0: eagle3 and lookup with chains of 1 and 3, then T = 1; positions; the one way that is not "off".
    assert rows["a"] == ["3.05", "3.25", "2.55", "2.75", "2.95", "3.15", "2.45", "2.65", "90 50", "1.31"]
    assert rows["b"][-1] == "-" and rows["structural"] == [""] * 10


def test_the_picture_draws_what_was_measured() -> None:
    root = xml.etree.ElementTree.fromstring(plot.picture(records(), 3, "a < b & c"))
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b & c" and {"3.25", "3.15", "2.75", "2.00", "1.75"} <= set(texts)
    assert "3.05" not in texts  # of chains of 1
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("height") == str(plot.BAR)]
    widths = {round(float(e.get("width", "0")), 1) for e in bars}
    scale = (plot.WIDTH - plot.LEFT - plot.RIGHT) / 4
    assert len(bars) == 3 * len(LENGTHS) and round(3.25 * scale, 1) in widths


def test_the_card_has_the_table() -> None:
    text = drafter_card.table([r for r in records() if r["family"] == "a"], 3)
    assert text.splitlines()[-1] == "| a | 3.25 | 3.15 | 2.75 | 90 50 | 1.75 |"
    assert drafter_card.speed([], "x") == ""
    ways = [{"way": w, "users": 1, "speed_up": s} for w, s in (("off", 1.0), ("n-gram", 1.236))]
    assert "on one x: n-gram 1.24 (1 at once)." in drafter_card.speed(ways, "x")


def test_speed_is_that_of_the_engine() -> None:
    nano = resolve_model("kimi-nano")
    tokenizer, template = Tokenizer.from_directory(nano), template_for(nano)
    ids = [
        template.render_ids(tokenizer, [{"role": "user", "content": text}], thinking=True)
        for text in ("What is 12 + 35?", "What is 20 - 3?", "Count: 1 2 3", "Hello")
    ]
    rows = [Row((*some, 1, 2), len(some), i // 2, True) for i, some in enumerate(ids)]
    asked = report.questions(rows, 2, max_tokens=10, ends=tokenizer.stop_ids)
    assert [q.family for q in asked] == [0, 0, 1, 1] and [list(q.prompt) for q in asked] == ids
    one = report.questions(rows, 1, max_tokens=10, ends=())
    assert [q.prompt for q in one] == [asked[0].prompt, asked[2].prompt]
    calls: list[None] = []
    found = speed.measure(
        nano, nano / "drafter", asked, ["a", "b", "none"], length=3, users=(1, 2), rounds=1,
        engine={"device": "cpu"}, advance=lambda: calls.append(None),
    )  # fmt: skip
    assert [(r["way"], r["users"]) for r in found] == [(w.name, n) for n in (1, 2) for w in speed.ways(3)]
    assert len(calls) == 2 * 4
    for record in found:
        assert record["different"] == 0 and record["speed_up"] > 0 and set(record["speed_up_by_family"]) == {"a", "b"}
        if record["way"] == speed.OFF:
            assert record["speed_up"] == 1.0 and record["tokens_per_second"] > 0
