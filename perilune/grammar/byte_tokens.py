"""What llguidance asks of a tokenizer, and the tokenizer of single bytes."""

import functools
from collections.abc import Callable

from llguidance import LLTokenizer, TokenizerWrapper

END_BYTE = 256  # end token of the vocabulary of single bytes


class Tokens:
    """The tokenizer interface that llguidance calls."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], controls: list[int], end: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = controls
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


@functools.cache
def over_bytes() -> LLTokenizer:
    """The tokenizer with the 256 bytes and END_BYTE as tokens."""
    tokens = Tokens([*(bytes([b]) for b in range(256)), b"<end>"], [END_BYTE], END_BYTE, list)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=END_BYTE + 1, slices=[])
