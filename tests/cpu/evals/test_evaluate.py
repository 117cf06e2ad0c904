"""`perilune evaluate`: scoring against an endpoint that knows how many it gets right, and the arithmetic beside it."""

import asyncio
import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from perilune.cli import evaluate as verb
from perilune.cli.draft import mine
from perilune.cli.shared import display
from perilune.client.endpoint import Endpoint, EndpointError
from perilune.core.errors import ConfigError
from perilune.draft.mine import Domain
from perilune.evals import evaluate
from perilune.evals.evaluate import Cell, Tally, wilson
from perilune.tasks.families import FAMILIES, problems
from perilune.tasks.problem import Problem, answer_of
from tests.fake_endpoint import FakeEndpoint, refusal, whole


def cell(family: str = "add_sub", split: str = "heldout", thinking: bool = True, count: int = 10) -> Cell:
    return Cell(family, split, thinking, problems(family, split, count, thinking=thinking), 0.25, 0.125)


def score(fake: FakeEndpoint, *cells: Cell, concurrency: int = 4) -> tuple[list[Tally], list[evaluate.Failure]]:
    async def work() -> Any:
        async with Endpoint(fake.url) as endpoint:
            return await evaluate.evaluate(endpoint, cells, concurrency=concurrency, max_tokens=64)

    return asyncio.run(work())


class Knows:
    """Answers `right` of each cell's problems as they should be, the others with nonsense."""

    def __init__(self, right: dict[tuple[str, str, bool], int], cells: list[Cell]) -> None:
        self.right = dict(right)
        self.found: dict[tuple[str, bool], tuple[tuple[str, str, bool], Problem]] = {}
        for c in cells:
            for p in c.problems:
                key = json.dumps([list(p.messages), list(p.tools)], sort_keys=True), c.thinking
                self.found[key] = ((c.family, c.split, c.thinking), p)
        self.lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        thinking = body["thinking"]["type"] == "enabled"
        assert body["chat_template_kwargs"] == {"thinking": thinking} and body["temperature"] == 0
        where, problem = self.found[json.dumps([body["messages"], body.get("tools", [])], sort_keys=True), thinking]
        with self.lock:
            self.right[where] -= 1
            good = self.right[where] >= 0
        if not good:
            return whole("no idea", finish="length", tokens=30)
        answer = answer_of(problem.reply)
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in answer.tool_calls]
        return whole(answer.content, tokens=10, tool_calls=calls or None, reasoning_content="hm")


def test_it_counts_what_is_right_cell_by_cell(fake: FakeEndpoint) -> None:
    cells = [
        cell("add_sub", "heldout", True, 10),
        cell("add_sub", "structural", False, 6),
        cell("tool_call", "heldout", True, 8),
    ]
    right = {("add_sub", "heldout", True): 7, ("add_sub", "structural", False): 0, ("tool_call", "heldout", True): 8}
    fake.answer = Knows(right, cells)
    tallies, failures = score(fake, *cells, concurrency=3)
    assert [(t.done, t.right, t.cut, t.errors) for t in tallies] == [(10, 7, 3, 0), (6, 0, 6, 0), (8, 8, 0, 0)]
    assert tallies[0].tokens == 7 * 10 + 3 * 30 and tallies[0].counted == 10
    assert len(failures) == 9 and len(fake.bodies) == 24 and fake.most <= 3
    assert all(b["max_tokens"] == 64 and "stream" not in b for b in fake.bodies)
    record = failures[0].record()
    assert record["content"] == "no idea" and record["expected"]["content"] and record["finish_reason"] == "length"
    json.dumps(record)


