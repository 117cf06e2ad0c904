"""Random small checkpoints in the form of Kimi K2.5, with a vision tower, and transformers as the judge of them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from perilune.media.decoder import Picture
from perilune.media.patches import digest
from tests import oracle

PAD = 500  # the placeholder's id
VISION: dict[str, Any] = dict(
    patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8, init_pos_emb_time=4, merge_kernel_size=[2, 2],
    merge_type="sd2_tpool", mm_hidden_size=48, mm_projector_type="patchmerger", pos_emb_type="divided_fixed",
    projector_hidden_act="gelu", projector_ln_eps=1e-5, video_attn_type="spatial_temporal",
    vt_hidden_size=48, vt_intermediate_size=56, vt_num_attention_heads=4, vt_num_hidden_layers=3,
    _attn_implementation="flash_attention_2",
)  # fmt: skip


def tower(hidden: int, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """vision_config with Moonshot's spellings, for a text model of width `hidden`, and random weights large enough for
    every term to matter, under Moonshot's names."""
    vision = VISION | {"text_hidden_size": hidden} | changes
    width, inner, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (
            vision["init_pos_emb_height"], vision["init_pos_emb_width"], width,
        ),
        "mm_projector.proj.0.weight": (4 * width, 4 * width), "mm_projector.proj.0.bias": (4 * width,),
        "mm_projector.proj.2.weight": (hidden, 4 * width), "mm_projector.proj.2.bias": (hidden,),
    }  # fmt: skip
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for i in range(vision["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{i}."
        norms += [at + "norm0", at + "norm1"]
        for layer, (o, n) in {
            "wqkv": (3 * width, width), "wo": (width, width), "mlp.fc0": (inner, width), "mlp.fc1": (width, inner),
        }.items():  # fmt: skip
            shapes |= {f"{at}{layer}.weight": (o, n), f"{at}{layer}.bias": (o,)}
    generator = torch.Generator().manual_seed(len(shapes) + width)
    tensors = {}
    for name, shape in shapes.items():
        inputs = math.prod(shape[1:]) if name.endswith("weight") and "pos_emb" not in name else 4
        tensors[name] = torch.randn(shape, generator=generator) * inputs**-0.5
    for norm in norms:
        tensors[norm + ".weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
        tensors[norm + ".bias"] = 0.2 * torch.randn(width, generator=generator)
    return vision, tensors


def reference_tower(path: Path, vision: dict[str, Any], text: dict[str, Any]) -> Any:
    """transformers' model with the tower in `path`; its names and the order of rotated pairs it converts by itself."""
    from transformers import DeepseekV3Config
    from transformers.models.kimi_k25 import configuration_kimi_k25 as theirs
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25Model

    config = theirs.Kimi_K25Config(
        text_config=DeepseekV3Config(**{k: v for k, v in text.items() if k != "model_type"}).to_dict(),
        vision_config=dict(
            patch_size=vision["patch_size"], pos_emb_height=vision["init_pos_emb_height"],
            pos_emb_width=vision["init_pos_emb_width"], num_attention_heads=vision["vt_num_attention_heads"],
            num_hidden_layers=vision["vt_num_hidden_layers"], hidden_size=vision["vt_hidden_size"],
            intermediate_size=vision["vt_intermediate_size"],
        ),
        projection_hidden_size=vision["vt_hidden_size"],
    )  # fmt: skip
    reference, info = Kimi_K25Model.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    lost = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    assert [key for key in lost if "vision" in key or "projector" in key] == []
    return reference.eval()


def picture(rows: int, columns: int, seed: int, frames: int = 1) -> Picture:
    """Random patches, as the decoder gives a picture, or a chunk of so many frames, of this grid."""
    grid = (frames, rows, columns)
    patches = np.random.default_rng(seed).integers(0, 256, (frames * rows * columns, 3, 14, 14), dtype=np.uint8)
    return Picture(patches, grid, rows * columns // 4, digest(patches, grid))


@dataclass(frozen=True)
class Seeing:
    """A checkpoint, transformers' text model and its tower on the same weights."""

    path: Path
    text: oracle.Checkpoint
    tower: Any
    pad: int

    @torch.no_grad()
    def rows(self, picture: Picture) -> torch.Tensor:
        pixels = torch.tensor(picture.patches).double() / 127.5 - 1
        seen = self.tower.vision_tower(pixels.float(), grid_thw=torch.tensor([picture.grid]))
        return self.tower.mm_projector(seen.pooler_output).squeeze(1)

    @torch.no_grad()
    def logits(self, tokens: list[int], pictures: list[Picture]) -> torch.Tensor:
        """[len(tokens), V]: the whole text at once, no cache, no chunks."""
        ids = torch.tensor([tokens])
        h = self.text.reference.get_input_embeddings()(ids)
        if pictures:
            h[ids == self.pad] = torch.cat([self.rows(p) for p in pictures])
        return self.text.reference(inputs_embeds=h).logits[0]

    def greedy(self, prompt: list[int], pictures: list[Picture], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, pictures)[-1].argmax()))
        return tokens[len(prompt) :]


def make(path: Path, *, patch_limit: int = 256, pad: int = PAD, **text: Any) -> Seeing:
    """Writes a checkpoint to `path`; its preprocessor takes `patch_limit` patches of a picture, and a fourth of them of
    a video's frame."""
    inner = oracle.make(path, **text)
    config = json.loads((path / "config.json").read_text())
    hidden = config["hidden_size"]
    vision, weights = tower(hidden)
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": config,
        "vision_config": vision, "tie_word_embeddings": False, "media_placeholder_token_id": pad,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(outer))
    limits = {"media_proc_cfg": {"in_patch_limit": patch_limit, "in_patch_limit_each_frame": patch_limit // 4}}
    (path / "preprocessor_config.json").write_text(json.dumps(limits))
    named = {f"language_model.{name}": t for name, t in load_file(path / "model.safetensors").items()}
    save_file(named | weights, path / "model.safetensors", metadata={"format": "pt"})
    alone = path.parent / f"{path.name}-tower"
    alone.mkdir()
    save_file(weights, alone / "model.safetensors", metadata={"format": "pt"})
    (alone / "config.json").write_text(json.dumps(outer))
    return Seeing(path, inner, reference_tower(alone, vision, oracle.BASE | text | {"num_hidden_layers": 1}), pad)
