"""Plans that reach other ranks are those of rank 0, though frames hold only what is new."""

import random

import msgspec
import pytest

from perilune.core.errors import EngineError
from perilune.core.sampling import SamplingParams
from perilune.core.step import PENDING, Slice, StepPlan, Work
from perilune.engine.plan_wire import Order, Reader, Writer


def test_plans_arrive_as_they_were_sent() -> None:
    rng, writer, reader = random.Random(0), Writer(), Reader()
    params = [SamplingParams(temperature=0.5, seed=i, logit_bias={3: 1.0}, stop_token_ids=(1, 2)) for i in range(9)]
    blocks: dict[int, tuple[int, ...]] = {}
    owner: dict[int, int] = {}
    small = 0
    for step in range(300):
        work = []
        for slot in rng.sample(range(4), rng.randint(1, 4)):
            if slot not in owner or rng.random() < 0.05:
                owner[slot], blocks[slot] = rng.randrange(10_000), tuple(rng.sample(range(99), 5))
            elif (chance := rng.random()) < 0.2:
                blocks[slot] = (*blocks[slot], rng.randrange(99))
            elif chance < 0.25:
                blocks[slot] = blocks[slot][:2]
            drafts = rng.randrange(3)
            work.append(
                Work(
                    owner[slot], slot, step, (PENDING, *range(drafts)), blocks[slot], rng.random() < 0.8, step,
                    params[owner[slot] % 9], -owner[slot], tuple(range(rng.randrange(3))), (), 7,
                    drafts, 5, drafts == 0, ((b"picture", 2, 0, 1),) * rng.randrange(2),
                )
            )  # fmt: skip
        slices = (Slice(1, b"picture", (1, 4, 2), step, step + 2),) * (step % 9 == 0)
        dropped = (b"other",) * (step % 9 == 1)
        plan = StepPlan(step, tuple(work), rng.randrange(-1, 4), rng.random(), rng.random() < 0.5, slices, dropped)
        frame = writer.plan(plan)
        got = reader.plan(reader.order(frame))
        assert got == plan
        small += len(frame) < 60 * len(work) + 20
    assert small > 200, "most frames repeat neither parameters nor tables"


def test_of_works_that_go_on_in_their_series_a_frame_has_only_where_they_are() -> None:
    writer, reader, params = Writer(), Reader(), SamplingParams()
    tables = [(i,) for i in range(64)]
    series = list(range(1, 65))

    def sent(step: int, slots: list[int]) -> tuple[int, int]:
        """(bytes of the frame, rows in it)"""
        work = [
            Work(
                100 + i, i, 500 + step + i, (PENDING,), tables[i], True, step, params, i, left=99 - step,
                series=series[i],
            )
            for i in slots
        ]  # fmt: skip
        plan = StepPlan(step, tuple(work))
        frame = writer.plan(plan)
        order = reader.order(frame)
        assert reader.plan(order) == plan
        return len(frame), len(order.rows)

    every = list(range(64))
    assert sent(0, every)[1] == 64
    nbytes, rows = sent(1, every)
    assert nbytes < 3 * 64 + 40 and rows == 0
    tables[5], series[5] = (5, 77), 65
    assert sent(2, every)[1] == 1
    others = [i for i in every if i != 9]
    assert sent(3, others)[1] == 0 and sent(4, [*others[::-1], 9])[1] == 0
    series[9] = 66  # another life in the same slot
    assert sent(5, every)[1] == 1


def test_the_same_table_stays_the_same_tuple() -> None:
    writer, reader, table = Writer(), Reader(), (4, 5, 6)
    params = SamplingParams()

    def sent(start: int) -> Work:
        plan = StepPlan(0, (Work(1, 0, start, (PENDING,), table, True, start, params, 3),))
        return reader.plan(reader.order(writer.plan(plan))).work[0]

    first, second = sent(0), sent(1)
    assert first.blocks is second.blocks and first.params is second.params


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"kind": "plan"}), b"\x93\x01"])
def test_what_is_no_order_is_refused(body: bytes) -> None:
    with pytest.raises(EngineError, match="malformed order"):
        Reader().order(body)


def test_an_order_about_an_unknown_slot_is_refused() -> None:
    row = (0, 1, None, -1, (), (1,), True, (), (), 0, -1, False, (), 0, 1)
    with pytest.raises(EngineError, match="slot 0"):
        Reader().plan(Order("plan", slots=[0], starts=[0], rows=[row]))
