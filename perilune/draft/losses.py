"""What a drafter is trained to minimise: how far the draft's distribution q is from the target's, p, of the same token.

All take p [M, W] (probabilities; with a cut vocabulary they may sum to less than 1) and log q [M, W] in float32 and
give [M]. `kl` is the usual one. The others aim at what counts in serving, how much of a draft is accepted: a sampled
draft is accepted with probability sum min(p, q) (Leviathan et al., arXiv 2211.17192), and a small draft that comes
closest to p in KL is not the one of which most is accepted. `nla` and `hybrid` are the LK losses of arXiv 2602.23881.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

SHARPNESS = 3.0  # of `hybrid`: at an acceptance of 1/3 the two parts weigh 0.37 and 0.63
LEAST = 1e-6  # its logarithm falls no further where less is accepted


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    """Cross entropy: the KL divergence but for a constant."""
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
    """`kl` where little is accepted, more and more of `tv` the more is."""
    accepted = overlap(p, log_q)
    share = (-SHARPNESS * accepted.detach()).exp()
    return share * kl(p, log_q) + (1 - share) * (1 - accepted)


LOSSES: Final[Mapping[str, Loss]] = {"kl": kl, "tv": tv, "nla": nla, "hybrid": hybrid}
