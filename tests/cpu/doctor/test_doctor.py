"""`perilune doctor`: healthy checkpoints are found sound, each kind of damage gives its line, nothing big is read."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from perilune.bench import shapes
from perilune.cli import doctor
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.doctor import tensors as weights_examine
from perilune.doctor.finding import Finding
from perilune.engine.fit import demand, model_of
from perilune.formats import hub, int4, int4_compact, nvfp4
from perilune.formats.checkpoint import INDEX
from perilune.formats.safetensors_file import DTYPES
from perilune.model.config import KimiConfig
from perilune.model.names import expected
from perilune.plan import memory
from tests.cpu.loading.test_load import CONFIG, EXPERT, put, quantised

NANO = hub.resolve_model(hub.BUNDLED)
SHARD = "model-00002-of-00003.safetensors"
CODES = {dtype: code for code, dtype in DTYPES.items()}


@pytest.fixture
def nano(tmp_path):
    """A copy of the bundled model, in which anything may be broken."""
    return Path(shutil.copytree(NANO, tmp_path / "nano"))


def wrong(path):
    """What is wrong with a directory, worst first; each finding is one line."""
    report = doctor.diagnose(path, "m")
    assert all("\n" not in str(f) for f in report.findings)
    return [f for f in report.findings if f.severity == "wrong"]


def one(path, *words):
    (finding,) = wrong(path)
    for word in words:
        assert word in str(finding), str(finding)


def change(path, **values):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (data | values).items() if v is not ...}))


def rewrite(file, edit):
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def run(*arguments):
    result = CliRunner().invoke(doctor.command, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_healthy_checkpoint_prints_a_short_page(nano):
    code, page = run(nano)
    assert code == 0 and len(page.splitlines()) < 45
    assert "wrong" not in page and "warning" not in page
    assert "sound: 888 tensors" in page and "values of all tensors" in page
    assert "router bias          float32" in page and "weight_shape         int64" in page
    code, text = run(nano, "--json")
    data = json.loads(text)
    assert code == 0 and not data["wrong"] and data["findings"] == []
    assert len(data["plan"]) == len(memory.GPUS) * len(memory.COUNTS) * 4 and all(row["fits"] for row in data["plan"])
    assert data["answers"]["stop tokens"].endswith("(config.json: 3842)")


def test_the_worst_comes_first(nano):
    change(nano / "config.json", eos_token_id=3846)
    (nano / SHARD).write_bytes((nano / SHARD).read_bytes()[:-1])
    shutil.copyfile(nano / SHARD, nano / "left-over.safetensors")
    code, page = run(nano)
    assert code == 1
    assert [line.split(":")[0] for line in page.splitlines()[1:4]] == ["wrong", "warning", "warning"]
    assert "sound" not in page and "What holds it" not in page  # the weights' size is not known
    assert run(nano, "--json")[0] == 1


def test_a_repository_is_checked_by_its_headers(nano, monkeypatch):
    @contextlib.contextmanager
    def headers(name, *, revision):
        assert (name, revision) == ("org/tiny", "v1")
        yield nano

    monkeypatch.setattr(hub, "headers", headers)
    code, page = run("org/tiny", "--revision", "v1")
    assert code == 0 and "888 tensors by name, shape and type; vocabulary of 4,096" in page
    assert hub.is_repository("org/tiny") and not hub.is_repository(str(nano)) and not hub.is_repository("kimi-nano")
    with pytest.raises(ConfigError, match="does not exist"):
        run("no-such-model")


def test_damaged_shards(nano):
    whole = (nano / SHARD).read_bytes()
    (nano / SHARD).write_bytes(whole[:-1000])
    one(nano, SHARD, "truncated", "download it again")
    (nano / SHARD).write_bytes(whole + b"x")
    one(nano, SHARD, "damaged")
    (nano / SHARD).write_bytes(whole[:20] + b"{{{" + whole[23:])
    one(nano, SHARD, "not valid JSON")
    (nano / SHARD).write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
    one(nano, SHARD, "header of")
    (nano / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n")
    one(nano, SHARD, "is a Git LFS pointer, not the file itself: run `git lfs pull`")
    assert "download" not in str(wrong(nano)[0])
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    first, second = [v for k, v in header.items() if k != "__metadata__"][:2]
    first["data_offsets"], second["data_offsets"] = [0, 8], [4, 12]
    first["shape"] = second["shape"] = [4]
    first["dtype"] = second["dtype"] = "BF16"
    text = json.dumps(header).encode()
    (nano / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    one(nano, SHARD, "overlap")
    (nano / SHARD).unlink()
    one(nano, SHARD, "lacks 1 shard", "repeat the download")


def test_index_against_shards(nano):
    index = nano / INDEX
    placed = json.loads(index.read_text())["weight_map"]
    name = next(n for n, shard in placed.items() if shard == SHARD)
    change(index, weight_map=placed | {name: "model-00001-of-00003.safetensors"})
    first, second = wrong(nano)
    assert "places 1 tensor" in first.text and "hold 1 tensor" in second.text and name in first.text
    change(index, weight_map={k: v for k, v in placed.items() if k != name})
    one(nano, "hold 1 tensor", name)
    change(index, weight_map=placed | {name: "../elsewhere.safetensors"})
    assert "not a .safetensors file name" in wrong(nano)[0].text
    change(index, weight_map=placed, metadata={"total_size": 5})
    shutil.copyfile(nano / SHARD, nano / "model-00009-of-00009.safetensors")
    report = doctor.diagnose(nano, "m")
    assert [f.severity for f in report.findings] == ["warning", "warning"]
    assert "counts 5 bytes" in report.findings[0].text and "model-00009" in report.findings[1].text
    index.unlink()
    one(nano, "holds neither")


def test_tensors_against_the_configuration(nano):
    name = "language_model.model.layers.3.input_layernorm.weight"
    file = nano / json.loads((nano / INDEX).read_text())["weight_map"][name]

    def swap(make):
        shutil.copyfile(NANO / file.name, file)
        rewrite(file, lambda t: t.update({name: make(t[name])}))

    swap(lambda t: t.half()[:10])
    one(nano, name, "has shape [10], config.json asks for [384]")
    swap(lambda t: t.int())
    one(nano, name, "is int32, not")
    swap(lambda t: t * float("nan"))
    one(nano, name, "not finite")
    shutil.copyfile(NANO / file.name, file)
    change(nano / INDEX, weight_map={**json.loads((nano / INDEX).read_text())["weight_map"], "extra.weight": file.name})
    rewrite(file, lambda t: t.update({"extra.weight": torch.ones(1)}))
    one(nano, "extra.weight", "no part of the model")
    config = json.loads((nano / "config.json").read_text())
    change(nano / "config.json", text_config=config["text_config"] | {"num_hidden_layers": 7})
    assert "lacks" in wrong(nano)[0].text and "layers.6" in wrong(nano)[0].text


@pytest.mark.parametrize("sampled", [False, True])
def test_scales_that_are_not_finite(tmp_path, monkeypatch, sampled):
    """Whether everything is looked at or, in a large checkpoint, a sample in which the damage happens to be."""
    if sampled:
        monkeypatch.setattr(weights_examine, "SAMPLED_BYTES", 1)
    given = {n: torch.ones(s) for n, s in expected(KimiConfig.from_dict(CONFIG)).items()}
    experts = [n.removesuffix(".weight") for n in given if ".experts." in n and "shared" not in n]
    for module, suffix, value, says in (
        (int4, "weight_scale", float("nan"), "not finite"),
        (int4, "weight_shape", 5, "says [5, 5]"),
        (int4_compact, "weight_scale", 0, "scales of 0"),
        (nvfp4, "weight_scale", float("nan"), "not finite"),
        (nvfp4, "weight_scale_2", float("inf"), "not finite"),
    ):
        tensors = quantised(given, *experts, module=module)
        tensors[f"{EXPERT}.{suffix}"] = torch.full(tensors[f"{EXPERT}.{suffix}"].shape, value).to(
            tensors[f"{EXPERT}.{suffix}"].dtype
        )
        put(tmp_path, tensors)
        findings = [f for f in wrong(tmp_path) if "token" not in f.text]  # there are no tokenizer's files
        assert len(findings) == 1 and f"{EXPERT}.{suffix}" in findings[0].text and says in findings[0].text


def test_config_and_quantisation(nano):
    config = json.loads((nano / "config.json").read_text())
    block = {"quant_method": "awq"}
    change(nano / "config.json", text_config=config["text_config"] | {"quantization_config": block})
    one(nano, "'awq' is not served")
    change(nano / "config.json", text_config=config["text_config"] | {"hidden_size": "wide"})
    one(nano, "text_config.hidden_size")
    (nano / "config.json").write_text("{")
    one(nano, "config.json is not valid JSON")
    (nano / "config.json").unlink()
    one(nano, "config.json does not exist")


def test_vocabulary_and_template(nano):
    lines = (nano / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (nano / "tiktoken.model").write_bytes(b"".join(lines[:-1]))
    texts = [f.text for f in wrong(nano)]
    assert any("outside the control slots" in t for t in texts), texts
    shutil.copyfile(NANO / "tiktoken.model", nano / "tiktoken.model")
    added = json.loads((nano / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    change(
        nano / "tokenizer_config.json",
        added_tokens_decoder={k: v for k, v in added.items() if v["content"] not in ("<think>", "<|im_middle|>")},
    )
    one(nano, "does not name the control tokens <|im_middle|>, <think>")
    (nano / "tokenizer_config.json").unlink()
    one(nano, "has no tokenizer_config.json")
    shutil.copyfile(NANO / "tokenizer_config.json", nano / "tokenizer_config.json")
    config = json.loads((nano / "config.json").read_text())
    text = config["text_config"]
    change(nano / "config.json", eos_token_id=99_999)
    one(nano, "eos_token_id 99999", "outside the vocabulary")
    change(nano / "config.json", eos_token_id=3846, pad_token_id=3850)
    report = doctor.diagnose(nano, "m")
    assert [f.severity for f in report.findings] == ["warning", "warning"]
    assert "pad_token_id 3850" in report.findings[0].text and "no stop token" in report.findings[1].text
    change(nano / "config.json", eos_token_id=3842, pad_token_id=4095)
    for name in (nano / "generation_config.json", nano / "preprocessor_config.json"):
        name.write_text("[")
        one(nano, name.name, "JSON")
        name.unlink()
    (nano / "chat_template.jinja").write_text("{% if preserve_thinking %}{{ tools | tojson(separators=(',', ':')) }}")
    told = doctor.diagnose(nano, "m").answers["chat template"]
    assert "chat_template.jinja, 69 bytes, sha256 " in told and "kimi-k2.6" in told
    # A vocabulary of another size than the embedding: one finding for it, beside those of the tensors.
    change(nano / "config.json", text_config=text | {"vocab_size": 4104})
    assert any("4096 tokens, config.json's vocab_size is 4104" in f.text for f in wrong(nano))


def test_what_else_the_files_say(nano):
    change(nano / "config.json", media_placeholder_token_id=3861)
    processor = {"media_proc_cfg": {"patch_size": 16, "in_patch_limit": 16384}}
    (nano / "preprocessor_config.json").write_text(json.dumps(processor))
    told = doctor.diagnose(nano, "m").answers
    assert (
        "patch_size=16 (known: 14)" in told["preprocessor_config"]
        and "sample_fps absent" in told["preprocessor_config"]
    )
    assert told["config.json"].startswith("not of a published size")
    assert json.loads(told["generation_config"])["eos_token_id"] == 3842


def test_a_preprocessor_that_the_server_refuses_is_wrong(nano):
    for size, says in ((0, "patch_size must be a whole number"), (16, "patches of 16 pixels")):
        (nano / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {"patch_size": size}}))
        one(nano, "preprocessor_config.json", says)


def test_a_draft_is_recognised(tmp_path):
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, "eagle_config": eagle}
    put(tmp_path, {"fc.weight": torch.ones(2, 2)}, draft)
    report = doctor.diagnose(tmp_path, "d")
    assert "is a draft model" in report.findings[0].text
    assert report.answers["eagle_config.eagle_aux_hidden_state_layer_ids"] == "[1, 29, 57]"
    assert report.answers["draft_vocab_size"] == "32000"


def sparse(path: Path, source: Path, shards: int, **changes) -> Path:
    """The real K2.6 configuration, with `changes`, and all its tensors as INT4 in files that are holes but for the
    headers and the weight_shapes."""
    path.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, path / file.name)
    data = json.loads((source / "config.json").read_text())
    data["text_config"] |= changes
    (path / "config.json").write_text(json.dumps(data))
    tensors: list[tuple[str, torch.dtype, tuple[int, ...], bytes]] = []
    for name, shape in expected(KimiConfig.from_directory(path)).items():
        name = f"language_model.{name}"
        if ".mlp.experts." not in name:
            dtype = torch.float32 if name.endswith("bias") else torch.bfloat16
            tensors.append((name, dtype, shape, b""))
            continue
        linear, (out, inputs) = name.removesuffix(".weight"), shape
        said = b"".join(n.to_bytes(8, "little") for n in shape)
        tensors.append((f"{linear}.weight_packed", torch.int32, (out, inputs // 8), b""))
        tensors.append((f"{linear}.weight_scale", torch.bfloat16, (out, inputs // 32), b""))
        tensors.append((f"{linear}.weight_shape", torch.int64, (2,), said))
    tensors.append(("vision_tower.patch_embed.proj.weight", torch.bfloat16, (1152, 3, 14, 14), b""))
    weight_map = {}
    for i in range(shards):
        held = sorted(tensors[i * len(tensors) // shards : (i + 1) * len(tensors) // shards], key=lambda t: not t[3])
        header, at = {}, 0
        for name, dtype, shape, _ in held:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        with (path / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in held))
            f.truncate(8 + len(text) + at)
        weight_map |= dict.fromkeys(header, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_a_sparse_checkpoint_of_the_real_widths(tmp_path, kimi_k26):
    """Three layers of sixteen experts: 23 GB by its headers, of which a bounded part is looked at."""
    path = sparse(tmp_path / "k2", kimi_k26, 8, num_hidden_layers=3, n_routed_experts=16)
    report = doctor.diagnose(path, "k2")
    assert [f for f in report.findings if f.severity == "wrong"] == []
    assert "kimi-k2.6" in report.title and "in 8 files" in report.title
    assert report.answers["config.json"].startswith("not of a published size")
    assert "163585 [EOS], 163586 <|im_end|>, 163593 [EOT] (config.json: 163586)" in report.answers["stop tokens"]
    assert report.answers["tool JSON"].startswith("not used")
    (path / "model-00003-of-000008.safetensors").unlink()
    one(path, "lacks 1 shard", "model-00003")  # and none of the tensors in it is missed by name


def test_plan_is_that_of_the_notebook():
    """Kimi K2.5's published arithmetic: 595 GB as INT4 do not fit four H200s; compact scales and FP8 elsewhere do."""
    config = shapes.shape("kimi-k2.5", 61)
    model = model_of(config, 471_200_000)
    stored = config.parameters().routed * 4.5 / 8
    int4_form, compact, narrow, fp4 = memory.footprints(model, stored)
    assert stored == pytest.approx(570.76e9, rel=1e-4) and int4_form.per_gpu(1) == pytest.approx(595.1e9, rel=1e-3)
    assert compact.per_gpu(1) == pytest.approx(563.7e9, rel=1e-3) and narrow.per_gpu(1) == pytest.approx(
        553e9 + 61 * 64 * 128 * 512,
        rel=2e-3,  # copies of W_UV
    )
    assert model.kv_values * 2 == 70_272 and fp4.split == pytest.approx(int4_form.split, rel=1e-6)
    fits = {
        (gpu.name, fit.count, fit.footprint.name): fit
        for gpu, row in memory.table((int4_form, compact, narrow, fp4), model.kv_values * 2)
        for fit in row
    }
    assert not fits["H200 141 GB", 4, "as stored"].fits
    best = fits["H200 141 GB", 4, "int4-compact, rest FP8"]
    assert best.fits and 139e9 < best.weights < 141e9 and best.tokens == int(best.left // 70_272)
    assert fits["H200 141 GB", 8, "as stored"].fits and not fits["H100 80 GB", 4, "nvfp4"].fits


def test_plain_experts_take_the_width_that_the_engine_gives_them(tmp_path):
    """bfloat16 experts are float32 on a CPU: twice as large as in the file."""
    config = KimiConfig.from_dict(CONFIG)
    put(tmp_path, {n: torch.ones(s, dtype=torch.bfloat16) for n, s in expected(config).items()})
    wanted = demand(tmp_path, EngineConfig(device="cpu", draft="off"), torch.device("cpu")).demand.weights[0]
    _, (cpu, *_) = doctor.diagnose(tmp_path, "m").machine[0]
    assert cpu.footprint.name == "as stored" and cpu.weights == wanted.per_gpu(1)


def test_findings_read_as_one_line():
    assert str(Finding("wrong", "a is b", "do c")) == "wrong: a is b: do c"
