"""A rank that runs decode steps the way of CUDA graphs, on the CPU: as perilune.engine.rank otherwise."""

from typing import Any

from perilune.engine import rank
from perilune.engine.runner import Runner
from tests.cpu.engine.test_graphs import Running, Uncaptured


def graphed(runner: Runner, max_model_len: int) -> Uncaptured:
    recorder = Running(runner.last_tokens.device, needed=True)
    runner.graphs = graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, max_model_len, recorder)
    graphs.follow(runner.drafter)
    return graphs


_init = Runner.__init__


def init(self: Runner, model: Any, pages: Any, config: Any, *rest: Any, **more: Any) -> None:
    _init(self, model, pages, config, *rest, **more)
    graphed(self, config.max_model_len)


if __name__ == "__main__":
    Runner.__init__ = init  # type: ignore[method-assign]
    rank.main()
