"""Ids to text while they arrive: a character split over tokens is held back until it is whole."""

import codecs
from collections.abc import Sequence

from perilune.text.tokenizer import Tokenizer


class Detokenizer:
    """Concatenating everything `push` and `flush` return equals `Tokenizer.decode` of all ids pushed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this token completes, perhaps none."""
        return self._text(self._tokenizer.token_bytes(id))

    def push_ordinary(self, ids: Sequence[int]) -> str:
        """As `push` for each of the ids, which are base tokens (Tokenizer.all_ordinary)."""
        return self._text(self._tokenizer.ordinary_bytes(ids))

    def flush(self) -> str:
        """The incomplete character that is held back, as U+FFFD. The decoder is then as at its start."""
        return self._decoder.decode(b"", True)

    def _text(self, data: bytes) -> str:
        # Most tokens are ASCII, which takes a tenth of the incremental decoder's time.
        return data.decode("ascii") if data.isascii() and not self._decoder.buffer else self._decoder.decode(data)
