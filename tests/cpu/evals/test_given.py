"""`perilune evaluate --problems`: reading a file of problems, judging answers to them, the whole command."""

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perilune.cli import evaluate as verb
from perilune.core.errors import ConfigError
from perilune.evals import evaluate, given
from perilune.evals.given import Given
from tests import fake_endpoint
from tests.fake_endpoint import whole

PROBLEMS = Path(__file__).parents[3] / "bench/problems"
ASK = [{"role": "user", "content": "hello"}]


def problem(answer: Any) -> Given:
    return Given.of({"family": "f", "messages": ASK, "answer": answer})


@pytest.mark.parametrize(
    ("answer", "content", "right"),
    [
        (1045, "1045", True),
        (1045, "533 + 512 = 1,045.", True),
        (-7, "The result is −7", True),
        (7, "-7", False),
        (93.6, "It is 93.60 EUR", True),
        (5, "v5", False),
        (5, "5 of 9", False),
        (5, "", False),
        (2**53 + 1, "2^53 + 1 = 9,007,199,254,740,993", True),
        (2**53 + 1, "9007199254740992", False),
        (5, "1" * 5000, False),
        ({"a": 1}, '{"a":' * 900 + "1" + "}" * 900, False),
        ("no", "No, 215 is smaller.", True),
        ("no", "not at all", False),
        ("3, 9, 14", "[3, 9, 14]", True),
        ("3, 9, 14", "[3, 14, 9]", False),
        ("3, 9, 14", "3\n9\n14", True),
        ("38 metres", "It is 38 metres tall.", True),
        (["six", "6"], "6", True),
        (["six", "6"], "16", False),
        ("sunday", "Visitors can climb the one hundred steps of it on a Sunday", False),
        ("snow", '{"condition": "snow"}', False),
        ({"a": 2, "b": ["x"]}, '```json\n{"b": ["x"], "a": 2.0}\n```', True),
        ({"a": 1}, '{"a": true}', False),
        ({"a": "Ana"}, '{"a": "ana"}', False),
        ({"a": 1}, '{"a": 1} is it', False),
        ({"a": 1}, "[" * 5000, False),
        ("?", "What is it", False),
        ("?", "?", True),
        ([], "I cannot do that.", True),
        ([], " ", False),
    ],
)
def test_judging_text(answer: Any, content: str, right: bool) -> None:
    assert problem(answer).right(content, ()) is right
    assert not problem(answer).right(content, [("t", "{}")]), "a call that is not wanted is wrong"


def test_judging_calls() -> None:
    two = problem([{"name": "w", "arguments": {"city": "Rome"}}, {"name": "w", "arguments": {"city": "Bern"}}])
    assert two.right("", [("w", '{"city": "bern"}'), ("w", '{"city":"Rome"}')])
    for calls in (
        [("w", '{"city": "Rome"}')],
        [("w", '{"city": "Rome"}')] * 2,
        [("w", '{"city": "Rome", "unit": "c"}'), ("w", '{"city": "Bern"}')],
        [("v", '{"city": "Rome"}'), ("w", '{"city": "Bern"}')],
        [("w", "Rome"), ("w", '{"city": "Bern"}')],
    ):
        assert not two.right("Rome, Bern", calls)


