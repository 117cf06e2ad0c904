"""Scales of activations, the text they are measured on, and the walk through a checkpoint that measures them."""

import contextlib
import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from perilune.bench import conversion
from perilune.cli.main import cli
from perilune.client.target import serving
from perilune.convert import calibrate, report
from perilune.convert import nvfp4 as search
from perilune.convert.calibrate import calibrated
from perilune.convert.encode import Inputs
from perilune.convert.journal import Journal
from perilune.convert.stream import CALIBRATION, Conversion
from perilune.convert.target import Target
from perilune.convert.texts import Texts, gather
from perilune.convert.walk import Walk, run
from perilune.core.errors import CheckpointError, ConfigError, EngineError
from perilune.evals import lm_eval
from perilune.formats import nvfp4
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.hub import resolve_model
from perilune.ops.linear.linear import linear
from perilune.text.tokenizer import Tokenizer
from tests import oracle
from tests.cpu.convert.test_convert import damaged

CPU = torch.device("cpu")
PROMPTS = tuple(tuple(p) for p in oracle.random_prompts(3, [70, 1, 64, 17, 130]))
TEXTS = Texts(PROMPTS, "random ids")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> oracle.Checkpoint:
    return oracle.make(tmp_path_factory.mktemp("source") / "model", int4=True)


def convert(source: Path, result: Path, /, *, inputs: Any = None, **target: Any) -> None:
    with Conversion(source, Target(**target)) as conversion:
        conversion.run(result, inputs=inputs, threads=1)


def walk(path: Path, sequences: Any = PROMPTS) -> Walk:
    with Checkpoint.open(path) as checkpoint, torch.inference_mode():
        done = Walk(checkpoint, sequences, dtype=torch.float32, device=CPU)
        run(done)
        done.whole_head = done.head(slice(None))  # type: ignore[attr-defined]
    return done


def logits(done: Any) -> torch.Tensor:
    return linear(done.x, done.whole_head, True)