def test_refused_requests_count_as_wrong_until_they_are_too_many(
    fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cell(count=10)
    knows = Knows({("add_sub", "heldout", True): 10}, [one])
    turn = iter(range(100))
    fake.answer = lambda body: refusal(500, "not finite") if next(turn) % 3 == 0 else knows(body)
    (tally,), failures = score(fake, one)
    assert (tally.done, tally.right, tally.errors, tally.counted) == (10, 6, 4, 6)
    assert all("answered 500: not finite" in str(f.error) and f.record()["content"] is None for f in failures)
    monkeypatch.setattr(evaluate, "MAX_ERRORS", 2)
    with pytest.raises(EndpointError, match="answered 500: not finite"):
        score(fake, one)


def test_a_model_that_takes_no_pictures_is_one_error(fake: FakeEndpoint) -> None:
    words = "messages[0].content[0]: the model 'm' does not see pictures: send text only"
    fake.answer = lambda body: refusal(400, words) if "image_url" in json.dumps(body) else whole("7")
    text, pictures = cell(count=4), Cell.draw("picture_sums", "heldout", True, 2, 1, "real")
    with pytest.raises(ConfigError, match=r"does not see pictures.*choose families without pictures, or a model that"):
        score(fake, text, pictures)
    assert len(fake.bodies) == 1, "nothing else is asked"
    (tally,), _ = score(fake, Cell.draw("picture_sums", "heldout", True, 2, 1, "none"))
    assert tally.done == 2 and tally.errors == 0, "questions alone may be asked"
    turn = iter(range(9))  # busy when the first picture is shown: that one is asked again with the others
    fake.answer = lambda body: refusal(500, "busy") if next(turn) == 0 else whole("7")
    (tally,), _ = score(fake, pictures)
    assert (tally.done, tally.errors) == (2, 0)


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_meant_for_everyone_ends_it(fake: FakeEndpoint, status: int) -> None:
    fake.answer = lambda body: refusal(status, "go away")
    with pytest.raises(EndpointError, match="go away"):
        score(fake, cell())
    assert len(fake.bodies) <= 8


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (470, 500, 0.9156, 0.9576),
        (1, 1, 0.2065, 1),
    ],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def rows() -> list[dict[str, Any]]:
    found = []
    for family, on, structural, off in (("add_sub", 9, 5, 2), ("tool_call", 7, 10, 0)):
        for split, thinking, right in (
            ("heldout", True, on),
            ("structural", True, structural),
            ("heldout", False, off),
            ("structural", False, 0),
        ):
            tally = Tally(done=10, right=right, counted=10, tokens=80)
            found.append(evaluate.row("m", Cell(family, split, thinking, [], 0.1, 0.05), tally, seed=3))
    return found


