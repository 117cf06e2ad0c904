"""Name, shape and split of every tensor of a checkpoint: the table that reading, checking and writing use.

A table lists the tensors of one record of model/weights.py in the checkpoint's order. A record's `place` is the prefix
of their names, such as "model.layers.3.mlp."; NESTED, the outer prefix in checkpoints with a vision tower, is left out.

Letters: D hidden size, X the attention's input width (D; 2 D in a draft), Q q_lora_rank, R kv_lora_rank, H heads, n and
r nope and rope width of a query, v value width, I intermediate width of the MLP, E routed experts, V vocabulary. In a
draft: W its vocabulary, T the target's hidden size, A aux states, K key-value heads, d head width. In a vision tower: C
hidden size, I intermediate width, P pixels on a patch's side, Y and X rows and columns of the position table, T the
text model's hidden size.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perilune.model.config import KimiConfig
    from perilune.model.eagle3_config import Eagle3Config
    from perilune.model.moonvit_config import MoonVitConfig

NESTED = "language_model."
NESTED_LAYERS = NESTED + "model.layers."
LEGACY_LAYERS = NESTED + "layers."  # instead of NESTED_LAYERS, in some NVFP4 shards of Kimi K2.5
VISION = ("vision_tower.", "mm_projector.")  # prefixes of the tensors of the vision tower and its projector
INV_FREQ = ".rotary_emb.inv_freq"  # in some checkpoints; computed from config.json instead
KV_SCALES = (".k_scale", ".v_scale")  # scales of an FP8 KV cache, which is not served
TIME_WEIGHT = "pos_emb.time_weight"  # in the vision tower of some checkpoints; computed from its formula instead
SKIPPED = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.(\w+\.)?[kv]_scale)")
ROUTED = ".mlp.experts."  # in the name of every tensor of a routed expert
# A matrix of a routed expert. Groups: name prefix of the expert, of all experts of its layer; gate, up or down.
EXPERT = re.compile(r"((.*\.mlp\.experts)\.\d+\.)(gate|up|down)_proj(?:\.weight)?")
ROUTER_BIAS = ".e_score_correction_bias"


class Entry(NamedTuple):
    """One tensor of a record.

    field   of the record in model/weights.py; several tensors of one field are joined along dimension 0, in order
    suffix  of the name after the record's place; a linear layer's is followed by ".weight", or by its format's suffixes
    shape   letters, the dimensions separated by spaces; products are one word
    axis    the dimension along which tensor parallelism splits it, by whole heads or single rows or columns. None: each
            rank holds all of it
    """

    field: str
    suffix: str
    shape: str
    axis: int | None = None
    linear: bool = False


def _linear(field: str, suffix: str, shape: str, axis: int | None = None) -> Entry:
    return Entry(field, suffix, shape, axis, linear=True)


EMBED = Entry("embed", "model.embed_tokens.weight", "V D", 0)
ENDS = (Entry("norm", "model.norm.weight", "D"), _linear("lm_head", "lm_head", "V D", 0))
NORMS = (Entry("input_norm", "input_layernorm.weight", "D"), Entry("post_norm", "post_attention_layernorm.weight", "D"))
ATTENTION = (
    _linear("qkv_a", "q_a_proj", "Q X"),
    Entry("q_a_norm", "q_a_layernorm.weight", "Q"),
    _linear("q_b", "q_b_proj", "H(n+r) Q", 0),
    _linear("qkv_a", "kv_a_proj_with_mqa", "R+r X"),
    Entry("kv_a_norm", "kv_a_layernorm.weight", "R"),
    _linear("kv_b", "kv_b_proj", "H(n+v) R", 0),  # per head n rows for w_uk, then v rows for w_uv
    _linear("o", "o_proj", "D Hv", 1),
)
MLP = (_linear("gate_up", "gate_proj", "I D", 0), _linear("gate_up", "up_proj", "I D", 0),
       _linear("down", "down_proj", "D I", 1))  # fmt: skip
ROUTER = (Entry("gate", "gate.weight", "E D"), Entry("bias", "gate" + ROUTER_BIAS, "E"))
# The weight of a linear layer other than lm_head.
LAYER_LINEAR = re.compile(rf".*\.({'|'.join(entry.suffix for entry in (*ATTENTION, *MLP) if entry.linear)})\.weight")

_DRAFT_LAYER = "midlayer."  # other drafts say "layers.0."
_DRAFT_OTHER = "layers.0."
_DRAFT_ENDS = (
    Entry("embed", "embed_tokens.weight", "V D", 0), _linear("fc", "fc", "D AT"), Entry("norm", "norm.weight", "D"),
    _linear("lm_head", "lm_head", "W D", 0),
)  # fmt: skip
_DRAFT_NORMS = (Entry("hidden_norm", "hidden_norm.weight", "D"), *NORMS)
_DRAFT_HEADS = (
    _linear("qkv", "q_proj", "Hd X", 0), _linear("qkv", "k_proj", "Kd X", 0), _linear("qkv", "v_proj", "Kd X", 0),
    _linear("o", "o_proj", "D Hd", 1),
)  # fmt: skip
DRAFT_EMBED, DRAFT_HEAD = "embed_tokens.weight", "lm_head.weight"
DRAFT_OPTIONAL = (DRAFT_EMBED, DRAFT_HEAD)  # a draft without them uses its target's


def _with_bias(field: str, suffix: str, shape: str) -> tuple[Entry, Entry]:
    """A tower's linear layer or norm: both have a bias, of as many values as there are outputs."""
    outputs = shape.split()[0]
    return Entry(field, f"{suffix}.weight", shape), Entry(f"{field}_bias", f"{suffix}.bias", outputs)


