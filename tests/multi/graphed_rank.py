"""A rank that runs steps the way of GPUs, on the CPU: through the classes of CUDA graphs, and with the op that adds
partial outputs over peer memory. As perilune.engine.rank otherwise."""

from typing import Any

from perilune.dist.group import Group, join
from perilune.engine import build, rank
from perilune.engine.runner import Runner
from perilune.ops.exchange.peers import Peers
from tests.cpu.engine.test_graphs import Running, Uncaptured


def graphed(runner: Runner, max_model_len: int) -> Uncaptured:
    recorder = Running(runner.last_tokens.device, needed=True)
    runner.graphs = graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, max_model_len, recorder)
    graphs.follow(runner.drafter)
    return graphs


def joined(*args: Any, **more: Any) -> Group:
    """As dist.group.join; partial outputs go through the exchange's op."""
    group = join(*args, **more)
    group.peers = Peers(group.slicing.rank, group.ranks, group.gather)
    return group


_init = Runner.__init__


def init(self: Runner, model: Any, pages: Any, config: Any, *rest: Any, **more: Any) -> None:
    _init(self, model, pages, config, *rest, **more)
    graphed(self, config.max_model_len)


if __name__ == "__main__":
    Runner.__init__ = init  # type: ignore[method-assign]
    build.join = joined  # type: ignore[attr-defined]  # of another module, as build imports it
    rank.main()
