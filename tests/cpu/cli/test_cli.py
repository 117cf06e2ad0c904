"""The command line: how options, the config file and the fields of the configuration come together."""

import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from perilune.cli import generate, main, serve
from perilune.cli.bench import group as bench
from perilune.cli.draft import group as draft
from perilune.cli.shared import options, targets
from perilune.cli.shared.verbs import Verbs
from perilune.core.config import EngineConfig, ServerConfig, build
from perilune.core.errors import ConfigError, RequestError


def test_options_win_over_assignments_over_nothing_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[engine]\nmax_num_seqs = 8\nthreads = 3\nops = {a = "x"}\n[server]\nport = 9\n')
    engine, server = options.file_values(file)
    assert server == {"port": 9}
    given = {"max_num_seqs": 4, "device": None}
    values = options.engine_values(given, ("memory_fraction=0.5", "threads=2", "ops.b=reference"), engine)
    config = build(EngineConfig, values)
    assert (config.max_num_seqs, config.memory_fraction, config.threads, config.device) == (4, 0.5, 2, "auto")
    assert config.ops == {"a": "x", "b": "reference"}
    assert options.file_values(None) == ({}, {})


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("prefix_cache=false", "prefix_cache", False),
        ("prefix_cache=True", "prefix_cache", True),
        ("max_model_len=none", "max_model_len", None),
        ("max_model_len=128", "max_model_len", 128),
        ("qk_norm_eps=1e-6", "qk_norm_eps", 1e-6),
        ("dtype=bfloat16", "dtype", "bfloat16"),
        ("dtype=auto", "dtype", "auto"),
        ("memory_fraction=1", "memory_fraction", 1.0),
    ],
)
def test_assignments_take_the_type_of_their_field(text: str, key: str, value: object) -> None:
    values = options.engine_values({}, (text,), {})
    assert values == {key: value} and type(values[key]) is type(value)
    build(EngineConfig, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("threads", "KEY=VALUE"),
        ("thread=2", "unknown key"),
        ("ops=x", "--set ops=x: write ops.NAME=IMPL"),
        ("log_rejected=", "log_rejected is empty"),
        ("threads=two", "whole number"),
        ("memory_fraction=much", "number"),
        ("prefix_cache=1", "true or false"),
        ("dtype=int3", "float32"),
        ("threads=0", "at least 1"),
    ],
)
def test_bad_assignments_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(EngineConfig, options.engine_values({}, (text,), {}))


def test_help_comes_from_the_fields() -> None:
    text = " ".join(CliRunner().invoke(serve.command, ["--help"]).output.split())
    for words in ("port to listen on; 0 takes a free one [default: 8000]", "[auto|float32|bfloat16]", "prefix_cache"):
        assert words in text
    assert "[default: 64]" in text and "--api-key " not in text, "a key on a command line is visible to everyone"


def test_a_taken_port_names_the_remedy() -> None:
    with serve.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use: choose another with --port"):
            serve.listen("127.0.0.1", port)
    serve.listen("127.0.0.1", port).close()
    with pytest.raises(ConfigError, match="host"):
        serve.listen("no.such.host.invalid", 0)
    for name in ("my..host", "a" * 70):
        with pytest.raises(ConfigError, match="is no name of a host"):
            serve.listen(name, 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        serve.listen("192.0.2.1", 0)


def test_the_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    assert targets.key(file) == "s3cret" and capsys.readouterr().err == ""
    file.chmod(0o644)
    assert targets.key(file) == "s3cret"
    warning = capsys.readouterr().err
    assert "chmod 600" in warning and "s3cret" not in warning
    for bad in ("", "two words", "two\nlines"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="one key"):
            targets.key(file)
    with pytest.raises(ConfigError, match="cannot read"):
        targets.key(tmp_path / "absent")


def test_options_of_a_verb_reach_the_server_that_it_starts() -> None:
    given = {"dtype": "float32", "fp8_activations": True, "tp": None}
    assert targets.serve_options(given, ["threads=1"]) == [
        "--dtype",
        "float32",
        "--fp8-activations",
        "--set",
        "threads=1",
    ]
    assert targets.serve_options({"fp8_activations": False}, []) == ["--no-fp8-activations"]


def test_the_servers_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    config = ServerConfig(api_key_file=str(file))
    file.chmod(0o600)
    serve.check_access(config)
    assert not caplog.records
    file.chmod(0o644)
    serve.check_access(config)
    assert "chmod 600" in caplog.text and "s3cret" not in caplog.text
    for bad in ("", "two words", "two\nlines"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="key"):
            serve.check_access(config)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        serve.check_access(config)


def test_the_printed_address_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from perilune.core.messages import EngineInfo

    info = EngineInfo("m", 64, 512, (), 4, 16, 4, (("dtype", "float32", "[a] reason"),))
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        url = serve.address(sock, https=False)
        assert serve.address(sock, https=True) == url.replace("http:", "https:")
        serve.show_ready(Console(stderr=True), info, "m", sock, locked=True, https=False)
        port = sock.getsockname()[1]
    printed = capsys.readouterr().err
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in printed and "Authorization: Bearer" in printed
    assert "[a] reason" in printed


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_errors_are_one_line(verb: str, tmp_path: Path) -> None:
    extra = ["--port", "0"] if verb == "serve" else ["--prompt", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "perilune.cli.main", verb, str(tmp_path / "absent"), *extra],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1 and "absent" in done.stderr


def test_generate_wants_a_prompt() -> None:
    result = CliRunner().invoke(generate.command, [], input="", standalone_mode=False)
    assert "empty" in str(result.exception) and not isinstance(result.exception, click.UsageError)


def test_every_verb_has_its_line_and_its_file() -> None:
    groups = [main.cli, bench.command, draft.command]
    for group in groups:
        assert isinstance(group, Verbs)
        for name, line in group.verbs.items():
            command = group.get_command(click.Context(group), name)
            assert command is not None and command.help and line in CliRunner().invoke(group, ["--help"]).output
        if group.package != "perilune.cli":
            files = {p.stem for p in (Path(main.__file__).parent / group.package.rpartition(".")[2]).glob("[a-z]*.py")}
            assert files - {"group"} == set(group.verbs)
        assert CliRunner().invoke(group, ["no-such-verb"]).exit_code == 2


def test_a_list_of_verbs_costs_no_import_of_torch() -> None:
    script = (
        "import sys; from perilune.cli import main; main.cli(sys.argv[1:], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    for words in (["--help"], ["bench", "--help"], ["draft", "--help"]):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
        assert done.returncode == 0 and "Commands:" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_every_engine_option_goes_to_the_engine(verb: str) -> None:
    """Options that the verb did not know by name became sampling parameters, which was a TypeError."""
    asked = ["-p", "hi"] if verb == "generate" else []
    given = ["--draft-dtype", "fp8", "--expert-scales", "compact", "--max-tokens", "0"]
    result = CliRunner().invoke(main.cli, [verb, "kimi-nano", *asked, *given], standalone_mode=False)
    assert isinstance(result.exception, RequestError) and "max_tokens" in str(result.exception), result.exception


def test_a_misspelt_verb_names_the_right_one() -> None:
    for args, said in ((["serv"], "Did you mean 'serve'?"), (["bench", "decod"], "Did you mean 'decode'?")):
        done = CliRunner().invoke(main.cli, args)
        assert done.exit_code == 2 and said in done.output
    assert "Did you mean" not in CliRunner().invoke(main.cli, ["xyzzy"]).output
