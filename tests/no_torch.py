"""Plugin of `make fast`: fails every test that imports torch, so that the fast tests stay fast."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class NoTorch:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"a test of `make fast` imports {name}")
        return None


sys.meta_path.insert(0, NoTorch)  # type: ignore[arg-type]
