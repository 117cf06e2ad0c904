"""The latent cache in FP8, as an option at load: 640 bytes per token and layer instead of bfloat16's 1,152.

kv_a_norm makes every latent a vector with a mean square of 1, times the norm's weights. These weights move into the two
halves of kv_b_proj, the only matrices that read latents. A constant takes their place: the largest power of two c with
c sqrt(R) <= 448. So every latent fits e4m3 whatever the activations are, without a scale for a token or a tensor; only
values below 2^-10 of the root mean square become subnormal. Rope keys have no norm that would bound them, and a rope
value changes a score as much as 8 latent values: rope keys stay bfloat16.
"""

import math

import torch

from perilune.model.weights import Weights
from perilune.ops.layouts.latent_cache import LARGEST


def constant(latent: int) -> float:
    """The factor of a normalised latent of this width before it is rounded to e4m3."""
    return 2.0 ** math.floor(math.log2(LARGEST / math.sqrt(latent)))


def to_fp8_latents(weights: Weights) -> None:
    """Moves the weights of kv_a_norm into w_uk and w_uv, in place; drops w_uv's FP8 copy, which must be made again. A
    second call changes nothing."""
    for layer in weights.layers:
        a = layer.attention
        c = constant(a.kv_a_norm.shape[0])
        factor = a.kv_a_norm.float() / c
        if bool((factor == 1).all()):
            continue
        a.uv_fp8 = None
        a.w_uk.copy_(a.w_uk.float() * factor)
        a.w_uv.copy_(a.w_uv.float() * factor.unsqueeze(-1))
        a.kv_a_norm = torch.full_like(a.kv_a_norm, c)
