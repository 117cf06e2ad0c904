"""EAGLE-3 drafts: the model against docs/formats.md section 6, loading, the drafter's chain and its cache."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.dist.slicing import Slicing
from perilune.engine.batch import build
from perilune.loading.eagle3 import load_draft, read_tensors, to_fp8
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.model.names import draft_expected as expected
from perilune.model.weights import Attention, Matrix, Weights
from perilune.speculation.drafter import Followed
from perilune.speculation.eagle3 import MAX_CHAIN_TOKENS, Eagle3Drafter, load_drafter
from runs.kimi_nano.drafter_narrow import narrow
from tests.cpu.model.eagle3_equations import Plain

D, V, LAYERS = 32, 64, 6
TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": D, "num_hidden_layers": LAYERS,
    "vocab_size": V, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
COMMON = {
    "hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": V,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "pad_token_id": 0,
    "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
MHA = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_bias": False,
}  # fmt: skip
MLA = COMMON | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "rope_theta": 50000.0, "rope_scaling": YARN,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False,
    },
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mha": (MHA, {}),
    "mha-yarn-gqa-residual": (MHA, {"rope_scaling": YARN | {"mscale_all_dim": 0.0}, "norm_before_residual": True}),
    "mha-31-joint": (MHA, {"norm_before_fc": True, "fc_norm": True, "norm_output": True}),
    "mha-small-vocabulary": (MHA, {"draft_vocab_size": 24}),
    "mla": (MLA, {}),
    "mla-31": (MLA, {"fc_norm": True, "norm_output": True}),
    "mla-residual": (MLA, {"norm_before_residual": True, "draft_vocab_size": 40}),
    "mla-four-aux": (MLA, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3, 6]}}),
}


@pytest.fixture(scope="module")
def target() -> tuple[KimiConfig, Weights]:
    config = KimiConfig.from_dict(TARGET)
    return config, random_weights(config, dtype=torch.float32, device="cpu")


def tensors_of(config: Eagle3Config, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        for name, shape in expected(config).items()
    }
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
        made["d2t"] = ids - torch.arange(len(ids))
        made["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return made


def written(path: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("form", ["mha", "mha-small-vocabulary", "mla-31"])
def test_a_rank_reads_its_slices_of_a_draft(form: str, target: tuple[KimiConfig, Weights], tmp_path: Path) -> None:
    base, change = FORMS[form]
    raw = base | change
    path = written(tmp_path / "draft", raw, tensors_of(Eagle3Config.from_dict(raw), 3))
    whole = load_draft(path, *target, dtype=torch.float32, device="cpu")[1]
    joined: dict[str, list[Tensor]] = {}
    for rank in range(2):
        s = Slicing(rank, 2)
        wide = KimiConfig.from_dict(TARGET | {"moe_intermediate_size": 64})
        shared = random_weights(wide, dtype=torch.float32, device="cpu", slicing=s)
        own = load_draft(path, target[0], shared, dtype=torch.float32, device="cpu", slicing=s)[1]
        assert torch.equal(own.fc.weight, whole.fc.weight) and torch.equal(own.norm, whole.norm)
        pieces = {"lm_head": own.lm_head.weight, "embed": own.embed, "down": own.mlp.down.weight.T}
        gate, up = own.mlp.gate_up.weight.chunk(2)
        pieces |= {"gate": gate, "up": up, "o": own.attention.o.weight.T}
        if isinstance(own.attention, Attention):
            pieces |= {"q_b": own.attention.q_b.weight, "w_uk": own.attention.w_uk, "w_uv": own.attention.w_uv}
        else:
            q, k, v = own.attention.qkv.weight.split([16, 8, 8])
            pieces |= {"q": q, "k": k, "v": v}
        for name, piece in pieces.items():
            joined.setdefault(name, []).append(piece)
    got = {name: torch.cat(pieces) for name, pieces in joined.items()}
    a = whole.attention
    assert torch.equal(got["lm_head"], whole.lm_head.weight) and torch.equal(got["embed"], whole.embed)
    assert torch.equal(torch.cat([got["gate"], got["up"]]), whole.mlp.gate_up.weight)
    assert torch.equal(got["down"].T, whole.mlp.down.weight) and torch.equal(got["o"].T, a.o.weight)
    if isinstance(a, Attention):
        assert torch.equal(got["q_b"], a.q_b.weight)
        assert torch.equal(got["w_uk"], a.w_uk) and torch.equal(got["w_uv"], a.w_uv)
    else:
        assert torch.equal(torch.cat([got["q"], got["k"], got["v"]]), a.qkv.weight)
    with pytest.raises(
        ConfigError, match=r"cannot be shared out evenly \(tensor .* for 3 ranks\): run fewer ranks, or draft=suffix"
    ):
        load_draft(path, *target, dtype=torch.float32, device="cpu", slicing=Slicing(0, 3))


# ---- the drafter over pages ----------------------------------------------------------------------------------------


def work(rid: int, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Work:
    params = SamplingParams(temperature=0.0)
    return Work(
        rid=rid, slot=rid, start=start, tokens=tuple(tokens), blocks=tuple(blocks), sample=True, output_index=0,
        params=params, seed=0,
    )  # fmt: skip


def followed(works: list[Work], texts: list[list[int]], aux: list[Tensor], last: list[int], size: int) -> Followed:
    """A step of these works; `last` are the positions that stand of each, by rid."""
    batch = build(StepPlan(0, tuple(works)), torch.zeros(8, dtype=torch.int64), size, 4)
    after, rows, stand = [], [], []
    for w, start in zip(batch.work, batch.starts):
        after += texts[w.rid][w.start + 1 : w.end + 1]
        rows.append(aux[w.rid][w.start : w.end])
        stand.append(start + last[w.rid] - w.start)
    every = tuple(range(len(works)))
    return Followed(
        batch.work, batch.starts, batch.step, torch.cat(rows), torch.tensor(after), every, torch.tensor(stand)
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [4, 16])
def test_chains_with_a_cache_are_those_computed_anew(
    tmp_path: Path, target: tuple[KimiConfig, Weights], name: str, size: int
) -> None:
    raw = FORMS[name][0] | FORMS[name][1]
    config = Eagle3Config.from_dict(raw)
    tensors = tensors_of(config, seed=len(name))
    kept = {n: t for n, t in tensors.items() if n != "embed_tokens.weight"}
    drafter = load_drafter(written(tmp_path, raw, kept), *target, dtype=torch.float32, device=torch.device("cpu"))
    plain = Plain(raw, tensors | {"embed_tokens.weight": target[1].embed})
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(V, (40,), generator=generator).tolist() for _ in range(3)]
    aux = [torch.randn(40, config.num_aux * D, generator=generator) for _ in range(3)]
    blocks = torch.randperm(3 * 40 // size + 3, generator=generator).tolist()
    tables = [blocks[i * (40 // size + 1) :][: 40 // size + 1] for i in range(3)]
    drafter.allocate(len(blocks), size, torch.float32, torch.device("cpu"), max_num_seqs=3, max_model_len=48)

    def check(spans: dict[int, tuple[int, int, int]], length: int) -> None:
        """rid: (first position, end, last position that stands)."""
        works = [work(i, texts[i][a:b], a, tables[i][: -(-b // size)]) for i, (a, b, _) in spans.items()]
        step = followed(works, texts, aux, {i: s for i, (_, _, s) in spans.items()}, size)  # type: ignore[arg-type]
        with torch.inference_mode():
            got = drafter.propose(step, length)
        assert got is not None and got.tokens.shape == got.confidence.shape == (len(works), length)
        for k, w in enumerate(step.work):
            stands = spans[w.rid][2]
            drafts, sure = plain.chain(aux[w.rid][: stands + 1], texts[w.rid][: stands + 2], length)
            assert got.tokens[k].tolist() == drafts, (w.rid, stands)
            assert got.confidence[k].tolist() == pytest.approx(sure, abs=2e-5)

    check({0: (0, 11, 10), 1: (0, 3, 2)}, MAX_CHAIN_TOKENS)
    # Request 1 verified four tokens of which two stand, and so rewrites them after; 2 is a prompt beside it.
    check({1: (3, 8, 5), 2: (0, 15, 14)}, 3)
    check({0: (11, 12, 11), 1: (6, 9, 8), 2: (15, 16, 15)}, MAX_CHAIN_TOKENS)
    assert drafter.propose(followed([work(0, texts[0][12:13], 12, tables[0])], texts, aux, [12], size), 0) is None
    check({0: (13, 17, 14)}, 2)


def test_a_drafting_step_leaves_the_pool_alone(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    config = Eagle3Config.from_dict(MLA)
    drafter = load_drafter(
        written(tmp_path, MLA, tensors_of(config, 1)), *target, dtype=torch.float32, device=torch.device("cpu")
    )
    drafter.allocate(6, 4, torch.float32, torch.device("cpu"), max_num_seqs=2, max_model_len=24)
    text = list(range(20))
    aux = [torch.randn(20, 3 * D)]
    step = followed([work(0, text[:7], 0, (3, 5))], [text], aux, [6], 4)
    drafter.propose(step, 0)
    before = drafter._pages[:6].clone()
    assert before.abs().sum() > 0
    drafter.propose(step, MAX_CHAIN_TOKENS)
    assert torch.equal(before, drafter._pages[:6])
    step = followed(list(step.work), [[0, 1, 9, *text[3:]]], aux, [6], 4)
    shown = dataclasses.replace(step.step, replaced=(torch.tensor([1]), drafter._weights.embed[2:3]))
    drafter.propose(dataclasses.replace(step, step=shown), 0)
    torch.testing.assert_close(before, drafter._pages[:6])
    assert drafter.scratch_bytes(4, torch.float32, 2) == drafter._pages[6:].nbytes
    assert drafter.block_bytes(4, torch.float32) == drafter._pages[0].nbytes


# ---- the target's side ---------------------------------------------------------------------------------------------


def test_aux_states_are_what_enters_the_layers(target: tuple[KimiConfig, Weights]) -> None:
    config, weights = target
    model = KimiK2(config, weights, max_positions=32)
    pages = torch.zeros(LAYERS, 2, 16, 24)
    step = build(StepPlan(0, (work(0, range(9), 0, (0,)),)), torch.zeros(1, dtype=torch.int64), 16, 16).step
    with torch.inference_mode():
        plain, _ = model.hidden_with_aux(step, pages, ())
        hidden, aux = model.hidden_with_aux(step, pages, (0, 2, LAYERS))
        assert torch.equal(plain, hidden) and aux.shape == (9, 3 * D)
        assert torch.equal(aux[:, :D], weights.embed[:9])
        # A model cut off before layer 2 ends with what enters it.
        cut = KimiK2(config, dataclasses.replace(weights, layers=weights.layers[:2]), max_positions=32)
        assert torch.equal(cut.hidden_with_aux(step, pages, (2,))[1], aux[:, D : 2 * D])
        last = aux[:, 2 * D :]
        normed = last / (last.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights.norm
        assert torch.allclose(normed, hidden, atol=1e-5)


# ---- loading -------------------------------------------------------------------------------------------------------


def load(path: Path, target: tuple[KimiConfig, Weights]) -> Any:
    return load_draft(path, *target, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("raw", [MHA, MLA], ids=["mha", "mla"])
def test_both_spellings_of_the_layer_and_what_is_shared(
    tmp_path: Path, target: tuple[KimiConfig, Weights], raw: dict[str, Any]
) -> None:
    tensors = tensors_of(Eagle3Config.from_dict(raw), 3)
    own = load(written(tmp_path / "a", raw, tensors), target)[1]
    other = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items() if "embed" not in n and "head" not in n}
    other["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    shared = load(written(tmp_path / "b", raw, other), target)[1]
    assert torch.equal(own.embed, tensors["embed_tokens.weight"])
    assert own.lm_head.format == "dense" and torch.equal(own.lm_head.weight, tensors["lm_head.weight"])
    assert shared.embed is target[1].embed and shared.lm_head is target[1].lm_head
    assert torch.equal(own.mlp.gate_up.weight, shared.mlp.gate_up.weight)
    assert torch.equal(own.attention.o.weight, shared.attention.o.weight)


def test_aux_ids_of_both_conventions() -> None:
    def layers(ids: list[int] | None, count: int) -> tuple[int, ...]:
        raw = MLA | {"eagle_config": {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}}
        return Eagle3Config.from_dict(raw).aux_layers(count)

    assert layers([1, 29, 57], 61) == (2, 30, 58) == layers([2, 30, 58], 61) == layers(None, 61)
    assert layers([1, 2, 4], 6) == (2, 3, 5)
    with pytest.raises(CheckpointError, match=r"its target has 6"):
        layers([1, 29, 57], 6)
    with pytest.raises(CheckpointError, match="ascending"):
        layers([5, 2, 1], 6)


def test_the_fields_of_published_files() -> None:
    full = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 163840, "draft_vocab_size": 163840,
        "torch_dtype": "bfloat16", "rope_theta": 50000.0, "rope_scaling": YARN, "n_routed_experts": 384,
        "eagle_config": MLA["eagle_config"] | {
            "eagle_aux_hidden_state_layer_ids": [1, 29, 57], "next_layer_regular": True, "parallel_draft_step": 1,
        },
        "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 0, "output_attentions": False,
    }  # fmt: skip
    config = Eagle3Config.from_dict(full)
    assert config.kv_width == 576 and config.softmax_scale == pytest.approx(0.14467962580)
    shapes = expected(config)
    assert shapes["fc.weight"] == (7168, 21504)
    assert shapes["midlayer.self_attn.kv_a_proj_with_mqa.weight"] == (576, 14336)
    # The published one with a head of its own and no embedding is said to have 1.8 B parameters.
    assert sum(math.prod(s) for n, s in shapes.items() if n != "embed_tokens.weight") == pytest.approx(1.8e9, rel=0.03)
    mha = MHA | {"hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128}
    assert expected(Eagle3Config.from_dict(mha))["midlayer.self_attn.q_proj.weight"] == (8192, 14336)
    assert Eagle3Config.from_dict(mha).kv_width == 16384


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_sinks": 4}, "attention_sinks is not known"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config.use_aux_hidden_state=False is not served"),
        ({"eagle_config": {"surprise": 1}}, r"eagle_config.surprise is not known"),
        ({"fc_norm": True, "eagle_config": {"fc_norm": False}}, "fc_norm is True, but eagle_config says False"),
        ({"norm_output": 1}, "norm_output must be true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not served"),
        ({"use_moe": True}, "use_moe=True is not served"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not served"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "is no draft's"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size must be"),
        ({"hidden_size": 12}, "hidden_size must be a multiple of 8"),
        ({"num_aux_hidden_states": 2}, "names 3 layers, num_aux_hidden_states says 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type 'linear' is not served"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], says: str) -> None:
    raw = MLA | change
    if "eagle_config" in change:
        raw["eagle_config"] = MLA["eagle_config"] | change["eagle_config"]
    with pytest.raises(CheckpointError, match=says):
        Eagle3Config.from_dict(raw)


def test_checkpoints_that_are_refused(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    good = tensors_of(Eagle3Config.from_dict(MLA), 0)

    def says(match: str, raw: dict[str, Any] = MLA, **change: Tensor | None) -> None:
        tensors = {n: t for n, t in {**good, **change}.items() if t is not None}
        path = written(tmp_path / match.replace("/", "")[:20].replace(" ", "-"), raw, tensors)
        with pytest.raises(CheckpointError, match=match):
            load(path, target)

    says("lacks 1 tensor .fc.weight", **{"fc.weight": None})
    says("that no draft of this kind has", extra=torch.ones(2))
    says("fc_norm.0.weight.* that no draft", **{"fc_norm.0.weight": torch.ones(D)})
    says("has shape", **{"norm.weight": torch.ones(D + 1)})
    says("is int64, not", **{"norm.weight": torch.ones(D, dtype=torch.int64)})
    small = MLA | {"draft_vocab_size": 8}
    head = {"lm_head.weight": torch.ones(8, D)}
    says("lacks d2t", small, **head)
    says("d2t leads outside", small, **head, d2t=torch.full((8,), V))
    says("lacks lm_head.weight", small, **{"lm_head.weight": None}, d2t=torch.zeros(8, dtype=torch.int64))
    says("are the same one", **{"layers.0.hidden_norm.weight": torch.ones(D)})
    says("use the draft of this model", MLA | {"vocab_size": V + 8, "draft_vocab_size": V})


def test_a_draft_stored_in_e4m3_is_what_its_bytes_say(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    tensors = tensors_of(Eagle3Config.from_dict(MLA), 2)
    path = written(tmp_path / "large", MLA, {n: t.bfloat16() for n, t in tensors.items()})
    small = written(tmp_path / "small", MLA, {n: t.bfloat16() for n, t in tensors.items()})
    matrices = sum(t.numel() for t in tensors.values() if t.dim() > 1)
    assert narrow(small / "model.safetensors") <= (path / "model.safetensors").stat().st_size - matrices + 512
    wide, own = (load_draft(p, *target, dtype=torch.float32, device="cpu")[1] for p in (path, small))
    assert torch.equal(own.fc.weight, wide.fc.weight.to(torch.float8_e4m3fn).float())
    assert torch.equal(own.norm, wide.norm) and not torch.equal(own.fc.weight, wide.fc.weight)
    assert {t.dtype for t in read_tensors(small).values()} == {torch.float8_e4m3fn, torch.bfloat16}
    scaled = {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn), "fc.weight_scale": torch.ones(D)}
    with pytest.raises(CheckpointError, match=r"fc.weight_scale.* that no draft"):
        load_draft(written(tmp_path / "s", MLA, tensors | scaled), *target, dtype=torch.float32, device="cpu")
    norm = {"norm.weight": tensors["norm.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=r"norm.weight is float8_e4m3fn, not bfloat16"):
        load_draft(written(tmp_path / "n", MLA, tensors | norm), *target, dtype=torch.float32, device="cpu")


def test_a_draft_in_fp8_drafts_nearly_the_same(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    config, wide = target
    path = written(tmp_path, MLA, tensors_of(Eagle3Config.from_dict(MLA), 2))
    exact, rounded = (load_draft(path, config, wide, dtype=torch.float32, device="cpu")[1] for _ in range(2))
    to_fp8(rounded, wide)
    assert isinstance(exact.attention, Attention) and isinstance(rounded.attention, Attention)
    old, new = exact.attention.qkv_a, rounded.attention.qkv_a
    assert old.format == "dense" and new.format == "fp8"
    assert torch.allclose(new.weight.float() * new.scale[:, None], old.weight, rtol=0.07, atol=1e-2)
    # 96 inputs do not fit the format.
    assert rounded.fc.format == "dense" and exact.fc.format == "dense"
    drafters = [Eagle3Drafter(Eagle3Config.from_dict(MLA), w, (2, 3, 5)) for w in (exact, rounded)]
    text, aux = list(range(20)), [torch.randn(20, 3 * D)]
    got = []
    for drafter in drafters:
        drafter.allocate(4, 16, torch.float32, torch.device("cpu"), max_num_seqs=1, max_model_len=24)
        got.append(drafter.propose(followed([work(0, text[:9], 0, (3,))], [text], aux, [8], 16), 2))
    assert got[0] is not None and got[1] is not None
    assert torch.allclose(got[0].confidence[:, 0], got[1].confidence[:, 0], rtol=0.2)


def test_a_head_that_is_the_targets_stays_as_it_is(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    config, head = target[0], Matrix(torch.randn(V, 64))
    path = written(tmp_path, MLA, tensors_of(Eagle3Config.from_dict(MLA), 2))
    own = load_draft(path, config, target[1], dtype=torch.float32, device="cpu")[1]
    own.lm_head = head
    to_fp8(own, dataclasses.replace(target[1], lm_head=head))
    assert own.lm_head is head
    to_fp8(own, target[1])
    assert own.lm_head.format == "fp8"


def test_the_drafter_is_one(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    from perilune.speculation.drafter import Drafter

    path = written(tmp_path, MLA, tensors_of(Eagle3Config.from_dict(MLA), 0))
    drafter: Drafter = load_drafter(path, *target, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(drafter, Eagle3Drafter) and drafter.aux_layers == (2, 3, 5) and drafter.longest == 8
