"""Exit codes of `perilune`: 0 is success, whatever went wrong is not. CliRunner does not go through `main`, so every
case here is a process of its own, some of the installed script."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forked import perilune

SCRIPT = Path(sys.executable).with_name("perilune")
NANO = Path(__file__).parents[3] / "perilune" / "bundled" / "kimi-nano"


def run(*args: object, lines: str = "") -> subprocess.CompletedProcess[str]:
    assert SCRIPT.is_file(), f"{SCRIPT} is not there: pip install -e ."
    command = [str(SCRIPT), *map(str, args)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)


def test_doctor_says_wrong_and_fails(tmp_path: Path) -> None:
    sound = perilune(tmp_path, "doctor", "kimi-nano")
    assert sound.returncode == 0 and "sound: " in sound.stdout, sound
    broken = Path(shutil.copytree(NANO, tmp_path / "nano"))
    (broken / "tiktoken.model").unlink()
    done = perilune(tmp_path, "doctor", broken)
    assert "wrong: " in done.stdout and done.returncode == 1, done
    done = perilune(tmp_path, "doctor", broken, "--json")
    assert json.loads(done.stdout)["wrong"] and done.returncode == 1, done
    odd = Path(shutil.copytree(NANO, tmp_path / "odd"))
    (odd / "generation_config.json").write_text('{"temperature": "hot"}')  # which serve refuses
    done = perilune(tmp_path, "doctor", odd)
    assert "wrong: " in done.stdout and "temperature must be" in done.stdout and done.returncode == 1, done


def sabotage() -> None:
    """Makes operations fail that do not fail here."""
    from perilune.ops.harness import build, check

    real = check.check
    check.check = lambda *a: iter([replace(v, failed="sabotaged") for v in real(*a)])
    build.sources = lambda: ["x.cpp"]
    build.library = lambda name: "x.cpp does not compile here"  # type: ignore[assignment]


def test_ops_fails_after_a_failed_check_or_build(tmp_path: Path) -> None:
    one = ("ops", "rmsnorm", "--check-only", "--case", "T=1,", "--device", "cpu")
    assert perilune(tmp_path, *one).returncode == 0
    checked = perilune(tmp_path, *one, before=sabotage)
    assert "FAILED" in checked.stdout and checked.returncode == 1, checked
    refused = perilune(tmp_path, *one, "--impl", "cuda")
    assert "no case of cuda was checked: for CUDA" in refused.stderr and refused.returncode == 0, refused
    assert perilune(tmp_path, *one, "--impl", "reference").returncode == 0
    built = perilune(tmp_path, "ops", "--build", before=sabotage)
    assert "does not compile" in built.stdout and built.returncode == 1, built


def test_wrong_names_are_one_line_with_the_right_one() -> None:
    done = run("serve", "--threads", "1")
    assert "Did you mean '--set threads=VALUE'?" in done.stderr and done.returncode == 2, done
    done = run("generate", "--kv-disk", "x")
    assert "Did you mean '--set kv_disk=VALUE'?" in done.stderr and done.returncode == 2, done
    done = run("ops", "--check-only")
    assert "need an operation NAME" in done.stderr and done.returncode == 2, done
    done = run("key", "--threads", "1")
    assert "No such option '--threads'.\n" in done.stderr and done.returncode == 2, done
    done = run("serve", "", "--port", "0")  # as from a script's variable that is not set: not the bundled model
    assert done.stderr.startswith("error: no model is named: MODEL is a") and done.returncode == 1, done


@pytest.mark.parametrize(("args", "said"), [
    ("serve --set max_num_seq=1", "did you mean 'max_num_seqs'?"),
    ("serve --config {}/keys.toml", "did you mean 'max_num_seqs'?"),
    ("serve --config {}/flat.toml", "table 'port', write it below [server]; known"),
    ("serve --config {}/utf16.toml", "not valid TOML"),
    ("serve --config {}/array.toml", "engine must be a table: begin it with [engine]"),
    ("generate -p hi --set seed=18446744073709551616", "seed must have at most 63 bits"),
    ("serve --set threads=100000", "threads must be at most 1024"),
    ("draft collect --out {}/keys.toml/corpus", "keys.toml/corpus: Not a directory"),
    ("draft mine --corpus {} --out {}/w", "or another directory is meant"),
    ("draft train --corpus {} --run {}/d --out {}/d", "--run and --out are both "),
    ("draft evaluate NANO", "is no draft's"),  # before minutes of answers
    ("draft evaluate NANO --json {}/none/x", "none is no directory"),
    ("draft evaluate NANO/drafter --lengths 3,,4", "must be whole numbers separated by commas"),
    ("draft evaluate NANO/drafter --users 1,513", "must be numbers from 1 to 512"),
    ("bench serve --plot {}/none/x.svg", "none is no directory"),
    ("bench decode --batch 16 --tokens 2", "raise --tokens"),
    ("bench convert --stream-gb 99999 --scratch {}", "--stream-gb 99999: at most "),
    ("bench convert --stream-gb 1 --scratch {}/left", "exists, perhaps left by a run"),
    ("bench decode --layers 5", "--layers: goes with --shape: leave it out"),
    ("convert kimi-nano {}/r --to bf16 --shard-gb inf", "inf is not in the range 0.001<=x"),
    ("convert kimi-nano {}/r --to bf16 --shard-gb nan", "NaN is no number"),
    ("bench drafts --rounds 0", "0 is not in the range x>=1"),
    ("bench drafts --requests 0", "0 is not in the range x>=1"),
    ("bench decode --kernels", "--kernels: goes with --shape: leave it out"),
    ("serve --uds {}/s --port 8001", "--port has no effect with uds: leave it out"),
    ("serve --files-gb 10", "--files-gb has no effect without files_dir"),
    ("serve --draft off --draft-tokens 3", "--draft-tokens has no effect with draft=off"),
    ("generate -p hi --set log_rejected_mb=5", "--set log_rejected_mb=5 has no effect without log_"),
    ("serve --config {}/idle.toml --chat-template x", "unknown chat template"),  # a file is shared
    ("convert kimi-nano {}/r --to bf16 --layout modelopt", "--layout has no effect without"),
    ("bench peers --cpu --compact", "--compact has no effect with --cpu"),
    ("draft train --corpus {} --run {}/d --out {}/d --window-share 0.5", "has no effect without --windows"),
    ("draft collect --out {}/c --timeout 9", "give its address with --url"),
    ("draft mine --corpus {} --out {}/w --groups 2", "--groups has no effect"),
    ("draft mine --rejected {} --out {}/w --length 2", "--length has no effect"),
    ("draft evaluate NANO/drafter --speed 0 --users 2", "--users has no effect"),
    ("ops --build --dtype float32", "--dtype has no effect"),
])  # fmt: skip
def test_wrong_input_is_said_at_once_without_a_traceback(args: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[engine]\nmax_num_seq = 1\n")
    (tmp_path / "left/perilune-stream").mkdir(parents=True)
    (tmp_path / "flat.toml").write_text("port = 1\n")
    (tmp_path / "array.toml").write_text("[[engine]]\nmax_num_seqs = 1\n")
    (tmp_path / "idle.toml").write_text('[server]\nport = 1\nuds = "x"\nfiles_gb = 2\n[engine]\nlog_rejected_mb = 5\n')
    (tmp_path / "utf16.toml").write_text("[engine]", "utf-16")
    done = perilune(tmp_path, *args.replace("{}", str(tmp_path)).replace("NANO", str(NANO)).split())
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr, done


def test_bench_decode_draws_the_placeholder_of_pictures(tmp_path: Path) -> None:
    """The prompts of 16 users have it: a model with a vision tower would refuse them."""
    done = perilune(tmp_path, "bench", "decode", "--batch", "16", "--tokens", "16")
    assert done.returncode == 0 and '"batch": 16' in done.stdout, done


def test_chat_from_a_pipe_fails_with_its_questions() -> None:
    lines = "What is 2 + 3?\n" + "word " * 200 + "\n"  # the second is longer than the context
    done = run("chat", "kimi-nano", "--max-model-len", "128", "--set", "threads=1", lines=lines)
    # Before it, on a machine that has no kernels yet, that they are being compiled.
    assert "5" in done.stdout and "\nerror: " in f"\n{done.stderr}" and done.returncode == 1, done


@pytest.mark.parametrize("args", [
    "convert /no/such /no/such/result --to bf16", "evaluate /no/such --count 2", "bench decode /no/such",
    "draft collect /no/such --out /no/such/corpus",
])  # fmt: skip
def test_a_model_that_is_not_there_fails_every_verb(args: str, tmp_path: Path) -> None:
    done = perilune(tmp_path, *args.split())
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done


def shorten(path: Path) -> None:
    """Writes kimi-nano's tokenizer with a token less."""
    lines = (NANO / "tiktoken.model").read_bytes().splitlines()
    (path / "tiktoken.model").write_bytes(b"\n".join(lines[:-1]))
    config = json.loads((NANO / "tokenizer_config.json").read_text())
    added = {str(int(id) - 1): token for id, token in config["added_tokens_decoder"].items()}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))


