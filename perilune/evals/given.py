"""Problems that people wrote, from a JSONL file, and how an answer to one is judged.

One problem a line: {"family", "messages", "tools"?, "response_format"?, "answer"}. The type of `answer` says what is
judged:

- a number: the last number of the answer is equal to it;
- a string, or a list of strings of which one suffices: the answer, or a part of it with at most MAX_EXTRA_WORDS words
  around, is equal to it apart from case, quotes, brackets and the spaces between items. An object is wrong:
  an answer must not only repeat a tool's result;
- an object: the answer is a JSON object (a code fence around it is ignored) equal to it;
- a list of {"name", "arguments"}: the answer has exactly these calls, in any order; upper and lower case are alike in
  strings. An empty list: the answer calls nothing and says something.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from perilune.core.errors import ConfigError
from perilune.core.files import read_regular
from perilune.text.tools import depth

SPLIT = "given"
MAX_FILE_BYTES = 16 << 20
MAX_LEVELS = 100  # of nested objects and lists in a problem, well below Python's recursion limit
MAX_EXTRA_WORDS = 8  # around the wanted text: a sentence passes, the whole paragraph that was asked about does not
MAX_DIGITS = 1000  # of a number that is compared exactly; int() refuses more than 4,300
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?")
FENCE = re.compile(r"\A\s*```\w*\n(.*?)\n?```\s*\Z", re.DOTALL)
FIELDS = {"family", "messages", "tools", "response_format", "answer"}
Calls = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Given:
    """A problem of a file. `answer` is that of the file, unchanged."""

    family: str
    messages: tuple[dict[str, Any], ...]
    answer: Any
    tools: tuple[dict[str, Any], ...] = ()
    response_format: dict[str, Any] | None = None
    thinking: bool = True
    split: str = SPLIT

    @classmethod
    def of(cls, row: Any) -> Self:
        """Raises ValueError with what is wrong with the row."""
        if not isinstance(row, dict):
            raise ValueError("is not an object")
        if unknown := row.keys() - FIELDS:
            raise ValueError(f"has unknown keys: {', '.join(sorted(unknown))}; known are {', '.join(sorted(FIELDS))}")
        family, messages, tools = row.get("family"), row.get("messages"), row.get("tools", [])
        if not isinstance(family, str) or not family:
            raise ValueError("needs family, a string")
        for name, found in (("messages", messages), ("tools", tools)):
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise ValueError(f"needs {name} as a list of objects")
        if not messages:
            raise ValueError("has no messages")
        answer, wanted = row.get("answer"), row.get("response_format")
        calls = isinstance(answer, list) and all(map(_is_call, answer))
        texts = isinstance(answer, list) and all(isinstance(text, str) for text in answer)
        if isinstance(answer, bool) or not (isinstance(answer, int | float | str | dict) or calls or texts):
            raise ValueError(
                "needs answer: a number, a string, a list of strings, an object, or a list of {name, arguments}, the "
                "arguments as an object"
            )
        if wanted is not None and not isinstance(wanted, dict):
            raise ValueError("needs response_format as an object")
        return cls(family, tuple(messages), answer, tuple(tools), wanted)

    def right(self, content: str, calls: Calls) -> bool:
        """Whether an answer of this content and these (name, arguments as written) is right."""
        if isinstance(self.answer, list) and not any(isinstance(item, str) for item in self.answer):
            return _same_calls(self.answer, calls) and bool(self.answer or content.strip())
        if calls:
            return False
        if isinstance(self.answer, dict):
            return _object(content) == _exact(self.answer)
        if isinstance(self.answer, int | float):
            found = NUMBER.findall(content)
            return bool(found) and _number(found[-1].replace(",", "").replace("−", "-")) == self.answer
        texts = [self.answer] if isinstance(self.answer, str) else self.answer
        return _object(content) is None and any(_says(content, text) for text in texts)

    def copy(self) -> str:
        """The last message's text, for the baseline that repeats it."""
        text = self.messages[-1].get("content")
        return text if isinstance(text, str) else ""

    def expected(self) -> dict[str, Any]:
        return {"answer": self.answer}


def _is_call(item: Any) -> bool:
    """Whether it is {"name", "arguments"}. Arguments as text, which OpenAI's API has, would equal no answer."""
    keys = isinstance(item, dict) and item.keys() == {"name", "arguments"}
    return keys and isinstance(item["name"], str) and isinstance(item["arguments"], dict)


