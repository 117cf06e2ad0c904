"""Losses for training a drafter: the distance of its distribution q from the target's, p, of the same token.

All take p [M, W] (probabilities; with a cut vocabulary they may sum to less than 1) and log q [M, W] in float32 and
return [M]. `kl` is the usual one. The others aim at the acceptance in serving: a sampled draft is accepted with
probability sum min(p, q) (Leviathan et al., arXiv 2211.17192), and the small drafter that is closest to p in KL is not
the one with the highest acceptance. `nla` and `hybrid` are the LK losses of arXiv 2602.23881.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

SHARPNESS = 3.0  # `hybrid` weighs `kl` by e^(-SHARPNESS acceptance): at an acceptance of 1/3 by 0.37, `tv` by 0.63
LEAST = 1e-6  # lower bound of the acceptance in the logarithm of `nla`


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    """Cross entropy, which differs from the KL divergence only by a constant."""
    return -(p * log_q).sum(-1)


def overlap(p: Tensor, log_q: Tensor) -> Tensor:
    """sum min(p, q): the probability that a draft drawn from q is accepted by rejection sampling."""
    return p.minimum(log_q.exp()).sum(-1)


def tv(p: Tensor, log_q: Tensor) -> Tensor:
    """Probability of rejection: the total variation distance. Its gradients fade where q is far from p."""
    return 1 - overlap(p, log_q)


def nla(p: Tensor, log_q: Tensor) -> Tensor:
    """Negative logarithm of the acceptance: its gradients are those of `tv` over the acceptance."""
    return -overlap(p, log_q).clamp_min(LEAST).log()


def hybrid(p: Tensor, log_q: Tensor) -> Tensor:
    """A mean of `kl` and `tv`, in which the weight of `tv` grows with the acceptance."""
    accepted = overlap(p, log_q)
    share = (-SHARPNESS * accepted.detach()).exp()
    return share * kl(p, log_q) + (1 - share) * (1 - accepted)


LOSSES: Final[Mapping[str, Loss]] = {"kl": kl, "tv": tv, "nla": nla, "hybrid": hybrid}
