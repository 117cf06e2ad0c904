"""Rules that keep the tree readable: sizes of folders and signatures, names of kernels and constants, types, words.

ratchets.json holds what does not follow a rule yet. It may only shrink: `python -m tests.cpu.house.test_rules` prints
what the tree has now and lowers the file to that; a count or an exception is never added.
"""

import ast
import functools
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "perilune"
RATCHETS = Path(__file__).with_name("ratchets.json")

MAX_FILES = 25  # of a folder without __init__.py; device folders (sm90/, cpu/) are folders of their own
MAX_PARAMETERS = 8  # of a public function, an op's implementation or a constructor, without self

# <room>/sm90/<op>[_<method>].cu: how the kernel works. Ranges of tokens are tuning results and belong into `when`;
# t1 only names a kernel that exists for one token.
METHODS = {"mma", "wgmma", "gemv", "tma", "topk", "compact", "t1", "once"}

# Rooms with constants that are tuned. A name there says its unit: by one of these words, or by a plural last word, the
# things that are counted (MAX_GRAPHS). Negative numbers are marks and have none.
TUNED = ("engine", "speculation", "server", "ops/harness")
UNITS = {"SECONDS", "MS", "US", "BYTES", "KB", "MB", "GB", "TOKENS", "STEPS", "ROWS", "BLOCKS", "REQUESTS", "CHAINS"}
UNITS |= {"CHARS", "SHARE", "RATIO", "LENGTH", "WIDTH", "PER", "PROBABILITY", "CONFIDENCE", "VARIANCE", "LOG"}

# Words that readers who know the field did not understand here, counted in comments, docstrings and identifiers.
PRIVATE_WORDS = re.compile(
    r"told|tells?|heed(s|ed)?|nobody|whoever|whose|somebody|lone|asleep|rouse|minds?|stands|surest|foretells?|hope|"
    r"verdict|trails?|guess(es)?|announce(d|s)?"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def named(package: Path, file: Path, name: str) -> str:
    """By its room, so that an exception may move to another file."""
    return f"{file.relative_to(package).parts[0]}.{name}"


def functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of a module and methods of its classes; not those inside other functions."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (f for f in node.body if isinstance(f, Function))


def decorators(function: Function) -> list[str]:
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]


# ---- what the rules are about


def crowded_folders(package: Path) -> list[str]:
    folders = {path.parent for path in package.rglob("*") if not {"bundled", "__pycache__"} & set(path.parts)}
    counts = {f: sum(p.is_file() and p.name != "__init__.py" for p in f.iterdir()) for f in folders}
    return sorted(f"{f.relative_to(package)}: {count}" for f, count in counts.items() if count > MAX_FILES)


def long_signatures(package: Path) -> list[str]:
    """Click's commands are left out: their parameters come by name, one for each option."""
    found = []
    for file in modules(package):
        for f in functions(parsed(file)):
            given = decorators(f)
            public = not f.name.startswith("_") or f.name == "__init__" or "op.impl" in given
            arguments = [
                a for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs) if a.arg not in ("self", "cls")
            ]
            if public and "click.command" not in given and len(arguments) > MAX_PARAMETERS:
                found.append(f"{file.relative_to(package)}:{f.lineno} {f.name}: {len(arguments)}")
    return found


def misnamed_kernels(package: Path) -> list[str]:
    """Sources that are not <room>/sm90/<op>[_<method>].cu or <room>/cpu/<op>.cpp beside a contract <room>/<op>.py."""
    found = []
    for source in sorted([*package.rglob("*.cu"), *package.rglob("*.cpp")]):
        where = source.relative_to(package).as_posix()
        if source.parent.name != ("sm90" if source.suffix == ".cu" else "cpu"):
            found.append(f"{where}: lies in no folder of its architecture")
            continue
        stem, contracts = source.stem, {p.stem for p in source.parents[1].glob("*.py")}
        method: set[str] = set()
        while stem not in contracts and "_" in stem:
            stem, _, word = stem.rpartition("_")
            method.add(word)
        if stem not in contracts:
            found.append(f"{where}: belongs to no op of its room")
        elif method - (METHODS if source.suffix == ".cu" else set()):
            found.append(f"{where}: {'_'.join(sorted(method))} is no method")
    return found