def render(table: Any) -> list[list[str]]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    lines = [line for line in console.export_text().splitlines() if "│" in line or "┃" in line]
    return [[c.strip() for c in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]


def test_a_family_that_looks_like_a_tag_is_shown_as_it_is() -> None:
    made = [{**r, "family": "[/x] [bold]"} for r in rows()]
    assert any("[/x] [bold]" in line for line in render(evaluate.table(made)))
    lines = render(mine.table([Domain("0: [/ a ] [bold]", 1, 1, 1)]))  # a group of a log is named by its tokens
    assert any("0: [/ a ] [bold]" in line for line in lines)
    bar = display.progress()
    bar.add_task("[/x]", total=1)  # the name of an endpoint's model
    Console(file=io.StringIO()).print(bar.get_renderable())


def test_the_table() -> None:
    header, *lines = render(evaluate.table(rows()))
    assert header == ["family", "in-distribution", "structural", "thinking off", "constant", "copy", "n", "tokens"]
    assert lines[0] == ["add_sub", "90.0 (59.6-98.2)", "50.0 (23.7-76.3)", "10.0 (2.8-30.1)", "10.0", "5.0", "40", "8"]
    assert lines[1][:4] == ["tool_call", "70.0 (39.7-89.2)", "100.0 (72.2-100.0)", "0.0 (0.0-16.1)"]
    assert lines[2] == ["mean", "80.0", "75.0", "5.0", "", "", "80", ""]
    only = [r for r in rows() if not r["thinking"]]
    table = evaluate.table(only)
    assert str(table.title).endswith("thinking off")
    header, first, *_ = render(table)
    assert "thinking off" not in header and first[1].startswith("20.0 (")


def test_ledger_rows_are_flat_and_complete() -> None:
    row = rows()[0]
    assert row["bench"] == "evaluate" and row["exact_match"] == 90.0 and row["seed"] == 3 and row["mean_tokens"] == 8.0
    assert (row["low"], row["high"]) == (59.58, 98.21)
    assert all(isinstance(v, str | int | float | bool | None) for v in row.values())


def test_the_plan_halves_the_count_and_has_baselines() -> None:
    cells = evaluate.plan(["add_sub"], [True, False], 9, 5)
    assert [(c.split, c.thinking, len(c.problems)) for c in cells] == [
        ("heldout", True, 5),
        ("structural", True, 4),
        ("heldout", False, 5),
        ("structural", False, 4),
    ]
    assert all(p.split == c.split and p.thinking == c.thinking for c in cells for p in c.problems)
    assert [replace(p, thinking=False, reply=q.reply) for p, q in zip(cells[0].problems, cells[2].problems)] == [
        *cells[2].problems
    ], "both modes get the same questions"
    assert all(0 <= c.constant <= 1 and 0 <= c.copy <= 1 for c in cells)


def test_families_by_name() -> None:
    assert evaluate.chosen(None) == [name for name, f in FAMILIES.items() if f.evaluated]
    assert evaluate.chosen(" tool_call, add_sub,add_sub") == ["tool_call", "add_sub"]
    with pytest.raises(ConfigError, match="'nope': choose from"):
        evaluate.chosen("nope")
    with pytest.raises(ConfigError, match="names none"):
        evaluate.chosen(",")


def test_the_whole_command(fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = evaluate.plan(["add_sub"], [True, False], 6, 11)
    right = dict(zip([(c.family, c.split, c.thinking) for c in cells], (3, 1, 2, 0)))
    fake.answer = Knows(right, cells)
    args = [fake.url, "--families", "add_sub", "--count", "6", "--seed", "11", "--concurrency", "2"]
    args += ["--ledger", str(tmp_path), "--failures", str(tmp_path / "wrong.json")]
    result = CliRunner().invoke(verb.command, args, catch_exceptions=False)
    assert result.exit_code == 0
    last = json.loads(result.stdout.splitlines()[-1])
    assert [(r["split"], r["thinking"], r["right"], r["n"]) for r in last["rows"]] == [
        ("heldout", True, 3, 3),
        ("structural", True, 1, 3),
        ("heldout", False, 2, 3),
        ("structural", False, 0, 3),
    ]
    ledger = tmp_path / "evaluate.jsonl"
    assert [json.loads(line) for line in ledger.read_text().splitlines()] == last["rows"]
    assert last["rows"][0]["server"] == "endpoint" and last["rows"][0]["concurrency"] == 2
    assert "100.0 (43." in result.stdout and "6 answers were cut off" in result.stdout
    wrong = json.loads((tmp_path / "wrong.json").read_text())
    assert wrong["model"] == "fake" and len(wrong["failures"]) == 6
    late = CliRunner().invoke(verb.command, [*args[:-1], str(tmp_path / ("w" * 300))])  # found out when it is written
    assert isinstance(late.exception, ConfigError) and "File name too long" in str(late.exception)
    assert json.loads(late.stdout.splitlines()[-1])["rows"] and len(ledger.read_text().splitlines()) == 8
    bad = CliRunner().invoke(verb.command, [*args[:-1], str(tmp_path / "no" / "dir.json")])
    assert isinstance(bad.exception, ConfigError) and "no such directory" in str(bad.exception)
    (read_only := tmp_path / "read_only").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != read_only)  # root may write anywhere
    bad = CliRunner().invoke(verb.command, [*args[:-1], str(read_only / "x")])
    assert isinstance(bad.exception, ConfigError) and "not writable" in str(bad.exception) and not bad.stdout
