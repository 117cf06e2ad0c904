"""What a package of the checkout needs and contains; tests/e2e/test_wheel.py installs one."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import perilune
from perilune.bench import ledger
from tests.cpu.house.test_imports import FILES, ROOT, imports_in, name_of

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]


IMPORTED_AS = {"pillow": "PIL"}  # what is imported under another name


def distributions(requirements: list[str]) -> set[str]:
    """The names under which what is required is imported."""
    names = (re.split(r"[<>=\[ ]", r)[0].replace("-", "_") for r in requirements)
    return {IMPORTED_AS.get(name, name) for name in names}


def test_the_ledger_is_the_checkouts_wherever_a_bench_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (ledger.DEFAULT / "decode.jsonl").is_file()


def test_what_the_package_imports_is_declared_and_training_alone_needs_its_extra() -> None:
    needed = distributions(PROJECT["dependencies"])
    extras = {name: distributions(some) for name, some in PROJECT["optional-dependencies"].items()}
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        for target in imports_in(path):
            top = target.split(".")[0]
            if top not in (*sys.stdlib_module_names, "perilune"):
                rooms.setdefault(top, set()).add(name_of(path).split(".")[0])
    assert rooms.pop("llama_cpp") == {"bench"}  # built by runs/llama-cpp.sh
    assert {name.partition("_")[0] for name in extras["otel"]} == {"opentelemetry"}  # one name for several packages
    assert rooms.pop("opentelemetry") == {"server"}
    assert rooms.pop("av") == {"media"} and extras["video"] == {"av"}  # in the worker alone, when a video comes
    assert rooms.pop("humming") == {"bench"}  # a peer, timed where it is installed; no part of the product imports it
    assert set(rooms) <= needed | extras["draft"] | extras["bench"]
    assert needed <= set(rooms), "nothing imports a dependency"
    assert {top for top in rooms if rooms[top] == {"draft"}} == extras["draft"]
    assert {top for top in rooms if rooms[top] <= {"bench", "evals"} and top not in needed} == extras["bench"]


def test_a_missing_extra_is_one_line_with_the_remedy() -> None:
    code = """
import sys
sys.modules["safetensors"] = None
from perilune.cli.main import main
for verb in ("train", "collect"):
    sys.argv[1:] = ["draft", verb]
    try:
        main()
    except SystemExit as e:
        print(e.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1\n1\n"
    assert done.stderr == 2 * "error: making drafters needs safetensors: pip install safetensors\n"


def test_the_package_is_typed_and_says_what_it_is() -> None:
    assert (ROOT / "py.typed").read_text() == ""
    assert "Typing :: Typed" in PROJECT["classifiers"]
    changes = (ROOT.parent / "CHANGELOG.md").read_text()
    assert f"## {perilune.__version__}" in changes, "CHANGELOG.md has no entry for this version"


def test_the_image_is_made_of_files_that_exist_and_starts_a_server() -> None:
    from perilune.cli import serve

    lines = (ROOT.parent / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((ROOT.parent / word).exists() for word in copied)
    parts = [ast.literal_eval(line.split(" ", 1)[1]) for line in lines if line.startswith(("ENTRYPOINT", "CMD"))]
    assert parts[0] == ["perilune"] and parts[1][0] == "serve"
    assert serve.command.make_context("serve", parts[1][1:]).params["host"] == "0.0.0.0"


def test_the_makefile_names_tests_that_exist() -> None:
    named = re.findall(r"tests/\S+", (ROOT.parent / "Makefile").read_text())
    assert len(named) > 8 and [name for name in named if not (ROOT.parent / name).exists()] == []
