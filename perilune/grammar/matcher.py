"""Grammars over a vocabulary: which tokens may come next, and the shortest way to an end. Around llguidance.

A matcher works on bytes, so any way of cutting a valid text into tokens is allowed. Control tokens are never part of
what a grammar matches. Beside the matcher over the model's tokens runs a second one over single bytes: a search for
the shortest completion takes hundreds of steps, each of which costs ten microseconds there.
"""

import json
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from perilune.grammar.shortest_end import example, shortest
from perilune.grammar.unordered import required_keys, rules
from perilune.text.tokenizer import Tokenizer

Words = NDArray[np.uint32]  # bit i of word w is token 32 w + i

MAX_CACHED = 64  # compiled grammars per vocabulary; one may grow to some 15 MB as its states are met
MAX_HINTS = 32
_END_BYTE = 256  # what ends a text in the vocabulary of single bytes


class GrammarError(ValueError):
    """llguidance refuses a grammar, or gives up on it on the way; the text is its reason, in one line."""


class Vocabulary:
    """A tokenizer's tokens as llguidance wants them, and the grammars compiled for them. Thread-safe.

    end    the control token that ends an answer
    words  32-bit words in a mask of all tokens
    plain  mask of the tokens that are text: all but the control tokens
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        end = tokenizer.special_id("<|im_end|>")
        self.end = min(tokenizer.stop_ids) if end is None else end
        size = tokenizer.vocab_size
        self.words = -(-size // 32)
        controls = [id for id in range(size) if tokenizer.is_special(id)]
        self.plain: Words = np.full(self.words, 0xFFFFFFFF, np.uint32)
        for id in (*controls, *range(size, 32 * self.words)):
            forbid(self.plain, id)
        tokens = [tokenizer.token_bytes(id) for id in range(size)]
        self.over_tokens = LLTokenizer(
            TokenizerWrapper(_Tokens(tokens, controls, self.end, tokenizer)), n_vocab=size, eos_token=self.end
        )
        ids = {token: id for id, token in reversed(list(enumerate(tokens)))}
        single = [bytes([b]) for b in range(256)]
        self._bytes = [ids[b] for b in single]
        self._ids = {token: id for token, id in ids.items() if not tokenizer.is_special(id)}
        self.over_bytes = LLTokenizer(
            TokenizerWrapper(_Tokens([*single, b"<end>"], [_END_BYTE], _END_BYTE, None)),
            n_vocab=_END_BYTE + 1,
            slices=[],
        )
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> "Matcher":
        """A matcher at the grammar's beginning, for the caller alone. Raises GrammarError."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.copy()
        made = Matcher.compiled(self, grammar)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return made.copy()

    def encode(self, text: bytes) -> list[int]:
        """Tokens of a text that may begin or end inside a character."""
        try:
            return self.tokenizer.encode(text.decode())
        except UnicodeDecodeError:
            return self.singles(text)

    def prefixes(self, text: bytes) -> list[int]:
        """The tokens with which a text can begin."""
        return [id for n in range(1, len(text) + 1) if (id := self._ids.get(text[:n])) is not None]

    def singles(self, text: bytes) -> list[int]:
        """A text one byte at a time."""
        return [self._bytes[b] for b in text]


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], controls: list[int], end: int, tokenizer: Tokenizer | None) -> None:
        self.tokens = tokens
        self.special_token_ids = controls
        self.eos_token_id = end
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return list(text) if self._tokenizer is None else self._tokenizer.encode(text.decode("utf-8", "replace"))


_vocabularies: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()
_building = threading.Lock()


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's vocabulary, built on the first call: about a second for 163,840 tokens."""
    with _building:
        found = _vocabularies.get(tokenizer)
        if found is None:
            found = _vocabularies[tokenizer] = Vocabulary(tokenizer)
        return found