# ---- the walk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["base", "expert groups", "odd widths", "two shared experts, weights not normalised"])
def test_a_walk_gives_what_the_judge_gives(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = oracle.make(tmp_path / "model", int4=shape == "base", **oracle.SHAPES[shape])
    monkeypatch.setattr("perilune.convert.walk.TOGETHER", 100)  # so that there are pieces
    got = logits(walk(judge.path)).split([len(p) for p in PROMPTS])
    for prompt, mine in zip(PROMPTS, got):
        torch.testing.assert_close(mine, judge.logits(list(prompt)), rtol=2e-3, atol=2e-3)


def test_divergence_is_that_of_whole_logits(
    judged: oracle.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(judged.path, tmp_path / "fp8", to="fp8-dense")
    convert(judged.path, tmp_path / "nvfp4", to="nvfp4")
    monkeypatch.setattr(report, "VOCAB", 128)
    monkeypatch.setattr(report, "ROWS", 50)
    a = walk(judged.path)
    for path in (tmp_path / "fp8", tmp_path / "nvfp4"):
        b = walk(path)
        p, q = logits(a).double().log_softmax(-1), logits(b).double().log_softmax(-1)
        exact = (p.exp() * (p - q)).sum(-1)
        with Checkpoint.open(judged.path) as one, Checkpoint.open(path) as other, torch.inference_mode():
            a._checkpoint, b._checkpoint = one, other
            mine, agreed = report.divergence(a, b)
        assert exact.mean() > 1e-5
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-6)
        assert torch.equal(agreed, p.argmax(-1) == q.argmax(-1))


def test_outputs_of_layers_are_compared_on_the_source_s_inputs(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    convert(judged.path, tmp_path / "nvfp4", to="nvfp4")
    weights = report.compare_weights(judged.path, tmp_path / "nvfp4")
    changed = {name for name, *_ in weights.losses}
    seen = report.compare_outputs(judged.path, tmp_path / "nvfp4", TEXTS, CPU, changed)
    assert len(seen.divergence) == TEXTS.tokens and (seen.divergence > -1e-6).all()
    assert seen.layers[0][1] == 0.0  # no experts
    assert all(0 < error / signal < 0.05 for signal, error in seen.layers[1:])
    nested = {"language_model." + name for name in changed}  # as where there is a vision tower
    assert report.compare_outputs(judged.path, tmp_path / "nvfp4", TEXTS, CPU, nested).layers == seen.layers
    same = report.compare_outputs(judged.path, judged.path, TEXTS, CPU, set())
    assert same.divergence.abs().max() < 1e-6 and same.agreed.all()


def test_values_that_are_not_finite_name_the_layer(tmp_path: Path) -> None:
    oracle.make(tmp_path / "model")
    name = "model.layers.1.self_attn.o_proj.weight"
    path = damaged(tmp_path / "model", tmp_path / "spoilt", lambda t: t[name].fill_(torch.inf))
    with pytest.raises(CheckpointError, match="layer 1 gives values that are not finite"):
        walk(path)


# ---- calibration -------------------------------------------------------------------------------------------------


def seen_by_the_judge(judge: oracle.Checkpoint) -> dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]:
    """From transformers' modules: the inputs of each expert's gate and up, and of its down."""
    found: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def hook(at: str) -> Any:
        def look(module: Any, args: Any) -> None:
            x, ids = args[0].reshape(-1, args[0].shape[-1]), args[1]
            for e in ids.unique().tolist():
                some = x[(ids == e).any(-1)]
                gate, up = (some @ module.gate_up_proj[e].T).chunk(2, -1)
                found.setdefault((at, e), []).append((some, torch.nn.functional.silu(gate) * up))

        return look

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(hook(f"model.layers.{i}.mlp.experts"))
        for i, layer in enumerate(judge.reference.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    for prompt in PROMPTS:
        judge.logits(list(prompt))
    for h in hooks:
        h.remove()
    return {at: (torch.cat([x for x, _ in some]), torch.cat([h for _, h in some])) for at, some in found.items()}


def test_what_is_measured_is_what_the_judge_sees(judged: oracle.Checkpoint) -> None:
    mine, seen = calibrate.measure(judged.path, TEXTS, CPU), seen_by_the_judge(judged)
    layers = sorted({layer for layer, _ in seen})
    assert list(mine.maxima) == layers and len(layers) == 2
    for layer in layers:
        inputs = torch.cat([x for (at, _), (x, _) in seen.items() if at == layer])
        hidden = {e: h for (at, e), (_, h) in seen.items() if at == layer}
        largest = max(h.abs().max().item() for h in hidden.values())
        assert mine.maxima[layer] == pytest.approx({"gate_up": inputs.abs().max().item(), "down": largest}, rel=1e-3)
        for name, values in ((layer, inputs), *((f"{layer}.{e}", h) for e, h in hidden.items())):
            mean = values.double().square().mean(0)
            mean = (mean * len(values) + 64 * mean.mean()) / (len(values) + 64)
            exact = (mean.view(-1, 16) / mean.view(-1, 16).amax(-1, keepdim=True)).flatten() * 15
            got = mine.often[name]
            assert got.dtype == torch.uint8 and got.max() == 15 and got.min() >= 1
            assert (got - exact.clamp(min=1)).abs().max() <= 0.51, name
    assert len(mine.often) == len(layers) + len(seen)


def test_shares_of_nothing_are_alike() -> None:
    got = calibrate.shares(torch.zeros(32, dtype=torch.float64), 5)
    assert got.unique().numel() == 1


def test_errors_are_put_where_they_matter_less(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    measured = calibrate.measure(judged.path, TEXTS, CPU).inputs()
    convert(judged.path, tmp_path / "plain", to="nvfp4")
    convert(judged.path, tmp_path / "weighed", inputs=measured, to="nvfp4", calibrated=True)
    errors, losses = {}, {}
    for name in ("plain", "weighed"):
        weights = report.compare_weights(judged.path, tmp_path / name)
        losses[name] = weights.sqnr_db
        seen = report.compare_outputs(judged.path, tmp_path / name, TEXTS, CPU, {n for n, *_ in weights.losses})
        errors[name] = [error / signal for signal, error in seen.layers[1:]]
    assert all(a < 0.97 * b for a, b in zip(errors["weighed"], errors["plain"]))
    assert losses["plain"] - 1 < losses["weighed"] < losses["plain"]


def test_from_other_weights_errors_are_put_where_they_matter_less() -> None:
    g = torch.Generator().manual_seed(0)
    w, often = torch.randn(64, 256, generator=g), torch.randint(1, 16, (256,), generator=g).to(torch.uint8)
    exponent = search.exponent_for([w.abs().amax() / 7])
    lost = []
    for given in (None, often):
        got = search.from_weights(w, exponent, given)
        restored = nvfp4.dequantize(got.values, got.scale, torch.tensor(2.0**exponent), torch.float32)
        lost.append(((restored - w).square() * often).sum().item())
        assert search.energy(restored - w) == pytest.approx(got.error, rel=1e-3)
    assert lost[1] < 0.99 * lost[0]


def test_scales_are_shared_by_a_layer_s_experts(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    inputs = calibrated(judged.path, tmp_path / "a", TEXTS, key="k", device=CPU)
    for name, layout in (("a", "modelopt"), ("b", "compressed-tensors")):
        convert(judged.path, tmp_path / name, inputs=inputs, to="nvfp4", layout=layout, calibrated=True)
    with Checkpoint.open(tmp_path / "a") as a, Checkpoint.open(tmp_path / "b") as b:
        names = [n for n in a.tensors if n.endswith(".input_scale")]
        assert len(names) == 2 * 8 * 3
        for name in names:
            layer, kind = name.split(".experts.")[0] + ".experts", name.split(".")[-2]
            scale = inputs.scales[layer, "down" if kind == "down_proj" else "gate_up"]
            assert a.read(name).item() == pytest.approx(scale, rel=1e-6)
            other = b.read(name.replace(".input_scale", ".input_global_scale"))
            assert other.shape == (1,) and other.item() == pytest.approx(1 / scale, rel=1e-6)
    # From one layout to the other they stay what they are.
    convert(tmp_path / "a", tmp_path / "c", to="nvfp4", layout="compressed-tensors")
    convert(tmp_path / "b", tmp_path / "d", to="nvfp4")
    with Checkpoint.open(tmp_path / "b") as b, Checkpoint.open(tmp_path / "c") as c:
        assert all(torch.equal(b.read(n), c.read(n)) for n in b.tensors if n.endswith("input_global_scale"))
    with Checkpoint.open(tmp_path / "a") as a, Checkpoint.open(tmp_path / "d") as d:
        assert all(a.read(n).item() == pytest.approx(d.read(n).item(), rel=1e-6) for n in names)
    for name in "ab":
        block = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        (group,) = block["config_groups"].values()
        assert group["input_activations"]["num_bits"] == 4


def test_a_calibration_is_made_once(judged: oracle.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibrated(judged.path, tmp_path, TEXTS, key="k", device=CPU)
    assert made.scales == {
        (layer, kind): pytest.approx(largest / (6 * 448))
        for layer, each in calibrate.measure(judged.path, TEXTS, CPU).maxima.items()
        for kind, largest in each.items()
    }
    monkeypatch.setattr(calibrate, "measure", lambda *args: pytest.fail("measured again"))
    assert calibrated(judged.path, tmp_path, TEXTS, key="k", device=CPU).digest() == made.digest()
    for key, texts in (("other", TEXTS), ("k", Texts(PROMPTS[:1], "fewer"))):
        with pytest.raises(pytest.fail.Exception):
            calibrated(judged.path, tmp_path, texts, key=key, device=CPU)
    for file, content in zip(CALIBRATION, (b'{"maxima": {"model.layers.1": 3}}', b"no zip")):
        kept = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{CALIBRATION[0]} is damaged"):
            calibrated(judged.path, tmp_path, TEXTS, key="k", device=CPU)
        (tmp_path / file).write_bytes(kept)


def test_inputs_and_target_belong_together(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only nvfp4 has scales of activations"):
        Target(to="int4", calibrated=True)
    with pytest.raises(ConfigError, match="calibrated=True"):
        convert(judged.path, tmp_path / "no", to="nvfp4", calibrated=True)
    with pytest.raises(ConfigError, match="calibrated=True"):
        convert(judged.path, tmp_path / "no", inputs=Inputs(), to="nvfp4")
    wrong = Inputs(often={"model.layers.1.mlp.experts": torch.ones(64, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.experts.0.gate_proj has 64 inputs"):
        convert(judged.path, tmp_path / "no", inputs=wrong, to="nvfp4", calibrated=True)


def test_a_scale_of_the_source_that_cannot_be(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    convert(judged.path, tmp_path / "c", to="nvfp4")
    name = "model.layers.1.mlp.experts.3.up_proj.input_scale"
    damaged(tmp_path / "c", tmp_path / "a", lambda t: t.update({name: torch.tensor(-1.0)}))
    with pytest.raises(CheckpointError, match=f"{name} must be one positive number"):
        convert(tmp_path / "a", tmp_path / "b", to="nvfp4", layout="compressed-tensors")
    assert not (tmp_path / "b/config.json").exists()


# ---- text --------------------------------------------------------------------------------------------------------


def test_chats_and_texts_of_a_file(tmp_path: Path) -> None:
    nano = resolve_model("kimi-nano")
    tokenizer = Tokenizer.from_directory(nano)
    weather = {"type": "function", "function": {"name": "weather", "description": "The weather in a city."}}
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    file = tmp_path / "mine.jsonl"
    lines = [chat, {"text": "bisect.insort(a, x)"}, "", {**chat, "tools": [weather]}]
    file.write_text("\n".join(json.dumps(line) if line else "" for line in lines) + "\n")
    got = gather(nano, 10**6, file)
    assert got.kind == "mine.jsonl" and len(got.sequences) == 3
    first, text, third = (tokenizer.decode(ids) for ids in got.sequences)
    assert "Hi" in first and first.rstrip().endswith("Hello.<|im_end|>") and text == "bisect.insort(a, x)"
    assert "weather" in third
    assert len(gather(nano, 5, file).sequences) == 1
    for line, words in (
        ("{", "mine.jsonl:2: not JSON"),
        ('{"messages": []}', 'mine.jsonl:2: neither {"messages"'),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "mine.jsonl:2: messages"),
        ("[1]", "mine.jsonl:2: neither"),
    ):
        file.write_text(json.dumps(chat) + "\n" + line + "\n")
        with pytest.raises(ConfigError) as e:
            gather(nano, 10**6, file)
        assert words in str(e.value) and "\n" not in str(e.value)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no text"):
        gather(nano, 100, file)
    with pytest.raises(ConfigError, match="cannot read"):
        gather(nano, 100, tmp_path / "missing.jsonl")


def test_bundled_problems_are_always_the_same(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    nano = resolve_model("kimi-nano")
    a, b = gather(nano, 3000), gather(nano, 3000)
    assert a == b and a.digest() == b.digest() and a.tokens >= 3000 and "held-out" in a.kind
    assert gather(nano, 3000, split="train").digest() != a.digest()
    assert "random ids" in gather(judged.path, 700).kind
    (tmp_path / "x.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ConfigError, match=r"has no tiktoken.model"):
        gather(judged.path, 700, tmp_path / "x.jsonl")
    for file in (judged.path / "config.json", nano / "tiktoken.model", nano / "tokenizer_config.json"):
        shutil.copy(file, tmp_path)
    with pytest.raises(CheckpointError, match="they are of different models"):
        gather(tmp_path, 700)


def test_the_interval_of_a_ratio() -> None:
    g = torch.Generator().manual_seed(0)
    other = 1 + torch.rand(400, generator=g, dtype=torch.float64)
    low, high = conversion.interval(0.6 * other, other)
    assert low == pytest.approx(0.6) and high == pytest.approx(0.6)
    low, high = conversion.interval(0.6 * other + 0.2 * torch.randn(400, generator=g), other)
    assert 0.55 < low < 0.6 < high < 0.65


# ---- the command -------------------------------------------------------------------------------------------------


def test_text_is_read_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{\n")
    base = ["convert", "kimi-nano", str(tmp_path / "result"), "--to", "nvfp4", "--text", str(tmp_path / "mine.jsonl")]
    for more, words in (([], "add one of them"), (["--report"], "mine.jsonl:1: not JSON")):
        done = CliRunner().invoke(cli, [*base, *more])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    assert not (tmp_path / "result").exists()


def test_a_target_that_cannot_be_used_is_named_before_the_run(
    judged: oracle.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **more: Any) -> Any:
        raise AssertionError("it ran")

    monkeypatch.setattr("perilune.cli.convert.calibrated", never)
    (tmp_path / "held").mkdir()
    (tmp_path / "held/model.safetensors").write_bytes(b"x")
    asked = ["convert", str(judged.path), str(tmp_path / "held"), "--to", "nvfp4", "--calibrate", "--device", "cpu"]
    result = CliRunner().invoke(cli, asked)
    assert isinstance(result.exception, CheckpointError) and "already holds model" in str(result.exception)
    assert [file.name for file in (tmp_path / "held").iterdir()] == ["model.safetensors"]
    (tmp_path / "held/model.safetensors").rename(tmp_path / "held/README.md")  # would be overwritten
    result = CliRunner().invoke(cli, ["convert", "kimi-nano", *asked[2:]])
    assert isinstance(result.exception, CheckpointError) and "already holds README" in str(result.exception)
    for asked in (["kimi-nano", ""], ["kimi-nano", "new", "--report", "--min-sqnr", "nan"]):
        assert CliRunner().invoke(cli, ["convert", *asked, "--to", "nvfp4", "--dry-run"]).exit_code == 2, asked


def test_the_command_calibrates_and_goes_on(judged: oracle.Checkpoint, tmp_path: Path) -> None:
    result = tmp_path / "result"
    base = ["convert", str(judged.path), str(result), "--to", "nvfp4", "--device", "cpu", "--threads", "1"]
    calibrating = [*base, "--calibrate", "--calibrate-tokens", "600"]
    done = CliRunner().invoke(cli, calibrating, catch_exceptions=False)
    assert done.exit_code == 0 and "measuring inputs" in done.stderr
    assert json.loads((result / "conversion.json").read_text())["target"]["calibrated"] is True
    kept = json.loads((result / CALIBRATION[0]).read_text())
    assert kept["about"]["tokens"] >= 600 and len(kept["maxima"]) == 2
    again = CliRunner().invoke(cli, calibrating, catch_exceptions=False)
    assert again.exit_code == 0 and "complete already" in again.stderr and "measuring inputs" not in again.stderr
    with Conversion(judged.path, Target(to="nvfp4", layout="compressed-tensors", calibrated=True)) as conversion:
        (tmp_path / "begun").mkdir()
        Journal(tmp_path / "begun", conversion._identity()).__exit__(None, None, None)
    other = CliRunner().invoke(cli, [*calibrating[:2], str(tmp_path / "begun"), *calibrating[3:]])
    assert isinstance(other.exception, CheckpointError) and "differs in layout: repeat" in str(other.exception)
    assert "measuring inputs" not in other.stderr, "it may take hours"
    same = CliRunner().invoke(cli, [*base[:1], str(judged.path), str(judged.path), *base[3:], "--calibrate"])
    assert isinstance(same.exception, ConfigError) and "is the source" in str(same.exception)
    assert not (judged.path / CALIBRATION[0]).exists()


FAKE = """#!{python}
import json, pathlib, sys, urllib.request
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
about = dict(pair.split("=", 1) for pair in given["--model_args"].split(","))
body = json.dumps({{"model": about["model"], "prompt": [5, 6, 7], "max_tokens": 2}}).encode()
ask = urllib.request.Request(about["base_url"], body, {{"Content-Type": "application/json"}})
if given["--limit"] == "0":
    sys.exit("no documents left")
answered = json.load(urllib.request.urlopen(ask))["usage"]["completion_tokens"]
folder = pathlib.Path(given["--output_path"], "model")
folder.mkdir()
metrics = {{"alias": "t", "acc,none": 0.25, "acc_stderr,none": 0.1, "exact_match,strict": answered, "sample_len": 4}}
(folder / "results_2026.json").write_text(json.dumps({{"results": {{given["--tasks"]: metrics}}}}))
"""


def test_scores_of_lm_eval_come_through_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nano = resolve_model("kimi-nano")
    with pytest.raises(ConfigError, match="lm_eval is not on the PATH"):
        lm_eval.scores(nano, "t")
    program = tmp_path / "lm_eval"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(lm_eval, "serving", lambda model, options: serving(model, [*options, "--draft", "off"]))
    got = lm_eval.scores(nano, "t", "--limit 3", device="cpu")
    assert got == {"t/acc": 0.25, "t/exact_match/strict": 2.0}
    monkeypatch.setattr(lm_eval, "serving", lambda *_: contextlib.nullcontext("http://127.0.0.1:1"))
    with pytest.raises(EngineError, match="lm_eval failed: no documents left"):
        lm_eval.scores(nano, "t", "--limit 0", device="cpu")
    with pytest.raises(ConfigError, match="--lm-eval-args"):
        lm_eval.scores(nano, "t", "--limit '")
    alone = CliRunner().invoke(cli, ["convert", "a", "b", "--to", "nvfp4", "--lm-eval", "t"])
    assert isinstance(alone.exception, ConfigError) and "--report" in str(alone.exception)