ROW = '{"family": "f", "messages": [{}], '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problems: write one JSON object a line"),
        ("\n{", "line 2 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"family": "f", "messages": [], "answer": 1}', "line 1 has no messages"),
        ('{"family": "f", "messages": [1], "answer": 1}', "line 1 needs messages as a list of objects"),
        ('{"messages": [{}], "answer": 1}', "line 1 needs family"),
        ('{"family": "f", "messages": [{}]}', "line 1 needs answer: a number"),
        (ROW + '"answer": [1]}', "line 1 needs answer: a number"),
        (ROW + '"answer": 1, "tool": []}', "line 1 has unknown keys: tool; known are"),
        (ROW + '"answer": [{"name": "w", "arguments": "{}"}]}', "arguments as an object"),
        (ROW + '"answer": [{"name": 5, "arguments": {}}]}', "line 1 needs answer"),
        ("[" * 100_000, "line 1 "),
        ('{"family": "\\ud800", "messages": [{}], "answer": 1}', "surrogates not allowed"),
        (ROW + '"answer": NaN}', "line 1 Out of range"),
        ('{"family": "f", "messages": [{"x": 1e999}], "answer": 1}', "line 1 Out of range"),
        (ROW + '"answer": {"a": ' + "[" * 900 + "]" * 900 + "}}", "line 1 maximum recursion"),
        (ROW + '"answer": {"a": ' + "[" * 99 + "]" * 99 + "}}", "line 1 nests deeper than 100 levels"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        given.read(path, True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="choose another file with --problems"):
        given.read(tmp_path / "none", True)
    path = tmp_path / "p"
    path.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        given.read(path, True)
    path = tmp_path / "p.jsonl.xz"
    for wrong in (b"not compressed", lzma.compress(b"{}\n" * 1000)[:-8]):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="is not a whole xz file"):
            given.read(path, True)
    path.write_bytes(lzma.compress(b"x" * 100))
    with monkeypatch.context() as few, pytest.raises(ConfigError, match="has 51 bytes, the limit is 50"):
        few.setattr(given, "MAX_FILE_BYTES", 50)
        given.read(path, True)
    path = tmp_path / "p"
    monkeypatch.setattr(given, "MAX_FILE_BYTES", 1)
    with pytest.raises(ConfigError, match="has 2 bytes, the limit is 1"):
        given.read(path, True)


def test_an_xz_file_of_several_streams_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.jsonl.xz"
    line = json.dumps({"family": "f", "messages": ASK, "answer": 1}).encode() + b"\n"
    path.write_bytes(lzma.compress(line * 3) + bytes(8) + lzma.compress(line * 4))  # as `cat a.xz b.xz` makes it
    assert len(given.read(path, True)) == 7
    path.write_bytes(lzma.compress(line * 3) + lzma.compress(line * 4)[:-8])
    with pytest.raises(ConfigError, match="is not a whole xz file"):
        given.read(path, True)
    monkeypatch.setattr(given, "MAX_FILE_BYTES", 5 * len(line))
    path.write_bytes(lzma.compress(line * 3) * 1000)
    with pytest.raises(ConfigError, match="the limit is"):
        given.read(path, True)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    path, text = tmp_path / "p.jsonl", "a\u2028b\u0085c"
    row = {"family": "f", "messages": [{"role": "user", "content": text}], "answer": 1}
    path.write_bytes(f"{json.dumps(row, ensure_ascii=False)}\r\n".encode() * 2)
    assert [p.copy() for p in given.read(path, True)] == [text] * 2


def test_the_problems_of_strangers() -> None:
    problems = given.read(PROBLEMS / "strangers.jsonl.xz", True)
    assert set(Counter(p.family for p in problems).values()) == {48}
    assert len({json.dumps([p.messages, p.tools]) for p in problems}) == len(problems)
    assert all(p.right(*evaluate._as_answer(p.answer)) for p in problems)


def test_the_wordings_of_the_repository() -> None:
    """Every family has 25 problems, none twice; the answer of each is judged right; calls fit their declarations."""
    problems = given.read(PROBLEMS / "wordings.jsonl", True)
    assert min(Counter(p.family for p in problems).values()) >= 25
    assert len({json.dumps([p.messages, p.tools]) for p in problems}) == len(problems)
    for p in problems:
        assert p.right(*evaluate._as_answer(p.answer)), p
        names = {t["function"]["name"]: t["function"]["parameters"] for t in p.tools}
        assert isinstance(p.answer, list) or not p.tools
        for call in p.answer if p.tools and p.answer and isinstance(p.answer[0], dict) else ():
            parameters = names[call["name"]]
            assert set(parameters["required"]) <= call["arguments"].keys() <= parameters["properties"].keys()


def test_the_whole_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"family": "sums", "messages": [{"role": "user", "content": "2 and 3?"}], "answer": 5},
        {"family": "sums", "messages": [{"role": "user", "content": ["2 and 4?"]}], "answer": 6},
        {
            "family": "json",
            "messages": [{"role": "user", "content": "a is 1"}],
            "answer": {"a": 1},
            "response_format": {"type": "json_object"},
        },
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with fake_endpoint.serving() as fake:
        fake.answer = lambda body: whole('{"a": 1}' if "response_format" in body else "5", tokens=3)
        args = [fake.url, "--problems", str(path), "--ledger", str(tmp_path)]
        args += ["--failures", str(tmp_path / "wrong.json")]
        result = CliRunner().invoke(verb.command, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in (tmp_path / "evaluate.jsonl").read_text().splitlines()]
    assert [(r["family"], r["split"], r["thinking"], r["right"], r["n"]) for r in found] == [
        ("sums", "given", True, 1, 2),
        ("sums", "given", False, 1, 2),
        ("json", "given", True, 1, 1),
        ("json", "given", False, 1, 1),
    ]
    assert found[0]["constant"] == 50.0 and found[0]["problems"] == "mine.jsonl" and "seed" not in found[0]
    assert found[0]["problems_sha256"] == given.digest(path)
    assert "exact match" in result.stdout and "structural" not in result.stdout
    wrong = json.loads((tmp_path / "wrong.json").read_text())["failures"]
    assert [f["expected"] for f in wrong] == [{"answer": 6}] * 2
    for extra, message in (
        (["--seed", "3"], "--seed does not apply to --problems"),
        (["--families", "jason"], "has no family 'jason': choose from sums, json"),
    ):
        bad = CliRunner().invoke(verb.command, [*args, *extra])
        assert isinstance(bad.exception, ConfigError) and message in str(bad.exception)


def test_few_answers_are_tried_on_all_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of 10,000 problems would take 11 minutes before the first request."""
    asked, tried, right = [problem(n // 3) for n in range(600)], 0, Given.right

    def counted(self: Given, *given_answer: Any) -> bool:
        nonlocal tried
        tried += 1
        return right(self, *given_answer)

    monkeypatch.setattr(Given, "right", counted)
    assert evaluate.Cell.of_file(asked).constant == 3 / 600
    assert tried <= (evaluate.CONSTANTS + 1) * len(asked)
