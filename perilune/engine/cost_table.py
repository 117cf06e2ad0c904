"""Times steps of an engine before its first request, for the table by which draft lengths are chosen
(speculation/step_cost.py)."""

import logging
import random
import time
from collections.abc import Sequence

from perilune.core.config import EngineConfig
from perilune.core.sampling import SamplingParams
from perilune.core.step import MAX_DRAFTS, StepPlan, Work
from perilune.engine.runner import Runner
from perilune.speculation import step_cost

log = logging.getLogger("perilune.engine")


def measure_costs(runner: Runner, config: EngineConfig) -> step_cost.Costs:
    """Seconds of steps of this runner, by their size. Overwrites the cache, which must be empty."""
    assert config.max_step_tokens and config.max_model_len and config.kv_blocks and config.block_size
    begin = time.perf_counter()
    max_requests = max(min(config.max_num_seqs, config.kv_blocks // 2), 1)
    held = config.kv_blocks * config.block_size
    table = step_cost.measure(
        _Timer(runner, config),
        max_requests=max_requests,
        max_tokens=config.max_step_tokens,
        max_context=max(min(config.max_model_len, held) - MAX_DRAFTS - 1, 1),
        drafter=runner.drafter is not None,
        can_chain=runner.can_chain,
    )
    log.info("costs measured in %.1f s: %s", time.perf_counter() - begin, table)
    return table


class _Timer:
    """A step_cost.Timer. Requests share blocks where there are too few: the time does not depend on the contents."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        assert config.block_size and config.kv_blocks
        self._runner = runner
        self._block_size = config.block_size
        self._num_blocks = config.kv_blocks
        self._random = random.Random(0)
        self._cleared = 0

    def __call__(self, counts: Sequence[int], context: int, chain: int = 0, ahead: int = 1) -> float:
        return self._runner.call(self._time, counts, context, chain, ahead)

    def _time(self, counts: Sequence[int], context: int, chain: int, ahead: int) -> float:
        each = -(-(context + max(counts)) // self._block_size)
        self._clear(min(each * len(counts), self._num_blocks))
        vocabulary = self._runner.model.config.vocab_size
        work = tuple(
            Work(
                rid=i,
                slot=i,
                start=context,
                tokens=tuple(self._random.randrange(vocabulary) for _ in range(count)),
                blocks=tuple((i * each + b) % self._num_blocks for b in range(each)),
                sample=True,
                output_index=0,
                params=SamplingParams(temperature=0.0),
                seed=0,
                left=count,
                drafts=count - 1,
            )
            for i, count in enumerate(counts)
        )
        begin = time.perf_counter()
        before = None
        for _ in range(ahead):  # as the engine does: queue a step, then read the one before
            queued = self._runner.run(self._runner.ordered(StepPlan(0, work, chain), "time"))
            if before is not None:
                before.wait().result()
            before = queued
        assert before is not None
        before.wait().result()
        return (time.perf_counter() - begin) / ahead

    def _clear(self, blocks: int) -> None:
        """Zeroes the first blocks: CPUs compute slowly with the denormal numbers that fresh memory may hold."""
        if blocks > self._cleared:
            self._runner.zero(blocks)
            self._cleared = blocks
