"""Random small checkpoints of the Kimi architecture, and transformers' deepseek_v3 as the judge of them."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE: dict[str, Any] = dict(
    vocab_size=512, hidden_size=128, intermediate_size=192, moe_intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    routed_scaling_factor=2.827, kv_lora_rank=64, q_lora_rank=96, qk_rope_head_dim=32, v_head_dim=32,
    qk_nope_head_dim=32, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
    max_position_embeddings=4096, rms_norm_eps=1e-5, num_nextn_predict_layers=0, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None,
    rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=64.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                         mscale_all_dim=1.0, original_max_position_embeddings=64),
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "two dense layers": dict(first_k_dense_replace=2, num_hidden_layers=4),
    "expert groups": dict(n_group=4, topk_group=2, n_routed_experts=16, num_experts_per_tok=4),
    "odd widths": dict(hidden_size=96, kv_lora_rank=40, q_lora_rank=56, v_head_dim=24, qk_nope_head_dim=16,
                       qk_rope_head_dim=8, num_attention_heads=3, num_key_value_heads=3, moe_intermediate_size=32),
    "two shared experts, weights not normalised": dict(n_shared_experts=2, norm_topk_prob=False),
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    vocab_size: int
    reference: Any  # transformers model in float32

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), V] float32."""
        return self.reference(torch.tensor([tokens])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def random_prompts(seed: int, lengths: list[int], vocab: int = 512) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def make(path: Path, *, int4: bool = False, seed: int = 0, **overrides: Any) -> Checkpoint:
    """Writes a checkpoint to `path` and loads transformers on the very same (for INT4: dequantised) weights."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV3Config(**(BASE | overrides), attn_implementation="eager")
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.05)
            elif "norm" in name:
                p.copy_(1 + 0.1 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.1 * torch.randn_like(b))
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written |= dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    (path / "config.json").write_text(json.dumps(written))
    if int4:
        model = _quantise(path, written, model)
    return Checkpoint(path, config.vocab_size, model)


def _quantise(path: Path, config: dict[str, Any], model: Any) -> Any:
    """Replaces the routed experts by INT4 in the file and by their exact float32 products in the judge."""
    from transformers import DeepseekV3ForCausalLM

    from perilune.formats import int4

    file = path / "model.safetensors"
    out: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, w in load_file(file).items():
        if ".mlp.experts." in name:
            packed, scale = int4.quantize(w)
            stem = name.removesuffix(".weight")
            out |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale}
            out[f"{stem}.weight_shape"] = torch.tensor(w.shape)
            exact[name] = int4.dequantize(packed, scale, torch.float32)
        else:
            out[name] = exact[name] = w
    judge = path.parent / (path.name + "-dequantised")
    judge.mkdir()
    save_file(exact, judge / "model.safetensors", {"format": "pt"})
    (judge / "config.json").write_text(json.dumps(config))
    save_file(out, file, {"format": "pt"})
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    config = config | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
    }
    (path / "config.json").write_text(json.dumps(config))
    return DeepseekV3ForCausalLM.from_pretrained(judge, dtype=torch.float32, attn_implementation="eager").eval()