VISION_BLOCK = (
    *_with_bias("norm0", "norm0", "C"), *_with_bias("norm1", "norm1", "C"),
    *_with_bias("fc0", "mlp.fc0", "I C"), *_with_bias("fc1", "mlp.fc1", "C I"),
    *_with_bias("qkv", "wqkv", "3C C"), *_with_bias("out", "wo", "C C"),
)  # fmt: skip
VISION_ENDS = (
    *_with_bias("patch", "vision_tower.patch_embed.proj", "C 3 P P"),
    Entry("positions", "vision_tower.patch_embed.pos_emb.weight", "Y X C"),
    *_with_bias("norm", "vision_tower.encoder.final_layernorm", "C"),
    *_with_bias("pre_norm", "mm_projector.pre_norm", "C"),
    *_with_bias("linear0", "mm_projector.proj.0", "4C 4C"), *_with_bias("linear1", "mm_projector.proj.2", "T 4C"),
)  # fmt: skip
# How converted checkpoints spell the projector's layers.
_VISION_SPELLINGS = {"mm_projector.linear_1.": "mm_projector.proj.0.", "mm_projector.linear_2.": "mm_projector.proj.2."}

# How a quantization_config names all modules but the routed experts: compressed-tensors' `ignore`, ModelOpt's globs,
# and compressed-tensors' `targets` of a group in FP8.
UNROUTED_EXPRESSIONS = (
    "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
)  # fmt: skip
UNROUTED_GLOBS = (
    "*embed_tokens*", "*lm_head*", "*self_attn*", "*shared_experts*", "*mlp.gate*", "*mlp.up_proj*", "*mlp.down_proj*",
    "*mm_projector*", "*vision_tower*",
)  # fmt: skip
UNROUTED_TARGETS = (
    "re:.*self_attn.*_proj.*", "re:.*shared_experts.*_proj$", "re:.*mlp\\.(gate|up|down)_proj$", "re:.*lm_head$",
)  # fmt: skip

Letters = Mapping[str, int]
Names = Mapping[str, tuple[str, ...]]  # by field, in order; a linear layer's without ".weight"


