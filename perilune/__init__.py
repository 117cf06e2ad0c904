"""Perilune: serve the Kimi K2 family close to what the memory allows."""

TYPE_CHECKING = False  # as typing has it, whose import takes a third of the time in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from typing import Any

    from perilune.core.sampling import SamplingParams as SamplingParams
    from perilune.engine.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    # The one permitted lazy import: `import perilune` must stay cheap and torch-free for the server.
    if name == "LLM":
        from perilune.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from perilune.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'perilune' has no attribute {name!r}")
