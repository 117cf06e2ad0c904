"""How the router's launch is cut, and whose choice it announces: no GPU needed."""

import weakref

import pytest
import torch

from perilune.ops import router


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
    first, second = torch.zeros(1, 8), torch.zeros(1, 8)
    monkeypatch.setattr(router, "_latest", {7: (weakref.ref(first), 3)})
    assert router.announced(first, 7) == 3
    assert router.announced(second, 7) == router.announced(first, 8) == router.announced(first.clone(), 7) == 0
    router._latest[7] = weakref.ref(second), 4
    assert router.announced(first, 7) == 0 and router.announced(second, 7) == 4
