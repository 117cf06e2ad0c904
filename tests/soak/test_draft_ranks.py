"""Training drafters in two processes: the form that make test leaves out, 13 s of CPU."""

from pathlib import Path

from tests.cpu.draft.test_draft_processes import learn_as_one


def test_two_processes_learn_an_mla_draft_as_one(tmp_path: Path) -> None:
    learn_as_one(tmp_path, "mla")
