"""Whole checkpoints in every published format against transformers, and ourselves, on the dequantised weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune import LLM
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed
from tests import oracle
from tests.cpu.model.test_oracle import CONFIG, TOL

EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.\w+_proj\.weight")
LINEAR = re.compile(r".*_proj(_with_mqa)?\.weight")
FP4_OF_K25 = re.compile(r".*\.mlp\.(experts\.\d+\.|shared_experts\.)?\w+_proj\.weight")  # attention stays bf16
EXPERT_OPS = ("experts_fp8", "experts_nvfp4", "experts_int4_compact")
NVIDIA = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}


def mixed(name: str) -> object:
    """Experts of one layer in FP8, of the next in compact INT4, and NVFP4 elsewhere."""
    if "layers.1.mlp.experts." in name:
        return fp8_block
    return int4_compact if "layers.2.mlp.experts." in name else nvfp4


Choice = Callable[[str], object]
# What each linear layer's weight becomes (None: it stays), and the declaration.
CHECKPOINTS: dict[str, tuple[Choice, dict[str, object] | None]] = {
    "K2-Instruct": (lambda n: fp8_block if LINEAR.fullmatch(n) else None, fp8_block.quantization_config()),
    "K2.5-NVFP4": (lambda n: nvfp4 if FP4_OF_K25.fullmatch(n) else None, int4.quantization_config()),  # stale
    "K2.6-NVFP4": (lambda n: nvfp4 if EXPERT.fullmatch(n) else None, nvfp4.quantization_config()),
    "nvfp4-pack-quantized": (
        lambda n: nvfp4_packed if EXPERT.fullmatch(n) else None,
        nvfp4_packed.quantization_config(),
    ),
    "int4-compact": (lambda n: int4_compact if EXPERT.fullmatch(n) else None, int4_compact.quantization_config()),
    "mixed": (lambda n: mixed(n) if LINEAR.fullmatch(n) else None, None),
}


def quantise(path: Path, dense: Path, choose: Choice, block: dict[str, object] | None, *, nested: bool) -> None:
    """Rewrites the checkpoint in `path`; `dense` gets its exact float32 weights."""
    given, stored, exact = load_file(path / "model.safetensors"), {}, {}
    for name, w in given.items():
        module = choose(name)
        if module is None:
            stored[name] = exact[name] = w
            continue
        stem = name.removesuffix(".weight")
        parts = dict(module.encode(stem, w))
        stored |= parts
        exact[name] = module.decode({k.removeprefix(stem): v for k, v in parts.items()}, torch.float32)
        assert not exact[name].equal(w)
    dense.mkdir()
    shutil.copy(path / "config.json", dense)
    save_file(exact, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if block is not None:
        config["quantization_config"] = block
    if nested:  # with the older names in the last layer
        stored = {f"language_model.{k.replace('model.layers.2.', 'layers.2.')}": v for k, v in stored.items()}
        config = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}}
        (path / "hf_quant_config.json").write_text(json.dumps(NVIDIA))
    save_file({k: v.contiguous() for k, v in stored.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_dequantised_weights(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    path, dense = tmp_path / "model", tmp_path / "dense"
    oracle.make(path)
    choose, block = CHECKPOINTS[name]
    quantise(path, dense, choose, block, nested=name == "K2.5-NVFP4")
    judge = transformers.DeepseekV3ForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    (tokens,) = oracle.random_prompts(7, [48])
    with torch.no_grad():
        expected = judge(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    with LLM(path, **CONFIG) as llm:
        got = torch.tensor(llm.score(tokens))
    torch.testing.assert_close(got, expected, rtol=0, atol=TOL)
    with LLM(path, **CONFIG | dict(ops=dict.fromkeys(EXPERT_OPS, "torch"))) as llm:
        torch.testing.assert_close(torch.tensor(llm.score(tokens)), expected, rtol=0, atol=TOL)
    with LLM(dense, **CONFIG) as llm:
        ours = torch.tensor(llm.score(tokens))
    # The same bits, where g++ is at hand; a reciprocal is kept of compressed-tensors' global scales.
    exact = shutil.which("g++") and name != "nvfp4-pack-quantized"
    torch.testing.assert_close(got, ours, rtol=0, atol=0 if exact else 1e-5)
    # In bfloat16 a token near a tie may go to another expert: close on average.
    with LLM(path, **CONFIG | dict(dtype="bfloat16")) as llm:
        assert (torch.tensor(llm.score(tokens)) - expected).abs().mean() < 0.04