def cached_tensors(package: Path) -> list[str]:
    """Functions whose cache decorator keeps tensors of a device: no close() frees those. One on the CPU is a table."""
    found = []
    for file in modules(package):
        tree = parsed(file)
        holders = {c.name for c in tree.body if isinstance(c, ast.ClassDef) and "Tensor" in ast.unparse(c)} | {"Tensor"}
        for f in functions(tree):
            if {"functools.cache", "functools.lru_cache", "cache", "lru_cache"} & set(decorators(f)):
                result = ast.unparse(f.returns) if f.returns else ""
                if holders & set(re.findall(r"\w+", result)) and re.search("device|cuda", ast.unparse(f)):
                    found.append(named(package, file, f.name))
    return found


def numeric(value: ast.expr | None) -> bool:
    """A literal of numbers, or a tuple of them, none of them negative."""
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.BinOp(left=left, right=right):
            return numeric(left) and numeric(right)
        case ast.Tuple(elts=values):
            return bool(values) and all(numeric(v) for v in values)
    return False


def has_unit(name: str) -> bool:
    words = name.strip("_").split("_")
    return bool(UNITS & set(words)) or (words[-1].endswith("S") and not words[-1].endswith("SS"))


def unitless_constants(package: Path) -> list[str]:
    found = []
    for file in (file for room in TUNED for file in modules(package / room)):
        for node in parsed(file).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if targets and numeric(node.value):  # type: ignore[union-attr]  # both kinds of assignment have a value
                names = re.findall(r"\w+", ast.unparse(targets[0]))
                found += [named(package, file, n) for n in names if n.isupper() and not has_unit(n)]
    return found


def unmeasured_kernels(package: Path) -> list[str]:
    """File and name of implementations that wait for their first row: each is chosen or deleted once it has one."""
    found = []
    for file in modules(package / "ops"):
        for node in ast.walk(parsed(file)):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="impl"), args=[ast.Constant(value=str(name)), *_], keywords=given
                ):
                    if any(k.arg == "unmeasured" for k in given):
                        found.append(f"{file.stem}/{name}")
    return found


def bare_ignores(package: Path) -> list[str]:
    """Ignored type errors without their code, or without a reason behind it or in a comment of the line before."""
    found = []
    for file in modules(package):
        before = ""
        for number, line in enumerate(file.read_text().splitlines(), 1):
            ignored = re.search(r"# type: ignore(\[[a-z, -]+\])?(  # \S)?", line)
            if ignored and not (ignored[1] and (ignored[2] or before.startswith("# "))):
                found.append(f"{file.relative_to(package)}:{number}")
            before = line.strip()
    return found


def words_of(file: Path) -> list[str]:
    """Words of the comments, docstrings and identifiers of a file."""
    text = file.read_text()
    if file.suffix == ".py":
        kinds = (tokenize.COMMENT, tokenize.NAME)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(t.string for t in tokens if t.type in kinds or t.string.startswith('"""'))
    else:
        text = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)
    return re.findall(r"[a-z]+", text.lower())


def private_words(room: Path) -> Counter[str]:
    files = [f for f in room.rglob("*") if f.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")]
    return Counter(word for file in files for word in words_of(file) if PRIVATE_WORDS.fullmatch(word))


def rooms(package: Path) -> list[str]:
    return sorted(p.name for p in package.iterdir() if p.is_dir() and p.name not in ("bundled", "__pycache__"))


# ---- the rules

LISTS = {
    "cached_tensors": cached_tensors,
    "unitless_constants": unitless_constants,
    "unmeasured_kernels": unmeasured_kernels,
}
COUNTS = {"long_signatures": long_signatures, "bare_ignores": bare_ignores}


def allowed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RATCHETS.read_text())
    return found


def test_a_folder_is_a_page() -> None:
    assert crowded_folders(PACKAGE) == []


def test_kernel_files_are_named_after_their_op_and_method() -> None:
    assert len(list(PACKAGE.rglob("*.cu"))) > 20
    assert misnamed_kernels(PACKAGE) == []


@pytest.mark.parametrize("rule", COUNTS)
def test_counts_only_fall(rule: str) -> None:
    found = COUNTS[rule](PACKAGE)
    assert len(found) <= allowed()[rule], "\n".join([f"{len(found)}, and only {allowed()[rule]} are allowed:", *found])


@pytest.mark.parametrize("rule", LISTS)
def test_exceptions_only_become_fewer(rule: str) -> None:
    assert sorted(set(LISTS[rule](PACKAGE)) - set(allowed()[rule])) == []


@pytest.mark.parametrize("room", rooms(PACKAGE))
def test_private_words_only_become_fewer(room: str) -> None:
    found = private_words(PACKAGE / room)
    assert found.total() <= allowed()["private_words"].get(room, 0), dict(found)


