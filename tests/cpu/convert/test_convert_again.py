"""A finished conversion: repeating it, what its checksums find, and the drafter that comes along."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from perilune import LLM, SamplingParams
from perilune.cli import doctor
from perilune.cli.main import cli
from perilune.convert import stream
from perilune.convert.journal import NAME as JOURNAL
from perilune.convert.stream import Conversion
from perilune.convert.target import Target
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.jsonfile import write_object
from perilune.formats import checksums, hub
from perilune.formats.checkpoint import INDEX
from perilune.formats.safetensors_file import SafetensorsFile
from perilune.text.chat import template_for
from perilune.text.tokenizer import Tokenizer
from tests import oracle
from tests.cpu.convert.test_convert import convert, digest
from tests.forked import perilune

NANO = hub.resolve_model(hub.BUNDLED)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("again") / "model"
    oracle.make(path, int4=True)
    (path / "tokenizer_config.json").write_text('{"made": "up"}')
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    return path


@pytest.fixture
def result(source: Path, tmp_path: Path) -> Path:
    """bf16 in several shards, with INT4 scales in a folder."""
    convert(source, tmp_path / "result", to="bf16")
    return tmp_path / "result"


def command(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def flip(file: Path) -> None:
    """One bit of the last value."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


# ---- repeating ---------------------------------------------------------------------------------------------------


def test_an_exact_conversion_into_one_file(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "n", to="nvfp4", sidecar=False)
    done = perilune(tmp_path, "convert", tmp_path / "n", tmp_path / "r", "--to", "bf16", "--device", "cpu")
    assert "  in 1 file; " in done.stderr and done.stderr.endswith(" layers converted, exact\n"), done


def test_the_script_repeated(source: Path, tmp_path: Path) -> None:
    again = ("convert", source, tmp_path / "r", "--to", "nvfp4", "--device", "cpu", "--threads", "1")
    first = perilune(tmp_path, *again)
    assert first.returncode == 0 and "layers converted" in first.stderr, first
    before = digest(tmp_path / "r")
    second = perilune(tmp_path, *again)
    assert second.returncode == 0 and "complete already" in second.stderr, second
    assert "layers converted" not in second.stderr and digest(tmp_path / "r") == before
    flip(tmp_path / "r/model.safetensors")
    third = perilune(tmp_path, *again)
    assert third.returncode == 1 and third.stderr.splitlines()[-1].startswith("error: "), third
    assert "'model.safetensors' does not have the SHA-256" in third.stderr and "remove the directory" in third.stderr


def test_every_file_has_its_checksum(source: Path, result: Path) -> None:
    files = {str(f.relative_to(result)) for f in result.rglob("*") if f.is_file()}
    kept = checksums.kept(result)
    assert kept.keys() == files - {"conversion.json"} and len([f for f in files if f.startswith("int4_scales/")]) > 0
    assert checksums.damage(result, kept) == {}
    again, first = convert(source, result, to="bf16"), convert(source, result.with_name("other"), to="bf16")
    assert again.layers == first.layers and again.sqnr_db == pytest.approx(first.sqnr_db, abs=1e-4)
    assert [name for name, _ in again.worst] == [name for name, _ in first.worst]


@pytest.mark.parametrize("name", ["model-00002-of-*.safetensors", "int4_scales/*.safetensors", "tokenizer_config.json"])
def test_damage_to_any_file_is_named(source: Path, result: Path, name: str) -> None:
    file = sorted(result.glob(name))[0]
    said = str(file.relative_to(result))
    flip(file)
    with pytest.raises(CheckpointError, match=f"'{said}' does not have the SHA-256.*remove the directory"):
        convert(source, result, to="bf16")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"'{said}' is missing"):
        convert(source, result, to="bf16")
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=f"'{said}' cannot be read: it is a FIFO"):
        convert(source, result, to="bf16")
    (result / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"'config.json' is missing; damaged too is 1 other file"):
        convert(source, result, to="bf16")


def test_another_request_for_the_same_directory(source: Path, result: Path, tmp_path: Path) -> None:
    oracle.make(tmp_path / "source", int4=True, num_hidden_layers=2)
    for path, options, words in (
        (source, {"to": "nvfp4"}, "differs in --to"),
        (source, {"to": "bf16", "sidecar": False}, "differs in --sidecar"),
        (source, {"to": "bf16", "shard_bytes": 7_000_000}, "differs in --shard-gb"),
        (tmp_path / "source", {"to": "bf16"}, "differs in SRC"),
    ):
        with pytest.raises(ConfigError, match=f"other options or another source.*{words}.*another directory"):
            convert(path, result, **options)  # type: ignore[arg-type]
    record = json.loads((result / "conversion.json").read_text())
    write_object(result / "conversion.json", {k: v for k, v in record.items() if k != "source"})  # as 0.1 wrote it
    with pytest.raises(ConfigError, match="differs in SRC"):
        convert(source, result, to="bf16")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "model.safetensors"])
