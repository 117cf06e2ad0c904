"""Translates a preprocessed CUDA source to C++: inline assembly, __shared__ variables, built-in variables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.cuda_emulator.instructions import TYPES, Address, Group, Operand, emit


class Untranslated(Exception):
    """Something that the emulator does not know, with file and line."""


@dataclass(frozen=True)
class Place:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


_MARK = re.compile(r'^# (\d+) "([^"]*)".*$', re.M)
_ASM = re.compile(r"\basm\b(\s+volatile)?\s*\(")
_SHARED = re.compile(r"(\bextern\s+)?\b__shared__\s+([^;]*);")
_VOLATILE = re.compile(r"\*\s*(?:static|reinterpret|const)_cast<(?:const )?volatile ([\w: ]+?)\*>\(")
_BUILT_IN = {"threadIdx": "emu::view->thread", "blockIdx": "emu::view->block"}
_BUILT_IN |= {"blockDim": "emu::view->block_dim", "gridDim": "emu::view->grid_dim"}
_BUILT_INS = re.compile(r"(?<![.\w])(threadIdx|blockIdx|blockDim|gridDim)\b")


def translate(source: str) -> str:
    """C++ of a source after g++ -E, with its line markers."""
    parts, end = [], 0
    for at, stop, file in _regions(source):
        parts.append(source[end:at])
        parts.append(_region(source[at:stop], source, at, file))
        end = stop
    return "".join([*parts, source[end:]])


def _regions(source: str) -> list[tuple[int, int, str]]:
    """(begin, end, file) of text that is not from headers of the system or of the emulator."""
    marks = list(_MARK.finditer(source))
    found = []
    for mark, after in zip(marks, [*marks[1:], None]):
        file = mark[2]
        if not file.startswith(("/usr/", "<")) and "/cuda_emulator/include/" not in file:
            found.append((mark.end(), after.start() if after else len(source), file))
    joined: list[tuple[int, int, str]] = []
    for at, stop, file in found:  # a statement may span markers of one file
        if joined and joined[-1][2] == file and _MARK.fullmatch(source[joined[-1][1] : at].strip("\n")):
            joined[-1] = (joined[-1][0], stop, file)
        else:
            joined.append((at, stop, file))
    return joined


def _region(text: str, source: str, offset: int, file: str) -> str:
    out, end = [], 0
    while m := _ASM.search(text, end):
        stop = _close(text, m.end() - 1)
        place = Place(file, _line(source, offset + m.start()))
        statement = text[m.end() : stop]
        out.append(text[end : m.start()])
        out.append(_asm(_MARK.sub("", statement), place) + "\n" * statement.count("\n"))
        end = stop + 1
    out.append(text[end:])
    text = "".join(out)
    text = _SHARED.sub(_declaration, text)
    text = _VOLATILE.sub(r"*emu::polled<\1>(", text)
    return _BUILT_INS.sub(lambda m: _BUILT_IN[m[1]], text)


def _line(source: str, at: int) -> int:
    mark = source.rfind("\n# ", 0, at)
    m = _MARK.match(source, mark + 1)
    return int(m[1]) + source.count("\n", m.end() + 1, at) if m else 0


def _plain(text: str, at: int = 0) -> Iterator[tuple[int, str, int]]:
    """(index, character, depth of parentheses behind it) of the characters from `at` on that are in no string."""
    depth, quoted, i = 0, False, at
    while i < len(text):
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        else:
            depth += (c in "([{") - (c in ")]}")
            yield i, c, depth
        i += 1


def _close(text: str, at: int) -> int:
    """Where the parenthesis at `at` is closed."""
    return next(i for i, _, depth in _plain(text, at) if not depth)


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators outside of parentheses and strings."""
    ends = [i for i, c, depth in _plain(text) if c == separator and not depth]
    return [text[begin:end] for begin, end in zip([0, *(i + 1 for i in ends)], [*ends, len(text)])]


# ---- shared memory ----


def _declaration(m: re.Match[str]) -> str:
    body = m[2].replace("\n", " ")
    align = "0"
    if found := re.match(r"\s*alignas\s*\(([^)]*)\)\s*", body):
        align, body = found[1], body[found.end() :]
    kind = re.match(r"\s*((?:typename )?[\w:]+(?:\s*<.*>)?(?:::\w+)*)\s+", body)
    assert kind, body
    declarators = [d.strip() for d in _commas(body[kind.end() :])]
    newlines = "\n" * m[2].count("\n")
    if m[1]:
        name = declarators[0].split("[")[0]
        largest = f"emu::largest({align}, alignof({kind[1]}))"
        return f"auto* {name} = static_cast<{kind[1]}*>(emu::dynamic({largest}));{newlines}"
    lines = []
    for d in declarators:
        found = re.match(r"(\w+)\s*(.*)", d)
        assert found, d
        name, dims = found[1], found[2]
        lines.append(
            f"using emu_{name}_t = {kind[1]}{dims}; static emu::Slot emu_{name}_slot;"
            f" auto& {name} = emu::shared<emu_{name}_t>(emu_{name}_slot, emu::largest({align}, alignof(emu_{name}_t)));"
        )
    return " ".join(lines) + newlines