class Matcher:
    """A text on its way through a grammar. One thread at a time."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokens: LLMatcher,
        single: LLMatcher,
        hints: tuple[bytes, ...],
        keys: tuple[bytes, ...],
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._single = single
        self._hints = hints
        self._keys = keys
        self.from_start: list[int] = []  # a completion of the empty text, or of what `begin` took

    @classmethod
    def compiled(cls, vocabulary: Vocabulary, grammar: str) -> "Matcher":
        tokens, single = (LLMatcher(t, grammar, log_level=0) for t in (vocabulary.over_tokens, vocabulary.over_bytes))
        _check(tokens)
        _check(single)
        made = cls(vocabulary, tokens, single, _hints(grammar), _keys(grammar))
        found = made.completion()
        if found is None:
            raise GrammarError("no text was found that satisfies it")
        made.from_start = found
        return made

    def copy(self) -> "Matcher":
        made = Matcher(self._vocabulary, self._tokens.deep_copy(), self._single.deep_copy(), self._hints, self._keys)
        made.from_start = self.from_start
        return made

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._single.is_accepting())

    def fill(self, mask: Words) -> None:
        """Writes the tokens that may come next; control tokens, ends included, are never among them."""
        assert mask.dtype == np.uint32 and mask.shape == (self._vocabulary.words,) and mask.flags.c_contiguous
        self._tokens.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self._tokens)
        mask &= self._vocabulary.plain

    def advance(self, token: int) -> bool:
        """Whether the token may come next; if so, it has."""
        if self._vocabulary.tokenizer.is_special(token) or self._tokens.validate_tokens([token]) != 1:
            _check(self._tokens)
            return False
        text = list(self._vocabulary.tokenizer.token_bytes(token))
        if not (self._tokens.consume_token(token) and self._single.consume_tokens(text)):
            _check(self._tokens)
            _check(self._single)
            return False
        return True

    def begin(self, text: str) -> str:
        """Takes `text` ahead of all tokens. Returns what of it does not fit: the matcher is of use only if that is "".

        Raises GrammarError if no way from there to an end is found.
        """
        tokens = self._vocabulary.tokenizer.encode(text)
        written = b"".join(map(self._vocabulary.tokenizer.token_bytes, tokens))
        if (fit := self._single.try_consume_tokens(list(written))) < len(written):
            return written[fit:].decode(errors="replace")
        if not self._tokens.consume_tokens(tokens):
            _check(self._tokens)
        found = self.completion()
        if found is None:
            raise GrammarError("no text was found that goes on from the beginning and satisfies it")
        self.from_start = found
        return ""

    def takes(self, tokens: list[int]) -> bool:
        """Whether these tokens may follow and the text may end after them."""
        trial = self._tokens.deep_copy()
        return trial.try_consume_tokens(tokens) == len(tokens) and bool(trial.is_accepting())

    def completion(self, enough: int = 0) -> list[int] | None:
        """Tokens after which the text may end: the shortest way found, though not always the shortest there is.

        Any way of up to `enough` tokens will do.
        """
        text = shortest(self._single, self._hints, self._keys, enough=enough)
        if text is None:
            return None
        tokens = self._vocabulary.encode(text)
        return tokens if self.takes(tokens) else self._vocabulary.singles(text)


def permit(mask: Words, token: int) -> None:
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(mask: Words, token: int) -> None:
    mask[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))


def json_grammar(schema: Any) -> str:
    """The grammar of compact JSON by a schema: at most one blank after a comma or a colon, none elsewhere.

    Properties come in any order where `text.unordered` knows how. A boolean schema is written as an object. Raises
    GrammarError for what is no schema at all; what a schema asks that cannot be enforced comes out when the grammar is
    compiled.
    """
    found = rules(schema)
    if found is None:
        return json.dumps({"grammars": [_by_schema(schema)]})
    text, schemas = found
    values = [_by_schema(value) | {"name": f"value{i}"} for i, value in enumerate(schemas)]
    return json.dumps({"grammars": [{"lark_grammar": text}, *values]})


def _by_schema(schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"anyOf": []}
    try:
        text = LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            overrides={
                "item_separator": ", ?",
                "key_separator": ": ?",
                "whitespace_flexible": False,
                "coerce_one_of": False,
                "lenient": False,
            },
        )
    except (ValueError, RecursionError) as e:
        raise GrammarError(_line(str(e))) from e
    (made,) = json.loads(text)["grammars"]
    assert isinstance(made, dict)
    return made


def regex_grammar(expression: str) -> str:
    return str(LLMatcher.grammar_from_regex(expression))


def lark_grammar(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def _hints(grammar: str) -> tuple[bytes, ...]:
    """A short match of each pattern in the schemas of a grammar: one that is not anchored cannot be found by trying.

    Where several patterns have to match at once, their matches in a row may do.
    """
    found: dict[bytes, None] = {}
    level: list[Any] = [json.loads(grammar)] if grammar.startswith('{"grammars"') else []
    while level:
        value = level.pop()
        if isinstance(value, dict):
            more = value.get("allOf")
            together = [value, *(n for n in more if isinstance(n, dict))] if isinstance(more, list) else [value]
            matches = [example(p) for n in together if isinstance(p := n.get("pattern"), str)]
            for text in (*matches[:1], b"".join(matches)):
                if text:
                    found[json.dumps(text.decode(), ensure_ascii=False)[1:-1].encode()] = None
        level += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return tuple(found)[:MAX_HINTS]


def _keys(grammar: str) -> tuple[bytes, ...]:
    """The keys that objects with properties in any order have to have, as they are written between their quotes."""
    if not grammar.startswith('{"grammars": [{"lark_grammar"'):
        return ()
    required = required_keys(json.loads(grammar)["grammars"][0]["lark_grammar"])
    return tuple(json.dumps(key, ensure_ascii=False)[1:-1].encode() for key in required)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))


def _line(message: str) -> str:
    return " ".join(message.split())[:300]
