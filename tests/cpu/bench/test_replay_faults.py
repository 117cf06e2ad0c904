"""`bench replay` on lines and endpoints that are wrong: one line that says what, and a failed command."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from perilune.bench.trace_formats import sessions_of
from perilune.bench.traces import read
from perilune.cli.main import cli
from perilune.core.errors import ConfigError, EngineError
from tests.fake_endpoint import FakeEndpoint, refusal

SMALL = ("--scale", "0.01", "--speed", "0", "--sessions", "2", "--turns", "2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input_length": 4}\n\n{"input_le', "line 3 is no JSON"),
        ('\n[]', "line 2 is no object"),
        (r'{"text": "a\ud800b"}', "line 1 is no JSON: .*surrogates"),
        (r'{"input_length": 20, "hash_ids": ["\uDFFF"]}', "line 1 is no JSON: .*surrogates"),
        (r'{"session_id": "s", "turns": [{"text": 5}]}', "line 1 of the trace: text must be a string"),
        ('{"prompt": "x"}', "line 1 of the trace: input_length must be there, or one of text_input, messages"),
    ],
)  # fmt: skip
def test_a_line_is_named_as_an_editor_counts(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        sessions_of(read(tmp_path / "t.jsonl"))


def test_whole_pairs_of_surrogates_are_text(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(r'{"text": "\ud83d\ude00"}')
    (session,) = sessions_of(read(tmp_path / "t.jsonl"))
    assert session.turns[0].pieces[0].text == "\U0001f600"


def test_an_endpoint_that_answers_nothing_fails_the_command(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: refusal(429, "slow down")
    with pytest.raises(EngineError, match=r"no request was answered, 2 failed; the first: .* answered 429: slow down"):
        CliRunner().invoke(cli, ["bench", "replay", "agents", fake.url, *SMALL], catch_exceptions=False)
