"""The family's tokenizer: byte-level BPE from `tiktoken.model`, then 256 slots for control tokens.

Control tokens are spliced into prompts by id (text/chat.py); text that came from outside is encoded with control
tokens disabled, so a user cannot end a turn or open a tool call by writing `<|im_end|>` into a message.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from perilune.core.errors import CheckpointError, RequestError, quoted, shown
from perilune.core.files import read_regular

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
CONTROL_SLOTS = 256
STOP_NAMES = ("<|im_end|>", "[EOS]", "[EOT]")

_HAN_FREE = r"&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + _HAN_FREE
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + _HAN_FREE
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The family's own encoder cuts long inputs at these lengths, so ids depend on them; they also bound the time and the
# stack that the split expression needs on hostile input.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A named control slot. `special` tokens are left out of decoded text on request; the others are part of it."""

    name: str
    special: bool


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of the control tokens that structure an answer; None where the vocabulary has no such token."""

    think_begin: int | None
    think_end: int | None
    section_begin: int | None
    section_end: int | None
    call_begin: int | None
    argument_begin: int | None
    call_end: int | None


class Tokenizer:
    """Text to ids and back. Thread-safe; holds no state besides the vocabulary.

    `ranks` maps the bytes of every base token to its id, 0..n-1 without gaps; `added` names control slots, ids
    n..n+255. Slots without a name are called `<|reserved_token_{id}|>`. Raises CheckpointError if these do not fit.
    """

    def __init__(self, ranks: Mapping[bytes, int], added: Mapping[int, AddedToken]) -> None:
        base = len(ranks)
        if set(ranks.values()) != set(range(base)):
            raise CheckpointError(f"token ids are not 0..{base - 1} without gaps or repeats")
        if (lacking := next((b for b in range(256) if bytes([b]) not in ranks), None)) is not None:
            raise CheckpointError(f"byte {lacking:#04x} has no token, so some texts could not be encoded")
        if strays := sorted(id for id in added if not base <= id < base + CONTROL_SLOTS):
            raise CheckpointError(
                f"added token {quoted(added[strays[0]].name)} has id {strays[0]}, outside the control slots "
                f"{base}..{base + CONTROL_SLOTS - 1} that follow the {base} base tokens"
            )
        names = {
            id: added[id].name if id in added else f"<|reserved_token_{id}|>"
            for id in range(base, base + CONTROL_SLOTS)
        }
        self._ids = {name: id for id, name in names.items()}
        if len(self._ids) != CONTROL_SLOTS or "" in self._ids:
            raise CheckpointError("added tokens must have names that are not empty and not used twice")
        self._base = base
        self.longest_bytes = max(map(len, (*ranks, *(name.encode() for name in self._ids))))  # of one token's text
        self._hidden = frozenset(id for id, token in added.items() if token.special)
        self._bytes = sorted(ranks, key=ranks.__getitem__)  # by id: 8 MB for 160,000 tokens
        self._encoding = tiktoken.Encoding(
            name=VOCABULARY_FILE, pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens=self._ids
        )
        self.stop_ids: frozenset[int] = frozenset(self._ids[n] for n in STOP_NAMES if n in self._ids)
        self.markers = Markers(
            think_begin=self._ids.get("<think>"),
            think_end=self._ids.get("</think>"),
            section_begin=self._ids.get("<|tool_calls_section_begin|>"),
            section_end=self._ids.get("<|tool_calls_section_end|>"),
            call_begin=self._ids.get("<|tool_call_begin|>"),
            argument_begin=self._ids.get("<|tool_call_argument_begin|>"),
            call_end=self._ids.get("<|tool_call_end|>"),
        )

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model directory; CheckpointError if its two files are absent, damaged or do not fit."""
        ranks, added = _read_ranks(path / VOCABULARY_FILE), _read_added(path / CONFIG_FILE)
        try:
            return cls(ranks, added)
        except CheckpointError as e:
            raise CheckpointError(
                f"{path}: {VOCABULARY_FILE} and {CONFIG_FILE} are not a vocabulary: {e}; copy both from the model again"
            ) from e

    @property
    def vocab_size(self) -> int:
        """Base tokens plus control slots; every id is below it."""
        return self._base + CONTROL_SLOTS

    def require_size(self, vocab_size: int, path: Path) -> None:
        """CheckpointError if config.json in `path` has another vocab_size: then ids mean other tokens."""
        if vocab_size != self.vocab_size:
            raise CheckpointError(
                f"{path}: the tokenizer has {self.vocab_size} tokens, config.json's vocab_size is {vocab_size}: they "
                f"are of different models; copy {VOCABULARY_FILE} and {CONFIG_FILE} from the model again"
            )

    def encode(
        self, text: str, *, allow_special: bool = False, check: Callable[[int], None] = lambda count: None
    ) -> list[int]:
        """Ids of `text`; nothing is added before or after. `check` is called with the number of ids after each part of
        a large text, and may raise.

        With `allow_special`, names of control tokens in the text become those tokens: only for text that was not
        written by a user. Unpaired surrogates become U+FFFD.
        """
        ids: list[int] = []
        for part in _parts(text):
            if allow_special:
                ids += self._encoding.encode(part, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(part)
            check(len(ids))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves out tokens flagged special."""
        return b"".join(self.token_bytes(id) for id in ids if not (skip_special and id in self._hidden)).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token, perhaps part of a character. RequestError if there is no such id."""
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token id {id} is outside the vocabulary of {self.vocab_size} tokens")
        return self._bytes[id] if id < self._base else self._encoding.decode_single_token_bytes(id)

    def ordinary_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of base tokens, see `all_ordinary`."""
        table = self._bytes
        return table[ids[0]] if len(ids) == 1 else b"".join([table[id] for id in ids])

    def all_ordinary(self, ids: Sequence[int]) -> bool:
        """Whether all `ids`, at least one, are base tokens: neither control slots nor outside the vocabulary."""
        return max(ids) < self._base and min(ids) >= 0

    def token_text(self, id: int) -> str:
        """Text of one token by itself, for display."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def special_id(self, name: str) -> int | None:
        """Id of the control token of this name, if there is one."""
        return self._ids.get(name)

    def special(self, name: str) -> int:
        """Id of the control token of this name; CheckpointError if the vocabulary has none."""
        id = self._ids.get(name)
        if id is None:
            raise CheckpointError(f"the vocabulary has no control token {name!r}; {CONFIG_FILE} must name it")
        return id

    def is_special(self, id: int) -> bool:
        """Whether the id is one of the control slots, named or reserved."""
        return self._base <= id < self._base + CONTROL_SLOTS

    def is_hidden(self, id: int) -> bool:
        """Whether the token is flagged special: never part of an answer's text."""
        return id in self._hidden


def _parts(text: str) -> Iterator[str]:
    """Cuts at multiples of 400,000 characters and inside runs of more than 25,000 (non-)whitespace characters."""
    for begin in range(0, len(text), _MAX_CHARS):
        block = text[begin : begin + _MAX_CHARS]
        last = 0
        # Finding all runs takes five times as long as the encoding: done only if one may be too long.
        for run in _RUNS.finditer(block) if _may_have_long_run(block) else ():
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield block[last:cut]
                last = cut
        yield block[last:]


def _may_have_long_run(block: str) -> bool:
    """False only if no run of (non-)whitespace has more than _MAX_RUN characters: a longer run would fill one of the
    block's pieces of _MAX_RUN / 2 characters."""
    half = _MAX_RUN // 2
    pieces = (block[at : at + half] for at in range(0, len(block) - half + 1, half))
    return any(piece.isspace() or len(piece.split(None, 1)[0]) == half for piece in pieces)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, which text needs: copy it from the model, or send token ids"
        ) from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from e


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            key, value = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path} line {number} is not 'base64 id': the file is damaged, copy it from the model again"
            ) from None
        if not key or key in ranks:
            raise CheckpointError(f"{path} line {number}: empty or repeated token; copy the file from the model again")
        ranks[key] = value
    return ranks


def _read_added(path: Path) -> dict[int, AddedToken]:
    try:
        data = json.loads(_read(path))
        listed = data["added_tokens_decoder"]
        added = {int(id): AddedToken(token["content"], token.get("special", False)) for id, token in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{path} has no readable 'added_tokens_decoder' ({type(e).__name__}: {shown(str(e))}); copy it from the "
            "model again"
        ) from e
    for id, token in added.items():
        if not isinstance(token.name, str) or not isinstance(token.special, bool):
            raise CheckpointError(f"{path}: added token {id} needs a text 'content' and a boolean 'special'")
        if any("\ud800" <= c <= "\udfff" for c in token.name):
            raise CheckpointError(f"{path}: added token {id} has half a surrogate pair in its 'content', no text")
    return added