class Tensor(NamedTuple):
    """A tensor of a given model, stored unquantised."""

    name: str
    shape: tuple[int, ...]
    entry: Entry
    units: int  # number of indivisible pieces along entry.axis: heads, or single rows or columns

    def part(self, rank: int, ranks: int) -> tuple[slice, ...]:
        """The slices that `rank` of `ranks` holds; ValueError if the units cannot be divided evenly."""
        if self.entry.axis is None:
            return tuple(slice(0, size) for size in self.shape)
        if self.units % ranks:
            raise ValueError(f"tensor {self.name}: {self.units} heads, rows or columns for {ranks} ranks")
        size = self.shape[self.entry.axis] // ranks
        own = slice(rank * size, (rank + 1) * size)
        return tuple(own if axis == self.entry.axis else slice(0, n) for axis, n in enumerate(self.shape))


def named(entries: Iterable[Entry], place: str = "") -> Names:
    """The tensors' names where the record's names begin with `place`."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        found[entry.field] = (*found.get(entry.field, ()), place + entry.suffix)
    return found


def model() -> Names:
    return named((EMBED, *ENDS))


def layer(i: int) -> Names:
    """Names of norms, attention and router; a dense layer has no router."""
    at = _layer(i)
    return {**named(NORMS, at), **named(ATTENTION, f"{at}self_attn."), **named(ROUTER, ffn(i))}


def ffn(i: int) -> str:
    """The place of a layer's MLP, or of its router and experts."""
    return f"{_layer(i)}mlp."


def dense(i: int) -> Names:
    return mlp(ffn(i))


def shared(i: int) -> Names:
    return mlp(ffn(i) + "shared_experts.")


def experts(i: int) -> str:
    """The place of all routed experts of a layer, without the last dot."""
    return ffn(i) + "experts"


def expert(i: int, e: int) -> Names:
    return mlp(f"{experts(i)}.{e}.")


def mlp(place: str) -> Names:
    return named(MLP, place)


def _layer(i: int) -> str:
    return f"model.layers.{i}."


def letters(c: "KimiConfig | Eagle3Config", inputs: int, width: int) -> dict[str, int]:
    """The sizes of the letters that a model and a draft share; X is `inputs`, I is `width`."""
    heads, n, r, v = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    return {
        "D": c.hidden_size, "X": inputs, "I": width, "V": c.vocab_size, "Q": c.q_lora_rank, "R": c.kv_lora_rank,
        "R+r": c.kv_lora_rank + r, "H": heads, "n": n, "v": v, "H(n+r)": heads * (n + r), "H(n+v)": heads * (n + v),
        "Hv": heads * v,
    }  # fmt: skip


def tensors(c: "KimiConfig") -> Iterator[Tensor]:
    """Every tensor of the text model, in the checkpoint's order."""
    sizes = letters(c, c.hidden_size, c.intermediate_size) | {"E": c.n_routed_experts}
    routed = sizes | {"I": c.moe_intermediate_size}
    sums = sizes | {"I": c.n_shared_experts * c.moe_intermediate_size}
    norms, attention, router = (_sized(entries, sizes) for entries in (NORMS, ATTENTION, ROUTER))
    dense, expert, shared = (_sized(MLP, widths) for widths in (sizes, routed, sums))
    yield from _at("", _sized((EMBED,), sizes))
    for i in range(c.num_hidden_layers):
        at = _layer(i)
        yield from _at(at, norms)
        yield from _at(f"{at}self_attn.", attention)
        if i < c.first_k_dense_replace:
            yield from _at(f"{at}mlp.", dense)
            continue
        yield from _at(f"{at}mlp.", router)
        for e in range(c.n_routed_experts):
            yield from _at(f"{experts(i)}.{e}.", expert)
        if c.n_shared_experts:
            yield from _at(f"{at}mlp.shared_experts.", shared)
    yield from _at("", _sized(ENDS, sizes))


def ends(c: "KimiConfig") -> list[Tensor]:
    """Embedding, last norm and lm_head."""
    return _sized((EMBED, *ENDS), letters(c, c.hidden_size, c.intermediate_size))


def expected(config: "KimiConfig") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the text model, unquantised and without prefix."""
    return {tensor.name: tensor.shape for tensor in tensors(config)}


def draft(c: "Eagle3Config") -> Names:
    """Names of a draft's floating-point tensors, in full."""
    found: dict[str, tuple[str, ...]] = {}
    for tensor in draft_tensors(c):
        found[tensor.entry.field] = (*found.get(tensor.entry.field, ()), tensor.name)
    return found


