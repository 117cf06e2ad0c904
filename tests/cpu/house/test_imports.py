"""The import contract of docs/architecture.md: who may import whom, and who never touches torch."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "perilune"

# room (or a module with rules of its own) -> rooms it may import besides itself; `make check` writes it into
# docs/architecture.md
MAY: dict[str, set[str] | None] = {
    "core": set(),
    "ops": {"core"},
    "ops.harness": {"core"},
    "ops.layouts": {"ops.harness", "core"},
    "ops.pointwise": {"ops.harness", "core"},
    "ops.linear": {"ops.pointwise", "ops.layouts", "ops.harness", "core"},
    "ops.attention": {"ops.exchange", "ops.linear", "ops.pointwise", "ops.layouts", "ops.harness", "core"},
    "ops.moe": {"ops.attention", "ops.exchange", "ops.linear", "ops.pointwise", "ops.layouts", "ops.harness", "core"},
    "ops.exchange": {"ops.pointwise", "ops.layouts", "ops.harness", "core"},
    "ops.sampling": {"ops.harness", "core"},
    "ops.drafts": {"ops.pointwise", "ops.layouts", "ops.sampling", "ops.harness", "core"},
    "ops.quantize": {"ops.harness", "core"},
    "ops.rows": {"ops.harness", "core"},
    "dist": {"ops", "core"},
    "formats": {"model.names", "core"},
    "kv": {"core"},
    "kv.pages": {"core", "ops"},
    "kv.copier": {"core", "ops"},
    "kv.transfer": {"core", "ops"},
    "plan": {"core"},
    "tasks": {"core"},
    "text": {"core"},
    "media": {"core"},
    "grammar": {"text", "core"},
    "client": {"text", "core"},
    "model": {"ops", "dist", "formats", "core"},
    "model.names": {"core"},
    "loading": {"model", "ops", "dist", "formats", "core"},
    "doctor": {"loading", "model", "text", "formats", "plan", "core"},
    "speculation": {"loading", "model", "ops", "dist", "core"},
    "engine": {
        "speculation",
        "loading",
        "model",
        "grammar",
        "text",
        "formats",
        "plan",
        "kv",
        "ops",
        "dist",
        "media",
        "core",
    },
    "server": {"engine.client", "grammar", "media", "text", "core"},
    "evals": {"client", "tasks", "text", "core"},
    "convert": {"loading", "model", "formats", "ops", "core"},
    "convert.texts": {"model", "text", "tasks", "core"},
    "convert.calibrate": {"engine", "loading", "model", "formats", "text", "tasks", "kv", "ops", "core"},
    "convert.report": {"engine", "loading", "model", "formats", "text", "tasks", "kv", "ops", "core"},
    "draft": {"engine", "speculation", "loading", "model", "formats", "text", "tasks", "kv", "dist", "core"},
    "cluster": {"engine.client", "kv", "dist", "core"},
    "bench": None,  # may import anything
    "cli": None,
}
NO_TORCH = (
    "core", "text", "grammar", "tasks", "server", "client", "plan", "cluster.router", "kv.blocks", "kv.prefix",
    "kv.tiers", "kv.worth", "kv.disk", "engine.kv_tiers.offload",
    "engine.scheduler", "engine.client", "engine.wire", "formats.hub", "cli.serve", "model.names",
    "speculation.step_cost", "speculation.policy", "speculation.drafting", "speculation.suffix",
    "speculation.rejection_log", "speculation.protocol", "media",
)  # fmt: skip
HEAVY = {"torch", "triton", "safetensors"}
STANDARD_LIBRARY_ONLY = "core"

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below perilune; '' for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> set[str]:
    """Every module imported anywhere in the file, lazy imports included; type-checking-only ones left out."""
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        ):
            found.add(ast.unparse(node.args[0]).strip("f'\""))
    return found


@cache
def imports_in(path: Path) -> frozenset[str]:
    """As imports_of, of a file: read once, because most files are imported by many."""
    return frozenset(imports_of(path.read_text()))


def matches(module: str, rule: str) -> bool:
    return module == rule or module.startswith(rule + ".")


def room_of(module: str) -> str:
    """The room a module lies in: of ops a folder of its own, else the first part of the name."""
    first, _, rest = module.partition(".")
    return f"ops.{rest.partition('.')[0]}" if first == "ops" and rest else first


def rule_for(module: str) -> set[str] | None:
    return MAY[max((r for r in MAY if matches(module, r)), key=len)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = name_of(path)
    if module == "":
        return  # exposes LLM and SamplingParams lazily: the one exception, tested below
    allowed = rule_for(module)
    own = room_of(module)
    for target in imports_in(path):
        if not target.startswith("perilune."):
            continue
        target = target.removeprefix("perilune.")
        if allowed is None or matches(target, own):
            continue
        assert any(matches(target, rule) for rule in allowed), f"perilune.{module} must not import perilune.{target}"


def module_file(dotted: str) -> Path | None:
    """The file that `import perilune.<dotted>` (or from ... import name) executes."""
    parts = dotted.split(".")
    for end in (len(parts), len(parts) - 1):
        base = ROOT.joinpath(*parts[:end])
        if base.with_suffix(".py").is_file():
            return base.with_suffix(".py")
        if (base / "__init__.py").is_file():
            return base / "__init__.py"
    return None


@pytest.mark.parametrize(
    "path", [p for p in FILES if any(matches(name_of(p), r) for r in NO_TORCH)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_torch_even_transitively(path: Path) -> None:
    seen, queue = set(), [(path, name_of(path))]
    while queue:
        file, trail = queue.pop()
        if file in seen:
            continue
        seen.add(file)
        for target in imports_in(file):
            assert target.split(".")[0] not in HEAVY, f"{trail} imports {target}"
            if target.startswith("perilune."):
                below = module_file(target.removeprefix("perilune."))
                assert below is not None, f"{trail} imports {target}, which does not exist"
                queue.append((below, f"{trail} -> {target}"))


def test_an_engine_starts_without_torchs_compiler() -> None:
    """Importing torch._dynamo costs every start of an engine a second or two."""
    script = "import sys, perilune.engine.process; sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_core_uses_the_standard_library_only() -> None:
    for path in (ROOT / STANDARD_LIBRARY_ONLY).glob("*.py"):
        for target in imports_in(path):
            top = target.split(".")[0]
            assert top in sys.stdlib_module_names or target.startswith("perilune.core"), f"{path.name} imports {target}"


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py" and p.parent != ROOT], ids=str)
def test_package_inits_are_empty(path: Path) -> None:
    assert path.read_text() == ""


def test_only_ops_asks_which_gpu_this_is() -> None:
    for path in FILES:
        if not matches(name_of(path), "ops"):
            text = path.read_text()
            assert "get_device_capability" not in text and "get_device_properties" not in text, path


def test_environment_names_are_few() -> None:
    names = {
        node.args[0].value
        for path in FILES
        if re.search(r"environ|getenv", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("os.environ.get", "os.getenv")
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(names) <= 5, names


def test_the_contract_catches_a_violation() -> None:
    source = "def f():\n    import torch\n    from perilune.engine.llm import LLM\n"
    assert imports_of(source) == {"torch", "perilune.engine.llm.LLM"}
    assert not any(matches("engine.llm.LLM", rule) for rule in MAY["server"] or ())
