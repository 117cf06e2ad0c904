"""`perilune serve --synthetic`: random weights of a shape over HTTP, marked wherever answers come from them."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import QUESTION, Server, needs_nano

pytestmark = needs_nano
SERVE = [sys.executable, "-m", "perilune.cli.main", "serve"]
OPTIONS = ("--synthetic", "tiny", "--port", "0", "--device", "cpu", "--max-model-len", "512")


@pytest.fixture(scope="module")
def synthetic() -> Iterator[Server]:
    server = Server("--declared-acceptance", "2.5", "--draft-tokens", "3", command=[*SERVE, *OPTIONS])
    directory = next(line for line in server.lines if "draft model in" in line).split("draft model in ")[1].strip()
    yield server
    server.stop(signal.SIGTERM)
    assert not Path(directory).parent.exists()


def test_answers_are_marked_and_bring_what_was_declared(synthetic: Server) -> None:
    marked = "synthetic: random weights of tiny, 4 of 4 layers; declared acceptance 2.5"
    (model,) = synthetic.openai.models.list().data
    assert model.id == "synthetic-tiny"
    assert (model.model_extra or {})["declared_acceptance"] == 2.5
    answer = synthetic.openai.chat.completions.create(
        model=model.id, messages=QUESTION, max_tokens=200, extra_body={"ignore_eos": True}
    )
    assert answer.system_fingerprint == marked
    assert answer.usage is not None and answer.usage.completion_tokens == 200
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.model_extra is not None
    assert answer.usage.completion_tokens_details.model_extra["acceptance_length"] == pytest.approx(2.5, abs=0.05)
    for chunk in synthetic.openai.completions.create(model=model.id, prompt="hello", max_tokens=20, stream=True):
        assert chunk.system_fingerprint == marked
    health = synthetic.get("/health").json()
    assert health == {
        "status": "ok", "synthetic": "random weights of tiny, 4 of 4 layers", "declared_acceptance": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(("options", "words"), [
    (["kimi-nano", "--declared-acceptance", "2"], "declared_acceptance is for random weights"),
    (["kimi-nano", "--synthetic", "tiny"], "not both"),
    (["--layers", "2"], "belongs to --synthetic"),
    (["--synthetic", "kimi-k9"], "known: kimi-k2.5, tiny"),
    (["--synthetic", "tiny", "--layers", "3", "--declared-acceptance", "2"], "needs the draft model"),
])  # fmt: skip
def test_what_does_not_go_together_is_one_line(options: list[str], words: str) -> None:
    command = [*SERVE, *options, "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2) and words in done.stderr and "Traceback" not in done.stderr, done.stderr
