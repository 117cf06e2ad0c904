"""The implementation that an op chooses and logs is the one that runs; what has to be said when a GPU's cannot."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError
from perilune.engine.engine import Engine
from perilune.ops.exchange.peers import Peers, loopback
from perilune.ops.harness import build, check, registry
from perilune.ops.harness.case import FLOAT32, Make, Sized, exact
from perilune.ops.layouts.operands import Gate, Matrix, Norm, Routing
from tests import ran
from tests.cpu.ops.test_ops import CPU, OPS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", OPS)
def test_what_ran_is_what_was_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    op, seen = OPS[name], set()
    for case in check.cases(op, CPU):
        for dtype in op.dtypes:
            args = list(op.inputs(case, Make(dtype, CPU, check.SEED)).values())
            able = tuple(impl.name for impl in op.candidates if op.refusal(impl.name, args) is None)
            kind = dtype, able, tuple(arg is None for arg in args)
            if kind not in seen:
                seen.add(kind)
                ran.what_ran_is_what_was_logged(op, case, dtype, CPU, caplog)


def test_no_implementation_names_another() -> None:
    """Past the registry, that is; also those for GPUs, which cannot run here. References are made of references."""
    by_code = ran.implementations()
    assert len(by_code) > 100
    found = [
        f"{op.name}/{impl.name} names {sorted(by_code[other.__code__])}"
        for op in OPS.values()
        for impl in op.impls.values()
        for other in ran.named_in(impl.run)
        if other.__code__ in by_code
    ]
    assert found == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, None),
        ({"q_full": (2, 64, 576)}, "one token"),
        ({"q_full": (1, 4, 576)}, "8, 16, 32, 64 heads"),
        ({"pages": (8, 8, 576)}, "cache blocks of a multiple of 16"),
        ({"pages": (8, 64, 576, FLOAT32)}, "a bfloat16 or packed cache"),
        ({"q_full": (1, 64, 576, FLOAT32)}, "bfloat16"),
        ({"gate": (384, 7168, FLOAT32)}, "a bfloat16 gate"),
        ({"gate": (520, 7168)}, "at most 512 experts"),
        ({"routing": (40, 1, 1)}, "at most 32 choices"),
        ({"routing": (8, 8, 4)}, "one choice among all experts"),
        ({"peers": loopback(4, CPU)}, None),
        ({"peers": Peers(0, 4, torch.stack)}, "memory that all ranks can write to"),
        ({"peers": loopback(3, CPU)}, "1, 2, 4 or 8 ranks"),
    ],
)
def test_one_tokens_kernels_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], reason: str | None
) -> None:
    """As on a Hopper GPU, which is not here: what those kernels do not take they refuse before they are chosen."""
    monkeypatch.setattr(build, "is_hopper", lambda device: True)
    monkeypatch.setattr(build, "library", lambda source: object())
    monkeypatch.setattr("perilune.ops.harness.build.sm_count", lambda device: 132)
    sizes = {"q_full": (1, 64, 576), "pages": (8, 64, 576), "gate": (384, 7168), "routing": (8, 1, 1)} | other
    sizes.setdefault("peers", None)

    def made(size: Any) -> Any:
        whole = [n for n in size if isinstance(n, int)]
        return torch.empty(whole, dtype=size[-1] if len(whole) < len(size) else torch.bfloat16, device="meta")

    weights = SimpleNamespace(o=Matrix(made((7168, 8192))), uv_fp8=None)
    gate = Gate(made(sizes["gate"]), torch.empty(sizes["gate"][0]), Routing(*sizes["routing"], 1.0, True))
    norm = Norm(torch.empty(7168, device="meta"), 1e-5, sizes["peers"])
    q_full, pages = made(sizes["q_full"]), made(sizes["pages"])
    a = SimpleNamespace(weights=weights, attention=weights, q_full=q_full, pages=pages, gate=gate, norm=norm)
    want = True if reason is None else f"needs {reason}"
    assert OPS["mla_decode_router"].impls["cuda"].when(a, torch.device("cuda")) == want
    own = {"gate", "routing", "peers"} & other.keys()
    assert OPS["mla_decode_output"].impls["cuda"].when(a, torch.device("cuda")) == (True if own else want)


@pytest.mark.parametrize(
    ("tokens", "heads", "fp8", "other", "output", "router"),
    [
        (1, 8, True, {}, "cuda_mma", "cuda_mma"),
        (1, 16, True, {}, "cuda_mma", "cuda_mma"),
        (4, 16, True, {}, "cuda_mma", "composed"),
        (5, 16, True, {}, "composed", "composed"),
        (1, 8, False, {}, "cuda", "cuda"),
        (1, 16, False, {}, "cuda", "cuda"),
        (4, 16, False, {}, "composed", "composed"),
        (1, 32, True, {}, "cuda", "cuda"),
        (1, 64, True, {}, "cuda", "cuda"),
        (1, 4, True, {}, "composed", "composed"),
        (1, 16, True, {"processors": 114}, "composed", "composed"),  # 6,272 columns at most
        (1, 16, True, {"processors": 114, "D": 6144}, "cuda_mma", "cuda_mma"),
        (1, 8, True, {"processors": 16}, "composed", "composed"),
        (1, 8, True, {"latent": 96}, "composed", "composed"),
    ],
)
def test_heads_and_weights_choose_the_kernel_after_attention(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int, fp8: bool, other: dict[str, int], output: str, router: str
) -> None:
    monkeypatch.setattr(build, "is_hopper", lambda device: True)
    monkeypatch.setattr(build, "library", lambda source: object())
    monkeypatch.setattr("perilune.ops.harness.build.sm_count", lambda device: other.get("processors", 132))
    D, latent = other.get("D", 7168), other.get("latent", 576)
    o = torch.empty(D, heads * 128, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device="meta")
    weights = SimpleNamespace(o=Matrix(o), uv_fp8=Matrix(o) if fp8 else None)
    a = SimpleNamespace(
        q_full=torch.empty(tokens, heads, latent, dtype=torch.bfloat16, device="meta"),
        pages=torch.empty(8, 64, latent, dtype=torch.bfloat16, device="meta"),
        weights=weights,
        attention=weights,
        norm=Norm(torch.empty(D, device="meta"), 1e-5),
        gate=Gate(
            torch.empty(384, D, dtype=torch.bfloat16, device="meta"), torch.empty(384), Routing(8, 1, 1, 1.0, True)
        ),
    )
    for name, want in (("mla_decode_output", output), ("mla_decode_router", router)):
        taking = [
            i.name for i in OPS[name].candidates if not i.unmeasured and i.refusal(a, torch.device("cuda")) is None
        ]
        assert taking[0] == want and len({"cuda", "cuda_mma"} & set(taking)) <= 1, f"{name}: {taking}"


@pytest.mark.parametrize("name", OPS)
def test_what_decides_decides(name: str) -> None:
    ran.what_decides_decides(OPS[name], CPU)


@pytest.mark.parametrize("wanted", [None, "composed", "reference"])
def test_what_a_call_would_run_can_be_asked_for(wanted: str | None) -> None:
    op = OPS["moe_int4"]
    case = next(c for c in op.cases if c.T == 3)
    args = [*op.inputs(case, Make(FLOAT32, CPU, 1)).values()]
    with registry.using({} if wanted is None else {"moe_int4": wanted}):
        run, (usual, _) = op.choice(*args), op.explain(args)
    assert usual is not None
    assert [impl.name for impl in op.candidates if impl.run is run] == [wanted or usual.name]


def test_an_unmeasured_implementation_runs_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ops", {})

    def reference(x: Tensor) -> Tensor:
        return x + 1

    tol = {"y": exact()}
    op = registry.Op(
        "plus_one", [Sized()], tol, lambda c, g: {"x": g.randn(1)}, lambda c, t: costs.Cost(1, 8), reference
    )

    @op.impl("new", unmeasured=True)
    def new(x: Tensor) -> Tensor:
        return x + 2

    @op.impl("old", alone=True)
    def old(x: Tensor) -> Tensor:
        return x + 1

    x = torch.zeros(1)
    usual, refused = op.explain([x])
    assert usual is not None and (usual.name, refused) == ("old", {"new": registry.UNMEASURED})
    assert op(x).item() == 1 and op.refusal("new", [x]) is None
    with registry.using({"plus_one": "new"}):
        assert op(x).item() == 2
    (outcome,) = check.check(op, op.cases[0], FLOAT32, CPU, ["new"])
    assert outcome.refused is None and outcome.failed, "a check that names it runs it"
    monkeypatch.setattr(registry, "all_ops", lambda: {"plus_one": op})
    assert registry.alone() == {"plus_one": "reference"}


def test_no_nvcc_on_a_hopper_gpu_is_one_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_nvcc", lambda: None)
    build._warn_without_nvcc.cache_clear()
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, "perilune.ops"):
        monkeypatch.setattr(build, "is_hopper", lambda device: False)
        build.check_nvcc(device)
        assert build.on_hopper("linear.cu", device) == "for Hopper GPUs (sm_90)" and not caplog.records
        monkeypatch.setattr(build, "is_hopper", lambda device: True)
        for source in ("linear.cu", "rmsnorm.cu"):
            assert build.on_hopper(source, device) == "no compiler for CUDA (install nvcc)"
        build.check_nvcc(device)
        build.check_nvcc(torch.device("cuda", 1))
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and "\n" not in warning.getMessage()
    assert "install the CUDA toolkit" in warning.getMessage() and "PATH" in warning.getMessage()
    build._warn_without_nvcc.cache_clear()


def test_an_engine_asks_for_nvcc_when_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(build, "check_nvcc", asked.append)
    with pytest.raises(CheckpointError):
        Engine(tmp_path, EngineConfig(device="cpu"))
    assert asked == [CPU]
