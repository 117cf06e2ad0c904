"""Wraps llguidance: which tokens of a vocabulary a grammar allows next, and a short completion of the text.

A matcher works on bytes, so any way of cutting a valid text into tokens is allowed. A grammar never matches control
tokens. Each Matcher also has an llguidance matcher over single bytes: the search for a short completion takes hundreds
of steps, at 10 us each over bytes.
"""

import contextlib
import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from perilune.core.errors import RequestError
from perilune.grammar.byte_tokens import Tokens, over_bytes
from perilune.grammar.clues import clues
from perilune.grammar.recent import Recent
from perilune.grammar.shortest_end import completions
from perilune.grammar.sizes import MAX_EXACT, MAX_PATTERN_NAMES, MAX_REMAINDERS, pattern_names, remainders_of
from perilune.grammar.unordered import rules
from perilune.text.tokenizer import Tokenizer

Words = NDArray[np.uint32]  # bit i of word w is token 32 w + i

# Size of the cache of compiled grammars that no answer has used yet, in characters of 60 to 120 bytes of memory each. A
# tool with six strings has 6,000 characters. If the tools of all agents in service exceed this size, each request
# compiles its tools again, 10 to 60 ms per tool.
MAX_FRESH = 4 << 20
_REMAINDER_CHARS = 10  # each remainder of a multipleOf counts as so many characters of MAX_FRESH
MAX_GROWN = 64  # Size of the cache of grammars in use by answers. With all its parser states one may take 120 MB.
MAX_WRITTEN = 16 << 20  # characters of schemas and of the grammars written for them
# Stack of a thread that compiles a grammar. llguidance recurses along references between rules: a chain of 1,000
# schemas overflowed the usual 8 MiB, which ended the process.
_STACK_BYTES = 128 << 20
_compiling = threading.BoundedSemaphore(4)  # compilations at a time: one may take 10 s of CPU
MAX_COMPILE_SECONDS = 2.0  # CPU time of a compilation: over tokens, over bytes, both again in the engine process
PATIENCE_SECONDS = 10.0
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LIMITS = LLParserLimits(verbose_errors=False)
# llguidance refills lexer fuel when a mask is computed; the byte matcher may take many steps without a mask.
_BYTE_LIMITS = LLParserLimits(verbose_errors=False, step_lexer_fuel=10_000_000)
_SPACED = '"item_separator": ", ?"'  # in the text of a grammar that allows blanks
_FILLER = re.compile(r'[^"\\\x00-\x1f\x7f]+')  # text that may be anywhere in a string of JSON
_REPEATED = re.compile(rb'([^"\\\x00-\x1f\x7f-\xff])\1{3,}')
_JSON_RULE = re.compile(r"%json\s*")
_ENDS = (b'"', b"]", b"}", b"0", b'""', b'"]', b'"}')  # close what one or two tokens may have opened
_ALTERNATIVES = re.compile(r'"start: /((?:\\\\x\{[0-9a-f]+\}|\|)+)/"')  # plain alternatives, in hex
_CODE = re.compile(r"\{([0-9a-f]+)\}")
_MAX_CHOICE_CHARS = 64  # longest alternative, see _choices
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]|\\.)*"?', re.DOTALL)
_MAX_REPLACED_BYTES = 16  # bytes, blanks included, that a token without the blanks may replace
_MAX_SPACED_BYTES = 4_096  # bytes of a completion that is tried with blanks
_CHECKED_BYTES = 64  # bytes after a replaced run that must still be accepted
_MAX_RUNS = 64  # runs of one character in a completion for which longer tokens are tried