def test_a_file_that_changed_makes_another_source(source: Path, tmp_path: Path, name: str) -> None:
    changed = Path(shutil.copytree(source, tmp_path / "source"))
    convert(changed, tmp_path / "r", to="nvfp4")
    if name == "model.safetensors":
        shutil.copy(oracle.make(tmp_path / "again", int4=True, seed=1).path / name, changed)  # the same names and sizes
    else:
        (changed / name).write_text('{"made": "again"}')
    with pytest.raises(ConfigError, match="differs in SRC"):
        convert(changed, tmp_path / "r", to="nvfp4")


def test_other_text_for_a_calibration(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").unlink()  # of no real tokenizer
    base = ["convert", tmp_path / "model", tmp_path / "r", "--to", "nvfp4", "--device", "cpu", "--calibrate"]
    assert command(*base, "--calibrate-tokens", "600").exit_code == 0
    done = command(*base, "--calibrate-tokens", "600")
    assert done.exit_code == 0 and "complete already" in done.stderr and "measuring" not in done.stderr
    other = command(*base, "--calibrate-tokens", "1400")
    assert isinstance(other.exception, ConfigError) and "--calibrate-tokens" in str(other.exception)


def test_a_journal_that_is_a_fifo(source: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / JOURNAL)
    with pytest.raises(CheckpointError, match="a FIFO, not a regular file"):
        convert(source, tmp_path / "r", to="bf16")


# ---- doctor ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compact(tmp_path: Path) -> Path:
    with Conversion(NANO, Target(to="int4-compact")) as conversion:
        conversion.run(tmp_path / "compact", threads=1)
    return tmp_path / "compact"


def findings(path: Path, **options: Any) -> list[str]:
    report = doctor.diagnose(path, "m", **options)
    assert all("\n" not in line and len(line) < 800 for line in doctor.page(report))
    return [f"{f.severity}: {f.text}" for f in report.findings]


def test_doctor_compares_checksums(compact: Path) -> None:
    done = command("doctor", compact)
    count = len(checksums.kept(compact))
    assert done.exit_code == 0 and f"SHA-256 of all {count} files" in done.stdout
    flip(compact / "model.safetensors")
    (wrong,) = findings(compact)
    assert wrong.startswith("wrong: 'model.safetensors' does not have the SHA-256")
    assert command("doctor", compact).exit_code == 1
    assert findings(compact, checksums=False) == [], "the damage is in a value that headers do not show"
    done = command("doctor", compact, "--no-checksums")
    assert done.exit_code == 0 and "not compared" in done.stdout
    flip(compact / "model.safetensors")
    (compact / "generation_config.json").write_text('{"temperature": 1.0}')  # which is allowed
    (warning,) = findings(compact)
    assert warning.startswith("warning: 'generation_config.json' does not have the SHA-256")
    assert "SHA-256" not in command("doctor", NANO).stdout


RECORDS: dict[str, Any] = {
    "up": {"sha256": {"../x": "0" * 64}},
    "absolute": {"sha256": {"/etc/passwd": "0" * 64}},
    "deep": {"sha256": {"a/b/c": "0" * 64}},
    "nul": {"sha256": {"a\0": "0" * 64}},
    "long": {"sha256": {"x" * 300: "0" * 64}},
    "flood": {"sha256": {"x" * 1_000_000: "0" * 64}},
    "no digest": {"sha256": {"config.json": "x" * 1_000_000}},
    "list": {"sha256": []},
    "many": {"sha256": {f"f{i}": "0" * 64 for i in range(20_000)}},
}


@pytest.mark.parametrize("record", [*RECORDS.values(), None], ids=[*RECORDS, "fifo"])
def test_hostile_records(tmp_path: Path, record: Any) -> None:
    path = Path(shutil.copytree(NANO, tmp_path / "nano", copy_function=os.symlink))
    if record is None:
        os.mkfifo(path / "conversion.json")
    else:
        (path / "conversion.json").write_text(json.dumps(record))
    (warning,) = findings(path)
    assert warning.startswith("warning: ") and "conversion.json" in warning


# ---- the drafter -------------------------------------------------------------------------------------------------


def acceptance(path: Path) -> tuple[tuple[int, ...], float]:
    """A greedy answer, and tokens per step while it was generated."""
    with LLM(path, threads=1, draft_tokens=4) as llm:  # a fixed number: none that depends on the time of a step
        tokenizer, template = Tokenizer.from_directory(path), template_for(path)
        asked = [{"role": "user", "content": "What is 12 * 34?"}]
        prompt = template.render_ids(tokenizer, asked, thinking=True)
        (done,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=150))
    return done.token_ids, len(done.token_ids) / (len(done.token_ids) - done.accepted_tokens)


