"""Writes a trained kimi-nano as a K2.5 checkpoint: python -m runs.nano.export --run runs/out/kimi-nano --out DIR

Nested config, `language_model.` names, routed experts as INT4 pack-quantized, the rest bfloat16. What is written is
read back and compared with the INT4 grid of training. The old content of --out is replaced once the new one is whole.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from perilune.formats import int4
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import write
from perilune.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer
from runs.nano.model import Shape, int4_grid

PREFIX = "language_model."
SHARD_BYTES = 2_000_000  # so that even this model has shards and an index


def load(run: Path) -> tuple[Shape, dict[str, torch.Tensor], dict[str, float]]:
    """(shape, weights, progress) of a run's checkpoint.pt."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    progress = {key: saved[key] for key in ("step", "tokens", "seconds")}
    return Shape(**saved["shape"]), saved["model"], progress


def tensors(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names: the stacked experts one by one, the rest as they are."""
    for name, tensor in weights.items():
        stem, _, projection = name.rpartition(".experts.")
        if stem:
            for e, expert in enumerate(tensor):
                yield f"{PREFIX}model.{stem}.experts.{e}.{projection}.weight", expert
        else:
            yield f"{PREFIX}{'' if name.startswith('lm_head') else 'model.'}{name}", tensor


def config(s: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json as Kimi-K2.5 spells it, without the vision tower. The writer adds quantization_config."""
    tokens = {
        "bos_token_id": tokenizer.special("[BOS]"),
        "eos_token_id": tokenizer.special("<|im_end|>"),
        "pad_token_id": tokenizer.special("[PAD]"),
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_attention_heads,
        "q_lora_rank": s.q_lora_rank,
        "kv_lora_rank": s.kv_lora_rank,
        "qk_nope_head_dim": s.qk_nope_head_dim,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "v_head_dim": s.v_head_dim,
        "intermediate_size": s.intermediate_size,
        "moe_intermediate_size": s.moe_intermediate_size,
        "n_routed_experts": s.n_routed_experts,
        "num_experts_per_tok": s.num_experts_per_tok,
        "n_shared_experts": s.n_shared_experts,
        "first_k_dense_replace": s.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": s.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": s.rope_factor,
            "original_max_position_embeddings": s.rope_original,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": s.max_position_embeddings,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        **tokens,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": tokenizer.special("<|media_pad|>"),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        **tokens,
        "text_config": text,
    }


def check(out: Path, weights: dict[str, torch.Tensor]) -> None:
    """Every stored tensor must be what training computed with: the INT4 grid exactly, bfloat16 to one rounding."""
    with Checkpoint.open(out) as stored:
        for name, tensor in tensors(weights):
            packed = name.removesuffix(".weight") + ".weight_packed"
            if packed in stored.tensors:
                scale = stored.read(name.removesuffix(".weight") + ".weight_scale")
                got, wanted = int4.dequantize(stored.read(packed), scale, torch.float32), int4_grid(tensor)
            else:
                got = stored.read(name)
                wanted = tensor.to(got.dtype)
            if not torch.equal(got, wanted):
                raise SystemExit(f"{name}: the export differs from the trained weights")


def export(run: Path, out: Path) -> None:
    shape, weights, _ = load(run)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = Tokenizer.from_directory(run)
    write(partial, tensors(weights), config=config(shape, tokenizer), form="int4", shard_bytes=SHARD_BYTES)
    check(partial, weights)
    for name in (VOCABULARY_FILE, CONFIG_FILE):
        shutil.copyfile(run / name, partial / name)
    generation = {
        "bos_token_id": tokenizer.special("[BOS]"),
        "eos_token_id": tokenizer.special("<|im_end|>"),
        "pad_token_id": tokenizer.special("[PAD]"),
        "temperature": 0.0,  # a checked skill is shown at its best; the server takes its defaults from here
    }
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Export kimi-nano in the K2.5 INT4 format.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/out/kimi-nano"), help="directory of the training run")
    parser.add_argument("--out", type=Path, default=Path("perilune/bundled/kimi-nano"), help="checkpoint to write")
    args = parser.parse_args()
    if not (args.run / "checkpoint.pt").is_file():
        parser.error(f"{args.run} has no checkpoint.pt: train first, python -m runs.nano.train --out {args.run}")
    export(args.run, args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: {size:,} bytes")


if __name__ == "__main__":
    main()