def read(path: Path, thinking: bool) -> list[Given]:
    """The problems of a file. ConfigError names the line that is wrong."""
    found = []
    # splitlines() would also split at U+2028 and the like, which JSON strings may hold.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                # Found now, not after the answers of all other problems: what no request can carry (NaN, 1e999,
                # half a surrogate pair), and an answer nested too deeply to be compared.
                json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
                _exact(row)
                if depth(row) >= MAX_LEVELS:
                    raise ValueError(f"nests deeper than {MAX_LEVELS} levels")
                found.append(replace(Given.of(row), thinking=thinking))
            except (ValueError, RecursionError) as e:
                what = f"is not JSON: {e}" if isinstance(e, json.JSONDecodeError) else e
                raise ConfigError(f"{path}, line {number} {what}") from e
    if not found:
        raise ConfigError(f"{path} has no problems: write one JSON object a line")
    return found


def digest(path: Path) -> str:
    """Of the file's text, for ledger rows: two versions have two digests."""
    return hashlib.sha256(_text(path).encode()).hexdigest()[:12]


def _text(path: Path) -> str:
    """The text of the file, decompressed if its name ends in .xz."""
    try:
        data = read_regular(path)
        if path.suffix == ".xz":
            data = _unpacked(data)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {len(data):,} bytes, the limit is {MAX_FILE_BYTES:,}: split the file")
        return data.decode()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}; choose another file with --problems") from e
    except lzma.LZMAError as e:
        raise ConfigError(f"{path} is not a whole xz file: {e}; choose another file with --problems") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text: {e.reason} at byte {e.start}") from e


def _unpacked(data: bytes) -> bytes:
    """The text of an xz file, which may be several streams one after the other; a little more than MAX_FILE_BYTES of it
    at most."""
    found = b""
    while data and len(found) <= MAX_FILE_BYTES:
        unpacker = lzma.LZMADecompressor()
        found += unpacker.decompress(data, MAX_FILE_BYTES + 1)
        if not unpacker.eof and len(found) <= MAX_FILE_BYTES:
            raise lzma.LZMAError("it is cut off")
        data = unpacker.unused_data.lstrip(b"\0")  # streams may be padded
    return found


def _words(text: str) -> list[str]:
    """Words and signs without case, quotes, brackets and commas. An inner full stop or dash belongs to its word."""
    plain = re.sub(r"[\[\](){}\"'’‘“”`*,;:!?]", " ", text.casefold())
    return [word for word in (w.rstrip(".") for w in plain.split()) if word]


def _says(content: str, text: str) -> bool:
    found, wanted = _words(content), _words(text)
    spare = len(found) - len(wanted)
    if not wanted:  # "?"
        return content.strip() == text.strip()
    return 0 <= spare <= MAX_EXTRA_WORDS and any(found[i : i + len(wanted)] == wanted for i in range(spare + 1))


def _number(text: str) -> int | float:
    """The value of a decimal number; a whole one exactly, where a float is exact to 2^53 only."""
    whole = "." not in text and len(text) <= MAX_DIGITS
    return int(text) if whole else float(text)


def _exact(value: Any) -> str:
    """A JSON value as one text: equal numbers are spelt alike (2 and 2.0), True is not 1, keys are sorted."""

    def plain(v: Any) -> Any:
        if isinstance(v, float) and v.is_integer():
            return int(v)
        if isinstance(v, dict):
            return {k: plain(item) for k, item in v.items()}
        return [plain(item) for item in v] if isinstance(v, list) else v

    return json.dumps(plain(value), sort_keys=True)


def _object(content: str) -> str | None:
    inner = FENCE.match(content)
    try:
        found = json.loads(inner[1] if inner else content)
        return _exact(found) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def _same_calls(wanted: Sequence[dict[str, Any]], calls: Calls) -> bool:
    got = [(name, _object(arguments)) for name, arguments in calls]
    if any(arguments is None for _, arguments in got):
        return False
    spelt = [(call["name"], _exact(call["arguments"]).casefold()) for call in wanted]
    return sorted(spelt) == sorted((name, (arguments or "").casefold()) for name, arguments in got)
