"""kimi-nano's eyes for training: the weights of perilune.model.moonvit as parameters, and what they are called in a
checkpoint. The forward pass is the served one."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perilune.media.limits import Limits
from perilune.model import names
from perilune.model.moonvit import EPS, Block, MoonVit, MoonVitWeights
from perilune.model.moonvit_config import MoonVitConfig
from perilune.tasks.pictures.scene import MOST_ON_ONE_SIDE, MOST_PATCHES

# config.json's vision_config as Kimi-K2.5 spells it, and media_proc_cfg of preprocessor_config.json.
VISION = {
    "patch_size": 14,
    "init_pos_emb_height": 12,
    "init_pos_emb_width": 16,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "vt_hidden_size": 112,
    "vt_intermediate_size": 256,
    "vt_num_hidden_layers": 6,
    "vt_num_attention_heads": 7,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 112,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "video_attn_type": "spatial_temporal",
}
PREPROCESSOR = {
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": MOST_PATCHES,
        "in_patch_limit_each_frame": MOST_PATCHES,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": MOST_ON_ONE_SIDE,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    }
}
LIMITS = Limits.from_dict(PREPROCESSOR["media_proc_cfg"])
ROW_SIZE = 1.6  # norm of a row of the text model's embeddings; the projector's outputs begin with it


def configuration(text_hidden_size: int) -> MoonVitConfig:
    return MoonVitConfig.from_dict({"vision_config": VISION, "text_config": {"hidden_size": text_hidden_size}})


class Eyes(nn.Module):
    """`layers.I.FIELD` and `ends.FIELD` are the fields of MoonVitWeights. `reading` says which of `marks` kinds of
    things is in the left and in the right half of each patch: it guides training and is not served."""

    mean: Tensor
    std: Tensor

    def __init__(self, c: MoonVitConfig, marks: int) -> None:
        super().__init__()
        self.c = c
        stored = {tensor.name: tensor.shape for tensor in names.vision_tensors(c)}
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {e.field: _initial(e, stored[names.vision_block(i) + e.suffix], c) for e in names.VISION_BLOCK}
            )
            for i in range(c.num_hidden_layers)
        )
        self.ends = nn.ParameterDict({e.field: _initial(e, stored[e.suffix], c) for e in names.VISION_ENDS})
        self.reading = nn.Linear(c.hidden_size, 2 * marks)
        for name, value in (("mean", LIMITS.image_mean), ("std", LIMITS.image_std)):
            self.register_buffer(name, torch.tensor(value)[:, None, None], persistent=False)

    def forward(self, pixels: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """pixels uint8 [n, patches, 3, P, P] of pictures of one grid (rows, columns) -> the text model's rows
        [n * tokens, D], and the logits of what is where [n * patches, 2, marks]."""
        weights = MoonVitWeights(blocks=[Block(**layer) for layer in self._records()], **self.ends)
        model = MoonVit(self.c, weights)
        # As `normalised`, but without a copy from the CPU, which a CUDA graph cannot contain.
        values = ((pixels.flatten(0, 1).float() / 255 - self.mean) / self.std).to(weights.patch.dtype)
        state = model.begin(values, [(1, *grid)] * len(pixels))
        for i in range(self.c.num_hidden_layers):
            model.block(state, i)
        last = F.layer_norm(state.x, (self.c.hidden_size,), weights.norm, weights.norm_bias, EPS)
        return model.finish(state), self.reading(last).unflatten(1, (2, -1))

    def _records(self) -> list[nn.ParameterDict]:
        return [layer for layer in self.layers if isinstance(layer, nn.ParameterDict)]

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Names in a checkpoint, and the parameters."""
        for i, layer in enumerate(self._records()):
            yield from ((names.vision_block(i) + e.suffix, layer[e.field]) for e in names.VISION_BLOCK)
        yield from ((e.suffix, self.ends[e.field]) for e in names.VISION_ENDS)


def _initial(entry: names.Entry, shape: tuple[int, ...], c: MoonVitConfig) -> nn.Parameter:
    if entry.field.endswith("_bias"):
        return nn.Parameter(torch.zeros(shape))
    if len(shape) == 1:
        return nn.Parameter(torch.ones(shape))
    inputs = torch.Size(shape[1:]).numel()
    scale = {
        "positions": 0.3,
        "out": (2 * c.num_hidden_layers * inputs) ** -0.5,
        "fc1": (2 * c.num_hidden_layers * inputs) ** -0.5,
        "linear1": ROW_SIZE / (0.6 * (shape[0] * inputs) ** 0.5),
    }.get(entry.field, inputs**-0.5)
    return nn.Parameter(torch.randn(shape) * scale)
