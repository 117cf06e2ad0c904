"""The block pool: references, the free list, and misuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kv.blocks import BlockPool


def test_allocates_every_block_once_and_no_more():
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert (pool.num_free, pool.num_referenced, pool.total) == (0, 3, 3)
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_last_release_leaves_the_block_idle_until_freed():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.retain(block)
    assert not pool.release(block)
    assert pool.release(block)
    assert (pool.num_free, pool.num_referenced) == (1, 0)
    pool.retain(block)  # an idle block may be taken up again
    assert pool.references(block) == 1
    assert pool.release(block)
    pool.free(block)
    assert pool.num_free == 2
    assert pool.allocate() == block  # last freed, first used
    pool.check()


def test_misuse_is_caught():
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="1 references"):
        pool.free(block)
    pool.release(block)
    with pytest.raises(AssertionError, match="no reference"):
        pool.release(block)
    pool.free(block)
    with pytest.raises(AssertionError, match="references"):
        pool.free(block)
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(block)


@settings(deadline=None)  # by default an example that takes 200 ms fails, as any may on a busy machine
@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "free"]), st.integers(0, 4)), max_size=60))
def test_matches_a_dictionary(ops):
    pool, model = BlockPool(5), {}
    for op, block in ops:
        if op == "allocate" and len(model) < 5:
            fresh = pool.allocate()
            assert fresh not in model
            model[fresh] = 1
        elif op == "retain" and block in model:
            pool.retain(block)
            model[block] += 1
        elif op == "release" and model.get(block, 0) > 0:
            model[block] -= 1
            assert pool.release(block) == (model[block] == 0)
        elif op == "free" and model.get(block) == 0:
            pool.free(block)
            del model[block]
        pool.check()
        assert pool.num_free == 5 - len(model)
        assert pool.num_referenced == sum(count > 0 for count in model.values())
        assert all(pool.references(b) == model.get(b, 0) for b in range(5))
