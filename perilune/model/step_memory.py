"""How much memory a GPU needs for a step of max_step_tokens, beside weights, KV cache and CUDA graphs."""

import torch

from perilune.core.config import EngineConfig
from perilune.core.step import MAX_DRAFTS
from perilune.model.config import KimiConfig
from perilune.model.sharded_kv import CONTEXT_BYTES
from perilune.ops.attention.mla_prefill import KEY_VALUE_BYTES
from perilune.ops.moe.moe_int4_grouped import CHUNK, WIDEST

STEP_TOKENS = {"cpu": 512, "cuda": 8192}  # default of max_step_tokens
# What the formula does not count: tensors of less than 1 % of a step, the allocator's gaps (up to 20 MB per tensor),
# and what the driver and NCCL take when a kernel or a collective first runs. On a CPU: the whole step.
SLACK_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}


def workspace_bytes(
    device: torch.device, model: KimiConfig, config: EngineConfig, kv_row: int, features: int, ranks: int
) -> int:
    """Bytes on each of `ranks` devices. `config` with dtype resolved; `kv_row`: bytes of a token's KV in a layer;
    `features`: number of states [T, D] that the draft model reads."""
    step = step_bytes(model, config, kv_row, features, ranks) if device.type == "cuda" else 0
    return SLACK_BYTES[device.type] + step


def step_bytes(model: KimiConfig, config: EngineConfig, kv_row: int, features: int, ranks: int) -> int:
    """Bytes that a step allocates: what is live throughout (residual stream, features, qkv_a's output), and the maximum
    over these phases:

    experts    their input, the shared expert's result, and rows of all pairs (token, expert): hidden values and results
               (moe_int4_grouped.py); float32 sums if T > CHUNK. K2, 10,240 tokens, four GPUs: 1.6 GB
    dense      input, output, and a dense layer's hidden values, gate and up
    attention  queries, outputs of heads and their sum; up to KEY_VALUE_BYTES of keys and values; the latents from which
               these are computed, as stored and unpacked; where KV is sharded, the latents of all ranks
    logits     the final states, features concatenated, and float32 logits, adjusted and sorted
    """
    c, T = model, config.max_step_tokens or STEP_TOKENS["cuda"]
    size: int = getattr(torch, config.dtype).itemsize
    heads = c.num_attention_heads // ranks
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    stream = T * c.hidden_size * size
    width = c.moe_intermediate_size // (1 if config.ep > 1 else ranks)
    pairs = min(T, CHUNK) * c.num_experts_per_tok + 7 * c.n_routed_experts + WIDEST
    sums = 4 * T * c.hidden_size if T > CHUNK else 0
    experts = 2 * stream + sums + pairs * (c.hidden_size + width) * size
    dense = 2 * stream + 3 * T * c.intermediate_size // ranks * size
    longest = config.max_model_len or c.max_position_embeddings
    key = heads * (c.qk_nope_head_dim + c.v_head_dim) * size
    rows = max(min(KEY_VALUE_BYTES // key, config.max_num_seqs * longest), longest)
    queries = T * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + 2 * c.v_head_dim) * size
    rounded = 1.5 if config.fp8_activations else 1.0  # plus a copy of keys and values in 8 bits
    attention = stream + queries + int(rounded * min(KEY_VALUE_BYTES, rows * key)) + rows * kv_row
    if kv_row != latent * size:
        attention += rows * latent * size
    if config.kv_shards not in ("auto", 1):
        attention += max(CONTEXT_BYTES, longest * kv_row) * (ranks + 1) // ranks
    drafts = 0 if config.draft == "off" else config.draft_tokens or MAX_DRAFTS
    sampled = min(T, config.max_num_seqs * (1 + drafts))
    logits = (1 + features) * stream + 3 * 4 * sampled * c.vocab_size
    always = (1 + features) * stream + T * (c.q_lora_rank + latent) * size
    return always + max(experts, dense, attention, logits)
