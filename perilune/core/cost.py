"""Lower bounds of the FLOPs and the bytes moved by each op, as functions of its sizes.

Letters as in the model: T tokens, D hidden, H heads, R latent, r rope, n nope, v value, E experts, I expert width.
`size` is bytes of an activation or weight element. A multiply and an add are two FLOPs. Bytes count every input read
once and every output written once: no cache can save these.
"""

from dataclasses import dataclass

INT4_BITS = 4.5  # with one bf16 scale for every 32 values


@dataclass(frozen=True, slots=True)
class Cost:
    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, flop_rate: float, bandwidth: float) -> float:
        """The least time at `flop_rate` FLOP/s and `bandwidth` bytes/s, if computing and moving overlap entirely."""
        return max(self.flops / flop_rate, self.bytes / bandwidth)


def rmsnorm(T: int, D: int, size: int) -> Cost:
    return Cost(4 * T * D, size * (2 * T * D + D))


def add_rmsnorm(T: int, D: int, size: int) -> Cost:
    return Cost(5 * T * D, size * (4 * T * D + D))


def embed(T: int, D: int, size: int) -> Cost:
    return Cost(0, 2 * size * T * D + 8 * T)


def linear(T: int, i: int, o: int, size: int) -> Cost:
    return Cost(2 * T * i * o, size * (i * o + T * (i + o)))


def linear_int4(T: int, i: int, o: int, size: int) -> Cost:
    return Cost(2 * T * i * o, i * o * INT4_BITS / 8 + size * T * (i + o))


def rope(T: int, H: int, r: int, size: int) -> Cost:
    return Cost(3 * T * H * r, size * 2 * T * H * r + 4 * T * r)


def write_cache(T: int, width: int, size: int) -> Cost:
    return Cost(0, size * 2 * T * width + 8 * T)


def per_head_matmul(T: int, H: int, a: int, b: int, size: int) -> Cost:
    return Cost(2 * T * H * a * b, size * (H * a * b + T * H * (a + b)))


def attended(count: int, context: int) -> int:
    """Keys read by `count` causal queries at the end of a context of `context` tokens, summed over the queries."""
    return count * (context - count) + count * (count + 1) // 2


def mla_absorbed(counts: list[int], contexts: list[int], H: int, R: int, r: int, size: int) -> Cost:
    pairs = sum(attended(n, c) for n, c in zip(counts, contexts))
    used = sum(c for n, c in zip(counts, contexts) if n)
    return Cost(2 * pairs * H * (2 * R + r), size * (used * (R + r) + sum(counts) * H * (2 * R + r)))


def mla_prefill(counts: list[int], contexts: list[int], H: int, R: int, r: int, n: int, v: int, size: int) -> Cost:
    pairs = sum(attended(q, c) for q, c in zip(counts, contexts))
    used = sum(c for q, c in zip(counts, contexts) if q)
    flops = 2 * used * H * R * (n + v) + 2 * pairs * H * (n + r + v)
    return Cost(flops, size * (used * (R + r) + H * R * (n + v) + sum(counts) * H * (n + r + v)))


def router(T: int, D: int, E: int, k: int, size: int) -> Cost:
    return Cost(2 * T * D * E, 4 * E * D + size * T * D + 8 * T * k)


def expected_experts(T: int, k: int, E: int) -> float:
    """Distinct experts hit by T tokens that choose k of E evenly and independently."""
    return E * (1.0 - (1.0 - k / E) ** T)


def experts(T: int, k: int, hit: float, D: int, width: int, size: int, weight_bits: float) -> Cost:
    """gate, up and down of T tokens in k experts each; the weights of `hit` distinct experts are read, `weight_bits`
    bits per weight (scales included)."""
    weights = hit * 3 * D * width * weight_bits / 8
    return Cost(2 * T * k * 3 * D * width, weights + size * 2 * T * D + 8 * T * k)


def swiglu(T: int, width: int, size: int) -> Cost:
    return Cost(5 * T * width, size * 3 * T * width)


def sample(rows: int, V: int) -> Cost:
    return Cost(4 * rows * V, 4 * rows * V)


def acceptance(B: int, m: int) -> Cost:
    return Cost(2 * B * m, 8 * B * (4 * m + 7))


def resume(B: int, m: int) -> Cost:
    return Cost(12 * B * m, 8 * B * (7 * m + 8))


def branch(S: int, M: int, block_bytes: int, k: int) -> Cost:
    return Cost(S * (M + 3 * k), S * (8 * M + 2 * block_bytes + 20 * k))


def logprobs(rows: int, V: int, n: int) -> Cost:
    return Cost(4 * rows * V, 4 * rows * V + 12 * rows * n)


def penalize(rows: int, V: int) -> Cost:
    return Cost(6 * rows * V, 12 * rows * V)


def mask_logits(rows: int, V: int) -> Cost:
    return Cost(rows * V, 8 * rows * V + rows * V // 8)
