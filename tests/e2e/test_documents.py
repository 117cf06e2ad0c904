"""What README and examples/ say is run: programs, requests, the commands' spelling."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from perilune.cli.main import cli
from perilune.core.config import EngineConfig, ServerConfig, build, from_file
from runs.docs.references import pages
from tests.e2e.server import Server, needs_nano

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SAYS = {
    "stream.py": "347 + 589 = 936",
    "tools.py": "-> {'city': 'Paris', 'sky': 'sunny', 'celsius': 21}",
    "structured.py": "{'product': 'Blue lamp', 'price': 12.5}",
    "offline.py": "What is 1024 + 976? -> 1024 + 976 = 2000",
}


def snippets(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    elsewhere = {"pictures.py"}  # tests/cpu/engine/test_llm_media.py, with a model that sees
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS) | elsewhere


@needs_nano
@pytest.mark.parametrize("name", SAYS)
def test_examples(name: str, server: Server) -> None:
    assert SAYS[name] in output(sys.executable, str(ROOT / "examples" / name), server.url)


def test_the_example_configuration_is_valid() -> None:
    engine, server = from_file(ROOT / "examples/perilune.toml")
    assert build(EngineConfig, engine).max_num_seqs == 32 and build(ServerConfig, server).port == 8000


@needs_nano
def test_the_python_of_the_readme() -> None:
    (program,) = snippets(README, "python")
    assert output(sys.executable, "-c", program).endswith("-> 347 + 589 = 936\n")


@needs_nano
def test_the_request_of_the_readme(server: Server) -> None:
    (request,) = (s for s in snippets(README, "sh") if s.startswith("curl "))
    answer = json.loads(output("bash", "-c", request.replace("http://127.0.0.1:8000", server.url)))
    assert "936" in answer["choices"][0]["message"]["content"]


def commands(page: str) -> list[list[str]]:
    """`perilune ...` and `make ...` of a page's code, as words, without comments and what follows a pipe."""
    spans = [*re.findall(r"`((?:perilune|make) [^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))]
    for lines in (*snippets(page, "sh"), *re.findall(r"^    (?:perilune|make) .*$", page, re.M)):
        spans += [line.strip() for line in lines.replace("\\\n", " ").splitlines()]
    words = [shlex.split(span.split(" | ")[0], comments=True) for span in spans]
    return [w for w in words if len(w) > 1 and w[0] in ("perilune", "make")]


def wrong(words: list[str]) -> str | None:
    """Why a command is none: a verb, an option or a make target that does not exist."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        return next((f"no target {w}" for w in words[1:] if "=" not in w and w not in targets), None)
    command: Any = cli
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-") and rest[0] != "...":
        name = rest.pop(0)
        found = command.get_command(click.Context(command), name)
        if found is None:
            return f"no verb {name}"
        command = found
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"-h", "--help", "--version"}
    return next((f"no option {w}" for w in rest if w.startswith("-") and w.split("=")[0] not in known), None)


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    assert [(c, why) for c in commands(page.read_text()) if (why := wrong(c))] == []


def test_a_wrong_command_is_seen() -> None:
    page = (
        "`perilune serve --prot 1` `perilune draft teach` `make tset`\n```sh\nperilune bench decode --fast  # x\n```\n"
    )
    assert [wrong(c) for c in commands(page)] == [
        "no option --prot",
        "no verb teach",
        "no target tset",
        "no option --fast",
    ]
