"""Memory that kernels keep between launches: whose it is, and when it goes. Streams are numbers: no GPU needed."""

import ast
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perilune.ops.harness import build, registry, workspace

CACHED = re.compile(r"(functools\.)?(lru_)?cache\b")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The current stream of every GPU; memory of GPUs is made on the CPU."""
    now, real = SimpleNamespace(cuda_stream=0), torch.zeros
    monkeypatch.setattr(build, "stream", lambda device: now.cuda_stream)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: real(*size, dtype=dtype))
    yield now


def test_launches_of_one_stream_share_a_mailbox_and_other_streams_have_their_own(stream: SimpleNamespace) -> None:
    with workspace.owned() as owner:
        first = workspace.current(CUDA).zeros("mailbox", 8)
        first.fill_(7)  # what a launch leaves
        assert workspace.current(CUDA).zeros("mailbox", 8) is first and first.tolist() == [7] * 8
        assert workspace.current(CUDA).zeros(("mailbox", 2), 8) is not first
        stream.cuda_stream = 5
        other = workspace.current(CUDA).zeros("mailbox", 8)
        assert other is not first and other.tolist() == [0] * 8 and workspace.current(CUDA).stream == 5
        assert workspace.current(torch.device("cuda", 1)).zeros("mailbox", 8) is not other
        stream.cuda_stream = 0
        assert workspace.current(CUDA).zeros("mailbox", 8) is first and len(owner) == 3


def test_owners_share_nothing_even_on_one_stream(stream: SimpleNamespace) -> None:
    one, two = workspace.Workspaces(), workspace.Workspaces()
    with one.use():
        mine = workspace.current(CUDA).zeros("mailbox", 8)
        with two.use():
            assert workspace.current(CUDA).zeros("mailbox", 8) is not mine
        assert workspace.current(CUDA).zeros("mailbox", 8) is mine
    two.close()
    with one.use():
        assert workspace.current(CUDA).zeros("mailbox", 8) is mine


def test_an_owner_that_closes_frees_its_memory(stream: SimpleNamespace) -> None:
    with workspace.owned():
        made = weakref.ref(workspace.current(CUDA).zeros("mailbox", 8))
        gc.collect()
        assert made() is not None
    gc.collect()
    assert made() is None


def test_no_owner_is_one_clear_error() -> None:
    with pytest.raises(AssertionError, match="without an owner: wrap the call"):
        workspace.current(CPU)


def test_an_owner_is_in_use_in_one_thread_only() -> None:
    found: list[str] = []

    def other() -> None:
        try:
            workspace.current(CPU)
        except AssertionError as e:
            found.append(str(e))

    with workspace.owned():
        workspace.current(CPU)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_another_size_under_the_same_key_is_refused() -> None:
    with workspace.owned():
        workspace.current(CPU).zeros("mailbox", 8)
        with pytest.raises(AssertionError, match="8 values were made, 9 are wanted"):
            workspace.current(CPU).zeros("mailbox", 9)


def test_no_cache_decorator_owns_device_memory() -> None:
    """A cached function of a device makes something on it; what it may give are numbers."""
    found = []
    for path in sorted(Path(registry.__file__).parents[2].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(CACHED.match(ast.unparse(d)) for d in node.decorator_list):
                gives = ast.unparse(node.returns) if node.returns is not None else "nothing that is written down"
                if any("device" in a.arg for a in node.args.args) and gives not in ("int", "bool", "float", "str"):
                    found.append(f"{path.name}: {node.name} -> {gives}")
    assert found == []
