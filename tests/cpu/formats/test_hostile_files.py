"""Model directories made to do harm: FIFOs as files, names that no file can have, headers that flood a terminal."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.cli import doctor
from perilune.convert.stream import Conversion
from perilune.convert.target import Target
from perilune.core.errors import CheckpointError, PeriluneError, shown
from perilune.formats import hub
from perilune.formats.checkpoint import INDEX, Checkpoint
from perilune.formats.served import require_served
from perilune.loading.survey import survey
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config
from perilune.server.service import read_generation_config
from perilune.text.chat import template_for
from perilune.text.tokenizer import Tokenizer
from tests.cpu.loading.test_load import CONFIG, put

NANO = hub.resolve_model(hub.BUNDLED)
SHARD = "model-00002-of-00003.safetensors"
LINE = 500  # characters of a message, besides the directory's own name


pytestmark = pytest.mark.timeout(120)  # nothing here may hang


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """The bundled model by links, any of which may be replaced."""
    path = tmp_path / "nano"
    shutil.copytree(NANO, path, copy_function=os.symlink)
    return path


def refused(call: Callable[[], object], *words: str) -> str:
    with pytest.raises(PeriluneError) as caught:
        call()
    return checked(str(caught.value), *words)


def checked(text: str, *words: str) -> str:
    assert len(text) < LINE + 300 and text.isprintable(), (len(text), text[:2000])
    for word in words:
        assert word in text, text
    return text


def examined(path: Path) -> doctor.Report:
    """What doctor finds, each line of it of bounded length and printable."""
    report = doctor.diagnose(path, "m")
    lines = doctor.page(report)
    assert len(lines) < 80
    for line in lines:
        checked(line)
    return report


def load(path: Path) -> None:
    """What loading does before it reads values."""
    config = KimiConfig.from_directory(path)
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint:
        survey(checkpoint, config)


def wrong(path: Path, *words: str) -> None:
    (finding,) = [f for f in examined(path).findings if f.severity == "wrong"]
    checked(str(finding), *words)


# ---- things that are no files ------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def plug(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name is at most 107 bytes
        try:
            s.bind(path.name)
        finally:
            os.chdir(before)


def directory(path: Path) -> None:
    path.mkdir()


KINDS = {"a FIFO": fifo, "a device": zeros, "a socket": plug, "a directory": directory}
READERS: dict[str, Callable[[Path], object]] = {
    SHARD: Checkpoint.open,
    INDEX: Checkpoint.open,
    "config.json": KimiConfig.from_directory,
    "hf_quant_config.json": KimiConfig.from_directory,
    "tiktoken.model": Tokenizer.from_directory,
    "tokenizer_config.json": Tokenizer.from_directory,
    "chat_template.jinja": template_for,
    "generation_config.json": read_generation_config,
    "drafter/config.json": lambda path: Eagle3Config.from_directory(path / "drafter"),
    "drafter/model.safetensors": lambda path: Checkpoint.open(path / "drafter"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(nano: Path, kind: str) -> None:
    for name, read in READERS.items():
        (nano / name).unlink(missing_ok=True)
        KINDS[kind](nano / name)
        refused(partial(read, nano), name.rpartition("/")[2], f"{kind}, not a regular file")
        if (nano / name).is_dir():
            (nano / name).rmdir()
        else:
            (nano / name).unlink()
        if (NANO / name).exists():
            (nano / name).symlink_to(NANO / name)


@pytest.mark.parametrize("name", [SHARD, "config.json", "tiktoken.model", "generation_config.json"])
def test_doctor_names_a_fifo(nano: Path, name: str) -> None:
    (nano / name).unlink()
    os.mkfifo(nano / name)
    wrong(nano, name, "a FIFO, not a regular file")


def test_other_files_of_a_directory_may_be_no_files(nano: Path, tmp_path: Path) -> None:
    for name in ("preprocessor_config.json", "conversion.json"):
        (nano / name).unlink(missing_ok=True)
        os.mkfifo(nano / name)
        assert any(name in f.text for f in examined(nano).findings)
        (nano / name).unlink()
    os.mkfifo(nano / "notes.txt")
    with Conversion(nano, Target(to="int4-compact")) as conversion:
        assert "notes.txt" not in {f.name for f in conversion.small_files()}


def test_a_file_without_end_is_not_read(nano: Path) -> None:
    (nano / "config.json").unlink()
    with (nano / "config.json").open("wb") as f:
        f.truncate(1 << 40)
    refused(lambda: KimiConfig.from_directory(nano), "config.json", "1,099,511,627,776 bytes")


# ---- names -------------------------------------------------------------------------------------------------------

NAMES = {
    "long": "x" * 300 + ".safetensors",
    "long in bytes": "\u6708" * 90 + ".safetensors",
    "nul": "a\0b.safetensors",
    "newline": "a\nb.safetensors",
    "up": "../model.safetensors",
    "parent": "..",
    "absolute": "/etc/model.safetensors",
    "surrogate": "a\ud800.safetensors",
    "flood": "y" * 1_000_000,
    "number": 7,
    "list": ["z" * 1_000_000],
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_of_shards(nano: Path, name: Any) -> None:
    index = json.loads((NANO / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    (nano / INDEX).unlink()
    (nano / INDEX).write_text(json.dumps(index))
    refused(lambda: Checkpoint.open(nano), INDEX, "not a .safetensors file name of this directory")
    wrong(nano, "not a .safetensors file name of this directory")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~no-such-user/model", "x/" * 3000])
def test_names_of_models(name: str) -> None:
    refused(lambda: hub.resolve_model(name), "does not exist")
    assert not hub.is_repository(name)


# ---- floods ------------------------------------------------------------------------------------------------------


def test_shown() -> None:
    assert shown("plain") == "plain" and shown(7) == "7" and shown(["a", None]) == "['a', None]"
    assert shown("a\nb\x1b[31m\ud800") == r"a\nb\x1b[31m\ud800"
    assert shown("x" * 100) == "x" * 52 + "..." + "x" * 25 and len(shown("\n" * 100)) == 80
    assert shown("ab" * 99, 10) == "ababab...b" or len(shown("ab" * 99, 10)) == 10
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    assert len(shown(nested)) <= 80 and len(shown({"k" * 10**6: ["v" * 10**6] * 1000})) <= 80
    assert len(shown(10**4000)) <= 80


LONG = "w" * 200_000
NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]
HUGE = 10**4000


def header(path: Path, entries: dict[str, Any], data: int = 0) -> Path:
    text = json.dumps(entries).encode()
    path.mkdir(exist_ok=True)
    with (path / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + data)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


HEADERS: dict[str, dict[str, Any]] = {
    "a name": {LONG: entry()},
    "a name and no description": {LONG: 3},
    "control characters": {"\x1b]0;title\x07\n" * 1000: entry(dtype="?")},
    "a surrogate": {"\ud800": entry(dtype="\ud800")},
    "a dtype": {"a": entry(dtype=LONG)},
    "a nested dtype": {"a": entry(dtype=NESTED)},
    "a shape": {"a": entry(shape=[1] * 100_000)},
    "a nested shape": {"a": entry(shape=NESTED)},
    "a text as shape": {"a": entry(shape=LONG)},
    "sizes beyond any": {"a": entry(shape=[HUGE] * 8)},
    "offsets": {"a": entry(data_offsets=[0] * 100_000)},
    "offsets beyond any": {"a": entry(data_offsets=[0, HUGE])},
    "an overlap": {LONG: entry(), LONG + "2": entry(data_offsets=[2, 6])},
    "metadata": {"__metadata__": {LONG: LONG}, "a": entry()},
    "many names": {f"{i}{'v' * 300}": entry(shape=[0], data_offsets=[0, 0]) for i in range(12_345)},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path: Path, name: str) -> None:
    path = header(tmp_path / "m", HEADERS[name], data=4 * (name in ("a name", "metadata")))
    refused(lambda: load(path))
    examined(path)


def test_long_lists_are_counted(tmp_path: Path) -> None:
    report = examined(header(tmp_path, HEADERS["many names"]))
    assert any("holds 12,345 tensors (" in f.text and "and 12,342 more" in f.text for f in report.findings)


def test_many_shards(tmp_path: Path) -> None:
    names = [f"model-{i}.safetensors" for i in range(1000)]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))
    assert any("lacks 1,000 shards (" in f.text for f in examined(tmp_path).findings)
    for name in names:
        (tmp_path / name).write_bytes(b"short")
    report = examined(tmp_path)
    assert len(report.findings) < 20 and any("and 992 more" in f.text for f in report.findings)


CONFIGS: dict[str, dict[str, Any]] = {
    "architectures": {"architectures": [LONG]},
    "architectures nested": {"architectures": NESTED},
    "model_type": {"model_type": LONG},
    "hidden_size": {"hidden_size": LONG},
    "hidden_size nested": {"hidden_size": NESTED},
    "hidden_size huge": {"hidden_size": HUGE},
    "hidden_act": {"hidden_act": LONG},
    "rope_scaling": {"rope_scaling": LONG},
    "rope type": {"rope_scaling": {"type": LONG}},
    "eos": {"eos_token_id": LONG},
    "many eos": {"eos_token_id": list(range(100_000))},
    "many experts": {"num_hidden_layers": 1000, "n_routed_experts": 10_000},
    "bos": {"bos_token_id": HUGE},
    "quantisation": {"quantization_config": {"quant_method": LONG}},
    "quantisation text": {"quantization_config": LONG},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [LONG]}},
    "groups": {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {LONG: LONG},
        }
    },
    "a list as strategy": {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
                "g": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": [LONG]}},
            },
        }
    },
    "draft": {"architectures": ["LlamaForCausalLMEagle3", LONG], "eagle_config": {LONG: LONG}},
    "many draft keys": {"eagle_config": {str(i): i for i in range(10_000)}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(tmp_path: Path, name: str) -> None:
    given = {"model.norm.weight": torch.ones(8)}
    examined(put(tmp_path, given, CONFIG | CONFIGS[name]))
    if "draft" in name:
        refused(lambda: Eagle3Config.from_directory(tmp_path))
    elif name != "bos":
        refused(lambda: load(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"added_tokens_decoder": {LONG: {"content": "x"}}}),
        json.dumps({"added_tokens_decoder": {"1": {"content": LONG}}}),
        json.dumps({"added_tokens_decoder": NESTED}),
        json.dumps({"added_tokens_decoder": {"3841": {"content": "a\ud800"}}}),
        json.dumps({"added_tokens_decoder": {}, "chat_template": LONG, "bos_token": LONG}),
    ],
)
def test_tokenizers(nano: Path, text: str) -> None:
    (nano / "tokenizer_config.json").unlink()
    (nano / "tokenizer_config.json").write_text(text)
    assert examined(nano).wrong


def test_other_texts(nano: Path) -> None:
    for name, data in (
        ("generation_config.json", {LONG: LONG}),
        ("generation_config.json", {"temperature": LONG}),
        ("generation_config.json", {"temperature": HUGE}),
        ("preprocessor_config.json", {"media_proc_cfg": {"patch_size": NESTED, "sample_fps": LONG}}),
        ("preprocessor_config.json", {"media_proc_cfg": LONG}),
    ):
        file = nano / name
        before = os.readlink(file) if file.is_symlink() else None
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(data))
        examined(nano)
        if "temperature" in data:
            refused(lambda: read_generation_config(nano), "temperature")
        file.unlink()
        if before:
            file.symlink_to(before)


def test_a_sound_directory_is_still_sound(nano: Path) -> None:
    assert not examined(nano).wrong
    with Checkpoint.open(nano) as checkpoint, pytest.raises(CheckpointError, match="is missing"):
        checkpoint.info("no")
