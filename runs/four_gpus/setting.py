"""What is measured, with which memory plan, and what is wanted: the same for all parts of a run."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.bench.shapes import SHAPES
from perilune.cli.shared import synthetic
from perilune.formats.hub import resolve_model

SHAPE, CPU_SHAPE = "kimi-k2.5", "tiny"
ACCEPTED, DRAFTS = 2.88, 3  # declared acceptance length and its drafts: K2.5's EAGLE-3 model, SPEED-Bench coding
CACHED_SHARE = 0.9  # share of a prompt that is the beginning of an earlier one, so cached
DECODING = 8  # users that decode while prompts of others arrive
# prompt_patience in part d. Prompts of 10,000 tokens every 3 s beside 64 requests would wait longer than the default,
# 2 s, and the wanted bound of token intervals would not hold.
PATIENCE_SECONDS = 10.0
MEMORY_FRACTION = 0.97  # of the memory beside weights. Larger: nothing is left for fragmentation; smaller: less KV


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run. `start`: the engine start that it shares with other parts; `seconds`: at most, on GPUs."""

    letter: str
    start: str
    seconds: float
    what: str


PARTS = {
    part.letter: part
    for part in (
        Part("f", "served", 60, "Artificial-Analysis protocol over HTTP, drafts, acceptance declared"),
        Part("e", "served", 60, "time to a first token over HTTP: cold, cached, beside users that decode"),
        Part("b", "whole", 30, "one request after a long prompt, no drafts"),
        Part("c", "whole", 30, "a step that verifies 3 drafts of one request"),
        Part("p", "whole", 20, "a prompt, per layer"),
        Part("d", "whole", 90, "16 and 64 requests, and their pace while prompts come"),
        Part("a", "sharded", 240, "a request as long as the context, its KV sharded over ranks"),
        Part("h", "plain", 60, "as f without drafts"),
        Part("v", "drafting", 30, "what three drafts of one request take in a cycle"),
    )
}
STARTS = ("served", "whole", "sharded", "plain", "drafting")  # in this order
USUAL = "febcpda"  # default parts: all but h (f without drafts) and v (one cycle of f)
START_SECONDS = 200.0  # limit for starting an engine, which makes 540 GB of weights on four GPUs and captures graphs


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers."""

    prompt: int = 10_000
    short: int = 1_024
    context: int = 262_144
    answer: int = 1_500
    decoded: int = 16  # tokens that the longest request decodes
    batches: tuple[int, ...] = (16, 64)
    rounds: int = 3  # of requests over HTTP
    # Part d. In 8 s each of 16 requests has 483 intervals; 4 may be long, and prompts use these 4, so one step that is
    # delayed for another reason decides the p99. In 16 s 9 of 990 may be long: prompts use 5, a graph's capture 1.
    arrival_seconds: float = 16.0
    every_seconds: float = 2.0  # from the end of one prompt to the next, beside users that decode


CPU_SIZES = Sizes(600, 128, 1_200, 24, 4, (2, 4), 1, 2.0, 0.05)

# Of 61 layers on four GPUs, from the issue of this run: (part, figure): (wanted, whether more is better).
WANTED: dict[tuple[str, str], tuple[float, bool]] = {
    ("b", "tokens_per_s"): (300, True),
    ("c", "verify ms at 1024"): (5.4, False),
    ("c", "verify ms at 10000"): (5.9, False),
    ("d", "tokens_per_s of 16"): (1050, True),
    ("d", "tokens_per_s of 64"): (1800, True),
    ("d", "p99 over median of 16"): (2.0, False),
    ("d", "p99 over median of 64"): (2.0, False),
    ("e", "ttft_s cold"): (0.45, False),
    ("e", "ttft_s cached"): (0.150, False),
    ("e", "ttft_s beside 8"): (0.117, False),
    ("f", "output_tokens_per_s"): (420, True),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and how it is run. model: a checkpoint, instead of random weights of a shape. chunk: most tokens of
    a step, so of a prompt's chunk."""

    tp: int
    layers: int | None = None
    model: str | None = None
    device: str = "cuda"
    kv_dtype: str = "fp8"
    chunk: int = 10_240
    fp8_activations: bool = False
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def shape(self) -> str | None:
        return None if self.model else SHAPE if self.device == "cuda" else CPU_SHAPE

    @property
    def depth(self) -> int:
        """Layers of the shape that are run."""
        assert self.shape is not None
        return self.layers or int(SHAPES[self.shape]["num_hidden_layers"])

    @property
    def whole(self) -> bool:
        """Whether this is the model of WANTED."""
        return self.shape == SHAPE and self.depth == SHAPES[SHAPE]["num_hidden_layers"]

    @contextlib.contextmanager
    def directory(self) -> Iterator[Path]:
        """The model's, until the context ends."""
        if self.model is not None:
            yield resolve_model(self.model)
            return
        assert self.shape is not None
        with synthetic.directory(self.shape, self.layers) as path:
            yield path

    def engine(self, start: str) -> dict[str, Any]:
        """Keys of EngineConfig for a start. What takes memory beside KV is the same for all."""
        sizes, config = self.sizes, self._memory()
        longest = sizes.prompt + sizes.answer + 64
        if start == "sharded":
            config |= {"kv_shards": self.tp, "max_num_seqs": 1, "max_model_len": sizes.context, "draft": "off"}
            return config
        config |= {"kv_shards": 1, "max_model_len": longest, "draft": "off"}
        if start == "whole":
            config |= {"max_num_seqs": max(sizes.batches) + 2, "max_model_len": max(longest, 2 * sizes.prompt)}
            return config | {"prompt_patience": PATIENCE_SECONDS}
        config |= {"max_num_seqs": DECODING + 8 if start == "served" else 1}
        if start != "plain":
            # Prompts beside users come at once, as fast as they can: part d bounds users' intervals instead.
            config |= {"decode_stretch": 0, "draft": "eagle3", "draft_tokens": DRAFTS}
            config |= {} if self.model else {"declared_acceptance": ACCEPTED}
        return config

    def _memory(self) -> dict[str, Any]:
        return {
            "tp": self.tp, "device": self.device, "seed": 1, "rest_dtype": "fp8", "expert_scales": "compact",
            "kv_dtype": self.kv_dtype, "max_step_tokens": self.chunk,
            "fp8_activations": self.fp8_activations, "memory_fraction": MEMORY_FRACTION,
        }  # fmt: skip

    def keys(self) -> dict[str, Any]:
        """What every row says beside what the engine says of itself."""
        keys = {"run": "four-gpus", "prefill_chunk_tokens": self.chunk}
        return keys | ({"fp8_activations": True} if self.fp8_activations else {})