def test_the_drafter_comes_along(compact: Path) -> None:
    kept = checksums.kept(compact)
    for file in (NANO / "drafter").iterdir():
        assert (compact / "drafter" / file.name).read_bytes() == file.read_bytes() and f"drafter/{file.name}" in kept
    assert "EAGLE-3" in doctor.diagnose(compact, "m").answers["draft"]
    answer, length = acceptance(compact)
    assert length > 2 and len(answer) > 20, (length, len(answer))


def test_copying_the_drafter_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    real, complete = stream._copy, Conversion._complete

    def count(file: Path, to: Path, *args: Any) -> Any:
        copied.append(to.name)
        return real(file, to, *args)

    def stop(self: Conversion, *args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_copy", count)
    monkeypatch.setattr(Conversion, "_complete", stop)
    with pytest.raises(KeyboardInterrupt), Conversion(NANO, Target(to="int4-compact")) as conversion:
        conversion.run(tmp_path / "r", threads=1)
    assert "model.safetensors" in copied
    copied.clear()
    flip(tmp_path / "r/drafter/config.json")
    monkeypatch.setattr(Conversion, "_complete", complete)
    with Conversion(NANO, Target(to="int4-compact")) as conversion:
        conversion.run(tmp_path / "r", threads=1)
    assert [name for name in copied if name in ("model.safetensors", "config.json")] == ["config.json"]
    assert checksums.damage(tmp_path / "r", checksums.kept(tmp_path / "r")) == {}


def broken(tmp_path: Path, change: Callable[[Path], None]) -> Path:
    path = Path(shutil.copytree(NANO, tmp_path / "nano"))
    change(path / "drafter")
    return path


def test_a_drafter_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = broken(tmp_path, lambda drafter: os.truncate(drafter / "model.safetensors", 1000))
    with pytest.raises(CheckpointError, match=r"drafter/model.safetensors is truncated.*remove"):
        Conversion(path, Target(to="bf16"))
    (wrong,) = findings(path)
    assert wrong.startswith("wrong: ") and "drafter/model.safetensors is truncated" in wrong
    shutil.copyfile(NANO / "drafter/model.safetensors", path / "drafter/model.safetensors")
    config = json.loads((NANO / "drafter/config.json").read_text())
    (path / "drafter/config.json").write_text(json.dumps(config | {"target_hidden_size": 512}))
    (wrong,) = findings(path)
    assert "was trained for a model of width 512" in wrong


def test_a_drafter_in_shards_keeps_its_index(tmp_path: Path) -> None:
    def shard(drafter: Path) -> None:
        file = (drafter / "model.safetensors").rename(drafter / "model-1.safetensors")
        write_object(drafter / INDEX, {"weight_map": dict.fromkeys(SafetensorsFile(file).tensors, file.name)})

    path = broken(tmp_path, shard)
    with Conversion(path, Target(to="bf16")) as conversion:
        assert INDEX in {file.name for file in conversion.drafter}
        before = conversion.fingerprint
    flip(path / "drafter/model-1.safetensors")
    with Conversion(path, Target(to="bf16")) as conversion:
        assert conversion.fingerprint != before


def test_a_folder_without_a_drafter_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = broken(tmp_path, lambda drafter: (drafter / "config.json").unlink())
    (warning,) = findings(path)
    assert warning.startswith("warning: ") and "drafter has no config.json" in warning
    done = command("convert", path, tmp_path / "r", "--to", "int4-compact", "--dry-run", "--device", "cpu")
    assert done.exit_code == 0 and "drafter has no config.json" in done.stderr
    with LLM(path, threads=1) as llm:
        assert any(key == "draft" and "drafter has no config.json" in why for key, _, why in llm.info.choices)
    assert "drafter has no config.json: no draft model is used" in caplog.text
    with pytest.raises(ConfigError, match="drafter: model"):
        LLM(path, drafter="/no/such")