class GrammarError(ValueError):
    """llguidance refuses a grammar, or fails while matching it; the text is its reason, in one line."""


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

        def encode(text: bytes) -> list[int]:
            return tokenizer.encode(text.decode("utf-8", "replace"))

        self.over_tokens = LLTokenizer(
            TokenizerWrapper(Tokens(tokens, controls, self.end, encode)), n_vocab=size, eos_token=self.end
        )
        ids = {token: id for id, token in reversed(list(enumerate(tokens)))}
        self._bytes = [ids[bytes([b])] for b in range(256)]
        self._ids = {token: id for token, id in ids.items() if not tokenizer.is_special(id)}
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: tuple(sorted(found)) for start, found in lengths.items()}
        fillers = sorted(_fillers(self._ids), reverse=True)
        self.filler_chars = np.array([chars for chars, _ in fillers], np.int64)
        self.filler_ids = np.array([id for _, id in fillers], np.int64)
        self._fresh = Recent[Matcher](MAX_FRESH)  # by group and grammar
        self._grown = Recent[Matcher](MAX_GROWN)
        self._written = Recent[tuple[str, int]](MAX_WRITTEN)  # by group and schema
        self._lock = threading.Lock()

    def compile(self, grammar: str, group: str = "") -> "Matcher":
        """A matcher at the grammar's beginning, for the caller alone. Compiled grammars are cached by group.
        Raises GrammarError; RequestError if others take too long."""
        key = group, grammar
        with self._lock:
            found = self._fresh.get(key) or self._grown.get(key)
            if found is not None:
                return found.copy()
        if not _compiling.acquire(timeout=PATIENCE_SECONDS):
            why = "grammars of other requests are being compiled: try again in 5 s"
            raise RequestError(why, code="server_busy", status=503, retry_seconds=5)
        try:
            made = _on_large_stack(lambda: Matcher(self, grammar, group))
        finally:
            _compiling.release()
        with self._lock:
            self._fresh.put(key, made, len(grammar) + _REMAINDER_CHARS * remainders_of([*_schemas(grammar)]))
            return made.copy()

    def use(self, grammar: str, group: str) -> None:
        """Moves a grammar to the cache of those that answers use: from now on it gets parser states, which all copies
        share."""
        with self._lock:
            if (made := self._fresh.pop((group, grammar))) is not None:
                self._grown.put((group, grammar), made, 1)

    def forget(self, grammar: str, group: str) -> None:
        """Drops a grammar from the cache: its parser states, shared by all copies, have reached llguidance's limit."""
        with self._lock:
            self._fresh.pop((group, grammar))
            self._grown.pop((group, grammar))

    def written(self, schema: str, group: str, write: Callable[[], tuple[str, int]]) -> tuple[str, int]:
        """(grammar, leap) that `write` returns for a schema. Cached by group: agents send the same schemas with each
        request."""
        key = group, schema
        with self._lock:
            if (found := self._written.get(key)) is not None:
                return found
        made = write()
        with self._lock:
            self._written.put(key, made, len(schema) + len(made[0]))
        return made

    def encode(self, text: bytes, optional: frozenset[int] = frozenset()) -> list[int]:
        """The fewest tokens of a text, which may begin or end inside a character.

        Bytes at the indices `optional` may be left out. A token leaves out all or none of those it spans.
        """
        size = len(text)
        least = [0] * (size + 1)  # tokens from a place to the end
        first: list[tuple[bytes, int]] = [(b"", 0)] * size  # the first of these tokens, and the index after it
        for at in range(size - 1, -1, -1):
            best = least[at + 1] + (at not in optional)
            first[at] = (b"" if at in optional else text[at : at + 1], at + 1)
            for length in self._lengths.get(text[at : at + 2], ()):
                end = at + length
                if end <= size and least[end] + 1 < best and text[at:end] in self._ids:
                    best, first[at] = least[end] + 1, (text[at:end], end)
            window = range(at, min(at + _MAX_REPLACED_BYTES, size)) if optional and at not in optional else range(0)
            places = [place for place in window if place not in optional]
            if len(places) < len(window):
                spelled = bytes(text[place] for place in places)
                for length in self._lengths.get(spelled[:2], ()):
                    if length <= len(places) and spelled[:length] in self._ids:
                        end = places[length - 1] + 1
                        if least[end] + 1 < best:
                            best, first[at] = least[end] + 1, (spelled[:length], end)
            least[at] = best
        tokens, at = list[int](), 0
        while at < size:
            token, at = first[at]
            if token:
                tokens.append(self._ids[token])
        return tokens

    def prefixes(self, text: bytes) -> list[int]:
        """The tokens with which a text can begin."""
        return [id for n in range(1, len(text) + 1) if (id := self._ids.get(text[:n])) is not None]

    def singles(self, text: bytes) -> list[int]:
        """A text one byte at a time."""
        return [self._bytes[b] for b in text]


