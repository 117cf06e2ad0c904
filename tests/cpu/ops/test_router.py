"""How the router's launch is cut, and when it publishes its choice: no GPU needed."""

from collections.abc import Iterator

import pytest
import torch

from perilune.ops.harness import workspace
from perilune.ops.moe import router
from perilune.ops.moe.chosen import MAX_NUMBER, Mailbox, Source, mailbox

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [32, 64, 96, 512, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 16384, 28672])
def test_every_warp_has_whole_loads_that_fit_its_registers(width: int) -> None:
    parts = router._parts(width)
    workers = router._workers(width // parts)
    chunks, rest = divmod(width // parts, 32 * workers)
    assert width % parts == 0 and rest == 0 and 1 <= chunks <= router.MOST_CHUNKS


@pytest.mark.parametrize("width", [8, 100, 57344, 32 * 449])
def test_a_width_that_cannot_be_cut_is_refused(width: int) -> None:
    assert router._parts(width) == 0


@pytest.fixture
def box() -> Iterator[Mailbox]:
    with workspace.owned():
        yield mailbox(workspace.current(CPU))


def test_a_publication_is_taken_once(box: Mailbox) -> None:
    """A second reader of the words would wait for ever: the first one's second kernel clears them."""
    x, source = torch.zeros(1, 4), Source(torch.zeros(4), torch.ones(4), 1e-5)
    made = box.publish(x, source)
    assert made.number > 0 and made.source is source
    assert box.take(made, x) is made and box.take(made, x) is None and box.take(None, x) is None


def test_only_the_latest_launch_may_be_read_while_it_runs(box: Mailbox) -> None:
    """A later launch has overwritten the words of an earlier one."""
    x, y = torch.zeros(1, 4), torch.zeros(1, 4)
    first, second = box.publish(x), box.publish(y)
    assert first.number != second.number
    assert box.take(first, x) is None and box.take(second, y) is second and box.take(first, x) is None


def test_the_experts_read_the_x_and_the_mailbox_that_were_published(box: Mailbox) -> None:
    x = torch.zeros(1, 4)
    made = box.publish(x)
    with pytest.raises(AssertionError, match="for another x"):
        box.take(made, x.clone())
    with workspace.owned(), pytest.raises(AssertionError, match="on another stream"):
        mailbox(workspace.current(CPU)).take(made, x)
    assert box.take(made, x) is made and mailbox(workspace.current(CPU)) is box


def test_launch_numbers_begin_again_before_they_outgrow_a_word(box: Mailbox) -> None:
    box._launches = MAX_NUMBER - 1
    x = torch.zeros(1, 4)
    assert [box.publish(x).number for _ in range(2)] == [MAX_NUMBER, 1]
