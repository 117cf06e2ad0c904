"""`perilune kv clear`."""

from pathlib import Path

from click.testing import CliRunner

from perilune.cli.main import cli
from perilune.core.errors import ConfigError
from perilune.kv.disk import Directory
from perilune.kv.tiers import Name


def test_clear_deletes_blocks_and_nothing_else(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "kv", b"m" * 16, 4096)
    directory.write(Name(b"d" * 16, b"f" * 16), memoryview(bytes(4096)), 0)
    refused = CliRunner().invoke(cli, ["kv", "clear", str(tmp_path / "kv")])
    assert isinstance(refused.exception, ConfigError) and "in use" in str(refused.exception)
    (tmp_path / "kv" / "mine.kv" / "notes").mkdir(parents=True)
    directory.close()
    done = CliRunner().invoke(cli, ["kv", "clear", str(tmp_path / "kv")])
    assert done.exit_code == 0 and done.output == "deleted 1 blocks, 0.00 GB\n"
    wrong = CliRunner().invoke(cli, ["kv", "clear", str(tmp_path)])
    assert isinstance(wrong.exception, ConfigError) and "no directory of KV blocks" in str(wrong.exception)
    unknown = CliRunner().invoke(cli, ["kv", "clear", "~no-user"])
    assert isinstance(unknown.exception, ConfigError) and "there is no such user" in str(unknown.exception)