@pytest.mark.parametrize("verb", ["serve", "generate", "chat"])
def test_a_vocabulary_of_another_size_is_said_before_any_request(verb: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(NANO, tmp_path / "nano"))
    shorten(path)
    done = perilune(tmp_path, verb, path, *{"serve": ("--port", "0"), "generate": ("-p", "hi"), "chat": ()}[verb])
    assert done.returncode == 1 and "the tokenizer has 4095 tokens, config.json's vocab_size is 4096" in done.stderr, (
        done
    )


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_output_without_room_is_one_line(tmp_path: Path) -> None:
    done = perilune(tmp_path, "key", "a", before=full)
    assert done.returncode == 1 and done.stderr.startswith("error: No space left on device"), done


def shared() -> None:
    os.fchmod(1, 0o644)


def another_user() -> None:
    """Who may not enter the file's directory, if the tests run as root."""
    importlib.import_module("perilune.cli.key")  # as that user cannot
    shared()
    if os.getuid() == 0:
        os.setuid(65534)


def nowhere() -> None:
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)


@pytest.mark.parametrize("before", [None, shared, another_user, nowhere])
def test_a_key_file_that_others_may_read_is_named(tmp_path: Path, before: Callable[[], None] | None) -> None:
    done, file = perilune(tmp_path, "key", "a", before=before), tmp_path / "stdout"
    warned = [f"warning: {file} is readable by others: chmod 600 {file}"] if before in (shared, another_user) else []
    assert done.returncode == 0 and done.stderr.splitlines()[1:] == warned


def test_a_ledger_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    done = perilune(tmp_path, "bench", "decode", "/no/such", "--ledger", tmp_path / "stdout")
    assert done.returncode == 1 and "choose another directory with --ledger" in done.stderr, done


@pytest.mark.parametrize("verb", ["collect", "train", "capture", "mine"])
def test_an_output_that_cannot_be_made_is_said_before_the_work(verb: str, tmp_path: Path) -> None:
    given = ("--run", tmp_path / "run") if verb == "train" else ()
    corpus = () if verb == "collect" else ("--corpus", tmp_path)
    done = perilune(tmp_path, "draft", verb, *given, *corpus, "--out", "/proc/none/x")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: cannot write /proc/none/x: No such file"), done
    assert line.endswith("choose another directory with --out"), done


def test_wrong_usage_and_help(tmp_path: Path) -> None:
    assert perilune(tmp_path, "doctor", "--no-such-option").returncode == 2
    assert run("no-such-verb").returncode == 2
    assert run("--help").returncode == 0