def _commas(text: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


# ---- inline assembly ----


def _asm(statement: str, place: Place) -> str:
    """C++ of asm's operands and template: one block that binds the operands and does what the instructions do."""
    colons = [part.strip() for part in _split(statement, ":")]
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', colons[0])).replace("\\n", "\n").replace("\\t", " ")
    outputs = _operands(colons[1]) if len(colons) > 1 else []
    inputs = _operands(colons[2]) if len(colons) > 2 else []
    try:
        body = _instructions(template)
    except (KeyError, AssertionError, IndexError) as e:
        raise Untranslated(f"{place}: the emulator does not know this instruction: {e}: {template}") from e
    if not body:
        return "((void)0)"
    bound = []
    for n, (constraint, expression) in enumerate([*outputs, *inputs]):
        if not re.search(rf"\br{n}_\b", body):
            continue
        if "=" in constraint or "+" in constraint:
            bound.append(f"auto& r{n}_ = {expression};")
        else:
            kind = {"r": "uint32_t", "l": "uint64_t", "f": "float", "h": "uint16_t", "d": "double", "n": ""}[constraint]
            bound.append(
                f"const auto r{n}_ = emu::operand<{kind}>({expression});"
                if kind
                else f"constexpr auto r{n}_ = {expression};"
            )
    return "do { " + " ".join([*bound, f"{{ {body} }}"]) + " } while (0)"


def _operands(text: str) -> list[tuple[str, str]]:
    """(constraint, expression) of each operand."""
    found = []
    for part in _split(text, ","):
        if m := re.match(r'\s*"([^"]*)"\s*\((.*)\)\s*$', part, re.S):
            found.append((m[1], m[2].strip()))
    return found


def _instructions(template: str) -> str:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    labels = re.findall(r"(?:^|[;\s])(\w+)\s*:(?!:)", text)
    out = [f"__label__ {', '.join(f'l_{label}' for label in labels)};"] if labels else []
    names: set[str] = set()
    for piece in text.split(";"):
        piece = piece.strip()
        while m := re.match(r"(\w+)\s*:(?!:)\s*", piece):
            out.append(f"l_{m[1]}:;")
            piece = piece[m.end() :]
        if not piece:
            continue
        if m := re.match(r"\.reg\s+\.(\w+)\s+(.*)", piece, re.S):
            for name in m[2].split(","):
                names.add(name.strip())
                out.append(f"{TYPES[m[1]]} {name.strip()}_{{}};")
            continue
        guard = ""
        if m := re.match(r"@(!?)([%\w]+)\s+", piece):
            guard, piece = f"if ({m[1]}{_value(m[2], names)}) ", piece[m.end() :]
        opcode, _, rest = piece.partition(" ")
        if opcode.startswith("bra"):
            out.append(f"{guard}goto l_{rest.strip()};")
        else:
            out.append(f"{guard}{emit(opcode, _arguments(rest, names))}")
    return " ".join(out)


def _arguments(text: str, names: set[str]) -> list[Operand]:
    found: list[Operand] = []
    for part in _split(text, ","):
        part = part.strip()
        if not part:
            continue
        if part.startswith("["):
            base, _, rest = part[1:-1].partition(",")
            coordinates = tuple(_value(c, names) for c in rest.strip().strip("{}").split(",")) if rest else ()
            found.append(Address(" + ".join(_value(p, names) for p in base.split("+")), coordinates))
        elif part.startswith("{"):
            found.append(Group(tuple(_value(p, names) for p in part[1:-1].split(","))))
        elif "|" in part:
            found.append(Group(tuple(_value(p, names) for p in part.split("|"))))
        else:
            found.append(_value(part, names))
    return found


def _value(text: str, names: set[str]) -> str:
    text = text.strip().replace("%%", "%")
    if m := re.fullmatch(r"%(\d+)", text):
        return f"r{m[1]}_"
    if text in names:
        return f"{text}_"
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return f"emu::bits<float>(0x{text[2:]}u)"
    return text
