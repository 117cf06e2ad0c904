"""Domains for texts without labels: groups of texts with similar tokens. No torch here.

A text's vector has the square roots of its token counts times the tokens' inverse document frequencies, summed into
FEATURES buckets by a hash, with length 1. Groups are by spherical k-means from k-means++ centres, the best of STARTS.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FEATURES = 512
STARTS, ROUNDS = 8, 20
NAME_TOKENS = 3  # tokens in a group's name


def group(texts: Sequence[Sequence[int]], count: int, *, seed: int = 0) -> list[int]:
    """A number below `count` for each text, the largest group first; fewer groups where there are fewer texts."""
    count = min(count, len(texts))
    if count < 2:
        return [0] * len(texts)
    vectors, rng = _vectors(texts), np.random.default_rng(seed)
    _, member = max((_means(vectors, count, rng) for _ in range(STARTS)), key=lambda found: found[0])
    order = [number for number, _ in Counter(member).most_common()]
    return [order.index(number) for number in member]


def names(texts: Sequence[Sequence[int]], groups: Sequence[int], spell: Callable[[int], str]) -> list[str]:
    """Each group's name: tokens that are in more of its texts than of the others."""
    having: list[Counter[int]] = [Counter() for _ in range(max(groups, default=-1) + 1)]
    sizes = Counter(groups)
    for text, number in zip(texts, groups):
        having[number].update(set(text))
    everywhere = sum(having, Counter[int]())
    found = []
    for number, own in enumerate(having):

        def telling(token: int, own: Counter[int] = own, size: int = sizes[number]) -> float:
            elsewhere = (everywhere[token] - own[token]) / max(len(texts) - size, 1)
            return own[token] / size - elsewhere

        best = sorted(own, key=lambda token: (-telling(token), token))[:NAME_TOKENS]
        found.append(f"{number}: " + " ".join(spell(token).strip() or "_" for token in best))
    return found


def _vectors(texts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    having = Counter(token for text in texts for token in set(text))
    vectors = np.zeros((len(texts), FEATURES))
    for row, text in zip(vectors, texts):
        for token, times in Counter(text).items():
            # Multiplicative hash: neighbouring ids get unrelated features.
            row[token * 2654435761 % 2**32 * FEATURES >> 32] += math.sqrt(times) * math.log(
                len(texts) / having[token] + 0.01
            )
    return _unit(vectors)


def _means(vectors: NDArray[np.float64], count: int, rng: np.random.Generator) -> tuple[float, list[int]]:
    """The sum of the texts' cosines to their centres, and the number of each text's centre."""
    centres = _begin(vectors, count, rng)
    member = np.full(len(vectors), -1)
    for _ in range(ROUNDS):
        nearest = (vectors @ centres.T).argmax(1)
        if (nearest == member).all():
            break
        member = nearest
        for i in range(count):
            if (member == i).any():  # a centre without texts stays where it is
                centres[i] = _unit(vectors[member == i].sum(0, keepdims=True))[0]
    return float((vectors @ centres.T).max(1).sum()), member.tolist()


def _begin(vectors: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Texts as first centres, each sampled in proportion to its squared distance from those before."""
    chosen = [int(rng.integers(len(vectors)))]
    while len(chosen) < count:
        far = np.clip(1 - (vectors @ vectors[chosen].T).max(1), 0, None) ** 2
        chances = far / far.sum() if far.sum() > 0 else np.full(len(vectors), 1 / len(vectors))
        chosen.append(int(rng.choice(len(vectors), p=chances)))
    return vectors[chosen].copy()


def _unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return unit