def lowered(old: dict[str, Any], package: Path) -> dict[str, Any]:
    """The ratchets lowered to what the package has; nothing is added or raised."""
    words = {room: private_words(package / room).total() for room in rooms(package)}
    return {
        **{rule: min(old[rule], len(find(package))) for rule, find in COUNTS.items()},
        **{rule: sorted(set(old[rule]) & set(find(package))) for rule, find in LISTS.items()},
        "private_words": {r: min(n, words[r]) for r, n in old["private_words"].items() if words.get(r)},
    }


def test_what_breaks_a_rule_is_found(tmp_path: Path) -> None:
    """In a small package that breaks each rule, beside things that look alike and keep it."""
    for name, text in {
        "engine/loop.py": "WAIT = 3\nWAIT_SECONDS = 3\nMAX_GRAPHS = 2\n_NONE = -1\nHOPELESS, STEPS = 0.9, (1, 2)\n",
        "ops/pointwise/norm.py": (
            "import functools\nfrom torch import Tensor\nclass Board:\n    data: Tensor\n"
            "@functools.cache\ndef board(device: int) -> Board: ...\n@functools.cache\ndef size() -> int: ...\n"
            "@functools.lru_cache(maxsize=8)\ndef table() -> tuple[Tensor, int]: return torch.ones(2).cuda(), 1\n"
            "@functools.cache\ndef on_cpu() -> Tensor: ...\n"
            "@op.impl('cuda', unmeasured=True)\ndef _many(a, b, c, d, e, f, g, h, i): ...\n"
            "def _own(a, b, c, d, e, f, g, h, i): ...\n"
            "def eight(self, a, b, c, d, e, f, g, *, h): ...\n"
            "@click.command()\ndef verb(a, b, c, d, e, f, g, h, i): ...\n"
        ),
        "ops/pointwise/sm90/norm.cu": '// nobody is told; "told"\n',
        "ops/pointwise/sm90/norm_few.cu": "",
        "ops/pointwise/sm90/norm_mma_tma.cu": "",
        "ops/pointwise/sm90/other.cu": "",
        "ops/pointwise/cpu/norm.cpp": "",
        "ops/pointwise/stray.cu": "",
        "text/words.py": (
            'x = 1  # type: ignore\ny = "told"  # type: ignore[a]  # why\nz = 2  # type: ignore[a]\n# why\n'
            'z = 3  # type: ignore[a]\nmind_of = 2  # whose\n"""Tells."""\n'
        ),
        **{f"text/{n}.py": "" for n in range(MAX_FILES)},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert crowded_folders(tmp_path) == [f"text: {MAX_FILES + 1}"]
    assert long_signatures(tmp_path) == ["ops/pointwise/norm.py:14 _many: 9"]
    assert [m.partition(":")[0].rpartition("/")[2] for m in misnamed_kernels(tmp_path)] == [
        "norm_few.cu",
        "other.cu",
        "stray.cu",
    ]
    assert cached_tensors(tmp_path) == ["ops.board", "ops.table"]
    assert unitless_constants(tmp_path) == ["engine.WAIT", "engine.HOPELESS"]
    assert unmeasured_kernels(tmp_path) == ["norm/cuda"]
    assert bare_ignores(tmp_path) == ["text/words.py:1", "text/words.py:3"]
    assert private_words(tmp_path / "text") == {"mind": 1, "whose": 1, "tells": 1}
    assert private_words(tmp_path / "ops") == {"nobody": 1, "told": 1}
    old = {"long_signatures": 3, "bare_ignores": 0, "cached_tensors": ["gone", "ops.board"]}
    old |= {
        "unitless_constants": [],
        "unmeasured_kernels": ["gone/cuda"],
        "private_words": {"gone": 4, "ops": 1, "text": 9},
    }
    assert lowered(old, tmp_path) == old | {
        "long_signatures": 1,
        "cached_tensors": ["ops.board"],
        "unmeasured_kernels": [],
        "private_words": {"ops": 1, "text": 3},
    }


if __name__ == "__main__":
    before = allowed()
    RATCHETS.write_text(json.dumps(lowered(before, PACKAGE), indent=2) + "\n")
    for rule, find in COUNTS.items():
        print(f"{rule}: {len(find(PACKAGE))}, allowed {before[rule]}")
    for rule, find in LISTS.items():
        print(f"{rule}: {len(set(find(PACKAGE)))}, not allowed {sorted(set(find(PACKAGE)) - set(before[rule]))}")
    for room in rooms(PACKAGE):
        words = private_words(PACKAGE / room)
        print(f"{room}: {words.total()}, allowed {before['private_words'].get(room, 0)}  {dict(words.most_common())}")