def _fillers(ids: Mapping[bytes, int]) -> Iterator[tuple[int, int]]:
    """(characters, token) of every token of characters that may be anywhere in a string of JSON."""
    for token, id in ids.items():
        try:
            text = token.decode()
        except UnicodeDecodeError:
            continue
        if _FILLER.fullmatch(text):
            yield len(text), id


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
    """A grammar and the state after the text so far. One thread at a time."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, group: str) -> None:
        """Raises GrammarError for a grammar that cannot be compiled, or that no text was found to satisfy."""
        self._vocabulary = vocabulary
        self._grammar, self._group = grammar, group
        self._used = False
        self._tokens = _compiled(vocabulary.over_tokens, grammar, _LIMITS)
        self._single = _compiled(over_bytes(), grammar, _BYTE_LIMITS)
        self._tokens.deep_copy().compute_bitmask()  # a grammar that exceeds the limits fails here, not in an answer
        _check(self._tokens)
        self._clues = clues(grammar)
        self._spaced = _SPACED in grammar
        found = self.completion()
        if found is None:
            raise GrammarError(
                "no text was found that satisfies it: none does, or it is too large, such as an object of 1,000 "
                "properties: make it smaller"
            )
        choices = (vocabulary.encode(choice) for choice in _choices(grammar))
        self.from_start = min(found, *choices, found, key=len)  # completes the empty text, or what `begin` took

    def copy(self) -> "Matcher":
        made = copy.copy(self)
        made._tokens, made._single = self._tokens.deep_copy(), self._single.deep_copy()
        return made

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._single.is_accepting())

    def fill(self, mask: Words) -> None:
        """Writes the tokens that may come next, never control tokens (end tokens included).

        Raises GrammarError once the grammar has more states than llguidance holds: only `escape` works from then on.
        """
        assert mask.dtype == np.uint32 and mask.shape == (self._vocabulary.words,) and mask.flags.c_contiguous
        self._tokens.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._tokens.is_error():
            self._vocabulary.forget(self._grammar, self._group)
            _check(self._tokens)
        mask &= self._vocabulary.plain

    def advance(self, token: int) -> bool:
        """Consumes the token; False if it may not come next."""
        if self._vocabulary.tokenizer.is_special(token):
            return False
        if not self._used:
            self._used = True
            self._vocabulary.use(self._grammar, self._group)
        if self._tokens.validate_tokens([token]) != 1 and not self._tokens.is_error():
            return False
        text = list(self._vocabulary.tokenizer.token_bytes(token))
        self._tokens.consume_token(token)  # the next `fill` reports an error
        taken: bool = self._single.consume_tokens(text)
        _check(self._single)
        return taken

    def begin(self, text: str) -> str:
        """Consumes `text` before any token. Returns the rest that does not fit; unless "", the matcher is unusable.

        Raises GrammarError if no completion is found.
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
        """Tokens after which the text may end: the shortest found, not always the shortest there is.

        The search stops at one of up to `enough` tokens.
        """
        best: list[int] | None = None
        for text in completions(self._single, self._clues):
            tokens = self._fewest(text)
            if best is None or len(tokens) < len(best):
                best = tokens
            if len(best) <= enough:
                break
        return best

    def adapted(self, earlier: list[int], room: int | None = None) -> list[int] | None:
        """A completion made of an `earlier` one: without its first token, as it is, or after one of _ENDS.

        None if none of these completes the text, or if one of the first two does but has more than `room` tokens.
        """
        for way in (earlier[1:], earlier):
            if self.takes(way):
                return way if room is None or len(way) <= room else None
        for end in _ENDS:
            way = [*self._vocabulary.singles(end), *earlier]
            if self.takes(way):
                if room is not None and len(way) > room:
                    way = self._vocabulary.encode(b"".join(map(self._vocabulary.tokenizer.token_bytes, way)))
                return way
        return None

    def escape(self) -> list[int] | None:
        """A completion by the byte matcher alone, for when `fill` fails."""
        text = next(completions(self._single, self._clues), None)
        return None if text is None else self._vocabulary.encode(text)

    def _fewest(self, text: bytes) -> list[int]:
        """Few tokens that write a completion: the text as it is, with blanks, or with a run of one character replaced
        by longer tokens."""
        known = self._vocabulary
        found = [known.encode(text)]
        if self._spaced and len(text) <= _MAX_SPACED_BYTES:
            found += [known.encode(*_with_blanks(text, inside=inside)) for inside in (False, True)]
        found.append(self._filled(text))
        return next((f for f in sorted(found, key=len) if self.takes(f)), known.singles(text))

    def _filled(self, text: bytes) -> list[int]:
        """Tokens of a completion in which longer tokens of other characters replace runs of one character."""
        known, found, at = self._vocabulary, list[int](), 0
        trial = self._tokens.deep_copy()
        for run in list(_REPEATED.finditer(text))[:_MAX_RUNS]:
            head = known.encode(text[at : run.start()])
            trial.consume_tokens(head)
            filler = self._filler(trial, run.end() - run.start(), text[run.end() : run.end() + _CHECKED_BYTES])
            if filler is None:
                filler = known.encode(run[0])
                trial.consume_tokens(filler)
            found += [*head, *filler]
            at = run.end()
        return [*found, *known.encode(text[at:])]

    def _filler(self, trial: LLMatcher, chars: int, rest: bytes) -> list[int] | None:
        """Tokens, as long as possible, of `chars` or more characters together, after which `rest` is accepted; None if
        there are none.

        `trial` consumes them.
        """
        known = self._vocabulary
        state, found, tail = trial.deep_copy(), list[int](), known.singles(rest)
        while chars > 0:
            mask = np.frombuffer(state.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[known.filler_ids] != 0
            longest = np.flatnonzero(allowed)
            fitting = np.flatnonzero(allowed & (known.filler_chars <= chars))
            if len(longest) and known.filler_chars[longest[0]] >= chars:
                token = int(known.filler_ids[longest[0]])
                end = state.deep_copy()
                if end.try_consume_tokens([token, *tail]) == 1 + len(tail):
                    trial.consume_tokens([*found, token])
                    return [*found, token]
            if not len(fitting):
                break
            token, size = int(known.filler_ids[fitting[0]]), int(known.filler_chars[fitting[0]])
            times = state.try_consume_tokens([token] * (chars // size))
            if not times:
                return None
            found += [token] * times
            chars -= times * size
        if state.deep_copy().try_consume_tokens(tail) < len(tail):
            return None
        trial.consume_tokens(found)
        return found


def _with_blanks(text: bytes, *, inside: bool) -> tuple[bytes, frozenset[int]]:
    """(JSON text with a blank after each comma and colon outside of strings, the indices of the blanks).

    `inside`: the text begins inside a string.
    """
    made, optional, at = bytearray(), set[int](), 0
    if inside and (begun := _REST_OF_STRING.match(text)):
        made += begun[0]
        at = begun.end()
    while at < len(text):
        string = _STRING.match(text, at)
        piece = string[0] if string else text[at : at + 1]
        made += piece
        at += len(piece)
        if piece in (b",", b":"):
            optional.add(len(made))
            made += b" "
    return bytes(made), frozenset(optional)


def permit(mask: Words, token: int) -> None:
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(mask: Words, token: int) -> None:
    mask[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))


def json_grammar(schema: Any) -> str:
    """The grammar of compact JSON by a schema: at most one blank after a comma or a colon, none elsewhere.

    Properties come in any order if `unordered.rules` supports the schema. A boolean schema is written as an object.
    Raises GrammarError for a value that is no schema. Compiling the grammar refuses what cannot be enforced.
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
    """From Lark text, or from EBNF with `::=` as llama.cpp (GBNF) and vLLM take it. GrammarError if EBNF cannot be
    converted."""
    try:
        text = any_to_lark(text)
    except Exception as e:  # a plain Exception for missing rules
        raise GrammarError(_line(f"EBNF: {e}")) from e
    for number in _NUMBER.findall(text) if "%json" in text else ():
        if float(number) >= MAX_EXACT:
            raise GrammarError(f"{number[:32]}: numbers in a grammar with %json must be below 2^53")
    schemas = [*_written_in(text)]
    if (count := pattern_names(schemas)) > MAX_PATTERN_NAMES:
        raise GrammarError(f"patternProperties: {count} names, at most {MAX_PATTERN_NAMES}")
    if (count := remainders_of(schemas)) > MAX_REMAINDERS:
        raise GrammarError(
            f"without decimal points, all multipleOf together are at most {MAX_REMAINDERS}, not {str(count)[:32]}"
        )
    return str(LLMatcher.grammar_from_lark(text))


def _written_in(text: str) -> Iterator[Any]:
    """The schemas in Lark text, each after %json."""
    for found in _JSON_RULE.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: compiling refuses it
            yield json.JSONDecoder().raw_decode(text, found.end())[0]


def _schemas(grammar: str) -> Iterator[Any]:
    """The schemas in the text of a grammar; none if they have no multipleOf."""
    if not grammar.startswith('{"grammars"'):
        yield from _written_in(grammar)
    elif "multipleOf" in grammar:
        yield from (part.get("json_schema") for part in json.loads(grammar)["grammars"])


def _choices(grammar: str) -> Iterator[bytes]:
    """The alternatives of a grammar of short texts only; none for other grammars."""
    if found := _ALTERNATIVES.search(grammar):
        for choice in found[1].split("|"):
            characters = _CODE.findall(choice)
            if len(characters) <= _MAX_CHOICE_CHARS:
                yield "".join(chr(int(code, 16)) for code in characters).encode()


_starting = threading.Lock()  # threading.stack_size is a setting of the process


def _on_large_stack(make: Callable[[], Matcher]) -> Matcher:
    with ThreadPoolExecutor(1, "perilune-large-stack") as pool:
        with _starting:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                made = pool.submit(make)
            finally:
                threading.stack_size(usual)
        return made.result()


def _compiled(tokens: LLTokenizer, grammar: str, limits: LLParserLimits) -> LLMatcher:
    begun = time.thread_time()
    made = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if time.thread_time() - begun > MAX_COMPILE_SECONDS:
        raise GrammarError(f"it takes longer than {MAX_COMPILE_SECONDS:g} s to compile: make it smaller")
    _check(made)
    return made


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))


def _line(message: str) -> str:
    if "recursion limit" in message:  # of the JSON parser, which counts more levels than the schema has
        return "it nests deeper than the compiler of grammars reads, about 120 levels"
    return " ".join(message.split())[:300]
