"""Texts that an answer must not hold, as the token sequences that spell them."""

import dataclasses
from collections.abc import Iterable

from perilune.core.sampling import SamplingParams
from perilune.text.tokenizer import Tokenizer


def resolved(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """These parameters with `bad_words` turned into `bad_word_ids`; RequestError for a word of too many tokens."""
    if not params.bad_words:
        return params
    ids = (*params.bad_word_ids, *sequences(tokenizer, params.bad_words))
    return dataclasses.replace(params, bad_words=(), bad_word_ids=ids)


def sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word: as written, without leading white space, and after one space as in a sentence.

    A word that the model cuts into other tokens than the tokenizer does is not recognised: vLLM's `bad_words` has the
    same limit.
    """
    spellings: dict[str, None] = {}
    for word in words:
        spellings[word] = None
        if bare := word.lstrip():
            spellings |= {bare: None, f" {bare}": None}
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text)) for text in spellings))
