"""How the router's launch is cut, and whose choice it announces: no GPU needed."""

import pytest
import torch

from perilune.ops.moe import router


@pytest.mark.parametrize("width", [32, 64, 96, 512, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 16384, 28672])
def test_every_warp_has_whole_loads_that_fit_its_registers(width: int) -> None:
    parts = router._parts(width)
    workers = router._workers(width // parts)
    chunks, rest = divmod(width // parts, 32 * workers)
    assert width % parts == 0 and rest == 0 and 1 <= chunks <= router.MOST_CHUNKS


@pytest.mark.parametrize("width", [8, 100, 57344, 32 * 449])
def test_a_width_that_cannot_be_cut_is_refused(width: int) -> None:
    assert router._parts(width) == 0


def test_only_the_latest_launch_of_a_stream_announces_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_latest", {})
    x, first, second, nobody = torch.zeros(1, 4), torch.zeros(1, 8), torch.zeros(1, 8), router.Announced()
    source = router.Source(torch.zeros(4), torch.ones(4), 1e-5)
    number = router.announce(x, first, 7, source)
    assert number > 0 and router.announced(x, first, 7) == router.Announced(number, source)
    assert router.announced(x, second, 7) == router.announced(x, first, 8) == nobody
    assert router.announced(x, first.clone(), 7) == router.announced(x.clone(), first, 7) == nobody
    other = router.announce(x, second, 7)
    assert other != number and router.announced(x, second, 7) == router.Announced(other)
    assert router.announced(x, first, 7) == nobody