def draft_expected(config: "Eagle3Config") -> dict[str, tuple[int, ...]]:
    """Name and shape of every floating-point tensor, those of DRAFT_OPTIONAL included."""
    return {tensor.name: tensor.shape for tensor in draft_tensors(config)}


def draft_tensors(c: "Eagle3Config") -> Iterator[Tensor]:
    """Every floating-point tensor of a draft, in full names, those of DRAFT_OPTIONAL included."""
    sizes = letters(c, 2 * c.hidden_size, c.intermediate_size) | {
        "W": c.draft_vocab_size, "T": c.target_hidden_size, "AT": c.num_aux * c.target_hidden_size,
        "Hd": c.num_attention_heads * c.head_dim, "Kd": c.num_key_value_heads * c.head_dim,
        "K": c.num_key_value_heads,
    }  # fmt: skip
    records = [("", _DRAFT_ENDS), (_DRAFT_LAYER, _DRAFT_NORMS), (f"{_DRAFT_LAYER}mlp.", MLP)]
    if c.fc_norm:
        records.append(("", tuple(Entry("fc_norms", f"fc_norm.{i}.weight", "T") for i in range(c.num_aux))))
    if c.norm_before_fc:
        records.append(("", (Entry("joint_norm", "input_norm.weight", "AT"),)))
    records.append((f"{_DRAFT_LAYER}self_attn.", _DRAFT_HEADS if c.form == "mha" else ATTENTION))
    for place, entries in records:
        yield from _at(place, _sized(entries, sizes))


def draft_name(stored: str) -> str:
    """The name in this table of a draft's tensor, which checkpoints spell in several ways."""
    usual = stored.removeprefix("model.")
    return _DRAFT_LAYER + usual.removeprefix(_DRAFT_OTHER) if usual.startswith(_DRAFT_OTHER) else usual


def vision_tensors(c: "MoonVitConfig") -> Iterator[Tensor]:
    """Every tensor of the vision tower and its projector. Each rank holds them all."""
    sizes = {
        "C": c.hidden_size, "3C": 3 * c.hidden_size, "4C": c.merged_size, "I": c.intermediate_size, "3": 3,
        "P": c.patch_size, "Y": c.pos_emb_height, "X": c.pos_emb_width, "T": c.text_hidden_size,
    }  # fmt: skip
    block = _sized(VISION_BLOCK, sizes)
    for i in range(c.num_hidden_layers):
        yield from _at(vision_block(i), block)
    yield from _at("", _sized(VISION_ENDS, sizes))


def vision_block(i: int) -> str:
    """The place of a layer of the vision tower."""
    return f"vision_tower.encoder.blocks.{i}."


def vision_name(stored: str) -> str:
    """The name in this table of a vision tensor, which checkpoints spell in two ways."""
    for theirs, ours in _VISION_SPELLINGS.items():
        if stored.startswith(theirs):
            return ours + stored.removeprefix(theirs)
    return stored


def shapes(entries: Iterable[Entry], sizes: Letters) -> dict[str, tuple[int, ...]]:
    """The shape of each field that `entries` fill."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        rows, *inputs = (sizes[word] for word in entry.shape.split())
        found[entry.field] = (found.get(entry.field, (0,))[0] + rows, *inputs)
    return found


def _sized(entries: Iterable[Entry], sizes: Letters) -> list[Tensor]:
    """The tensors of a record; their names lack the record's place, which `_at` adds."""
    found = []
    for entry in entries:
        words = entry.shape.split()
        units = 1
        if entry.axis is not None:
            word = words[entry.axis]
            units = sizes[word[0] if word[0] in "HK" else word]
        name = f"{entry.suffix}.weight" if entry.linear else entry.suffix
        found.append(Tensor(name, tuple(sizes[word] for word in words), entry, units))
    return found


def _at(place: str, record: Iterable[Tensor]) -> Iterator[Tensor]:
    for name, shape, entry, units in record:
        yield Tensor(place + name, shape, entry, units)
