"""Perilune: serve the Kimi K2 family close to what the memory allows."""

# As in typing, but not imported from there: that import would take a third of the time from the start of Python until
# Ctrl-C ends a command without a traceback (cli/shared/interrupt.py).
TYPE_CHECKING = False
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
