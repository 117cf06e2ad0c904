"""Every op against its reference on its small cases; the registry; what single ops promise beyond their values."""

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from perilune.cli.ops import command
from perilune.core import cost as costs
from perilune.core.errors import ConfigError
from perilune.ops.attention.mla_absorbed import mla_absorbed
from perilune.ops.attention.write_cache import write_cache
from perilune.ops.harness import build, check, registry, timing
from perilune.ops.harness.case import FLOAT32, NANO, Make, Sized, Tol, exact
from perilune.ops.layouts.operands import Latents, Matrix, Routing, Span
from perilune.ops.linear.linear import linear
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import experts
from perilune.ops.moe.experts_int4 import dequantize, experts_int4
from perilune.ops.moe.router import router
from perilune.ops.pointwise.rmsnorm import rmsnorm
from perilune.ops.sampling.sample import sample, weights

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
OPS = registry.all_ops()
GRID = [(name, case, dtype) for name, op in OPS.items() for case in check.cases(op, CPU) for dtype in op.dtypes]


def make(seed: int = 0, dtype: torch.dtype = FLOAT32) -> Make:
    return Make(dtype, CPU, seed)


@pytest.mark.parametrize(("name", "case", "dtype"), GRID, ids=[f"{n}-{c}-{check.short(d)}" for n, c, d in GRID])
def test_implementations_agree_with_the_reference(name: str, case: Any, dtype: torch.dtype) -> None:
    for verdict in check.check(OPS[name], case, dtype, CPU):
        assert verdict.failed is None, f"{verdict.impl}: {verdict.failed}"


def test_every_op_is_registered_under_its_file() -> None:
    files = {p.stem for p in Path(registry.__file__).parents[1].rglob("*.py")}
    assert set(OPS) <= files
    assert {
        "rmsnorm",
        "add_rmsnorm",
        "embed",
        "linear",
        "linear_int4",
        "rope",
        "write_cache",
        "per_head_matmul",
    } <= set(OPS)
    assert {"mla_absorbed", "mla_prefill", "router", "experts", "experts_int4", "swiglu"} <= set(OPS)
    assert {"sample", "argmax", "logprobs", "embed_norm"} <= set(OPS)


# --- the checks themselves can fail


def test_difference_sees_each_kind_of_error() -> None:
    want = torch.tensor([1.0, 2.0, float("nan")])
    tol = Tol(0.0, 1e-3, 1e-2, "test")
    assert check.difference(want.clone(), want, tol) is None
    assert check.difference(torch.tensor([1.0, 2.001, float("nan")]), want, tol) is None
    assert "instead of (3,)" in (check.difference(want[:2], want, tol) or "")
    assert "float16" in (check.difference(want.half(), want, tol) or "")
    assert "nan at 2" in (check.difference(torch.tensor([1.0, float("nan"), float("nan")]), want, tol) or "")
    assert "inf at 1" in (check.difference(torch.tensor([1.0, float("inf"), float("nan")]), want, tol) or "")
    assert "2.5 instead of 2" in (check.difference(torch.tensor([1.0, 2.5, float("nan")]), want, tol) or "")
    tight = Tol(0.0, 1e-1, 1e-6, "test")
    assert "distance" in (check.difference(torch.tensor([1.0, 2.01, float("nan")]), want, tight) or "")
    assert "1 of 2 differ" in (check.difference(torch.tensor([1, 3]), torch.tensor([1, 2]), tol) or "")


class Doubling(Sized):
    def __repr__(self) -> str:
        return "Doubling()"


@pytest.fixture
def doubling() -> Iterator[registry.Op[..., Any]]:
    """An op y = 2 x made for one test."""

    def reference(x: Tensor) -> Tensor:
        return x + x

    op = registry.Op(
        "doubling",
        [Doubling()],
        {"y": exact()},
        lambda c, g: {"x": g.randn(5)},
        lambda c, dtype: costs.Cost(5, 40),
        reference,
        dtypes=(FLOAT32,),
    )
    yield op
    del registry._ops["doubling"]


def outcomes(op: registry.Op[..., Any]) -> dict[str, check.Outcome]:
    return {v.impl: v for case in op.cases for v in check.check(op, case, FLOAT32, CPU)}


def test_check_reports_wrong_values_written_inputs_and_unrepeatable_results(doubling: registry.Op[..., Any]) -> None:
    calls = 0

    @doubling.impl("right")
    def right(x: Tensor) -> Tensor:
        return 2 * x

    @doubling.impl("wrong")
    def wrong(x: Tensor) -> Tensor:
        return 3 * x

    @doubling.impl("scribbles")
    def scribbles(x: Tensor) -> Tensor:
        y = 2 * x
        x.zero_()
        return y

    @doubling.impl("drifts")
    def drifts(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * x if calls == 1 else 2.5 * x

    @doubling.impl("elsewhere", when=lambda a, device: "another machine")
    def elsewhere(x: Tensor) -> Tensor:
        raise AssertionError("must not run")

    found = outcomes(doubling)
    assert found["right"].failed is None and found["right"].refused is None
    assert "instead of" in (found["wrong"].failed or "")
    assert found["scribbles"].failed == "the input x was written to"
    assert "other bits" in (found["drifts"].failed or "")
    assert found["elsewhere"].refused == "another machine"


# --- the registry


def test_first_runnable_is_chosen_once_and_logged(
    doubling: registry.Op[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def never(a: Any, device: torch.device) -> bool | str:
        nonlocal asked
        asked += 1
        return "not today"

    @doubling.impl("refusing", when=never)
    def refusing(x: Tensor) -> Tensor:
        raise AssertionError("must not run")

    @doubling.impl("small", when=lambda a, device: a.x.shape[0] < 4 or "at most 3")
    def small(x: Tensor) -> Tensor:
        return 2 * x + 100

    with caplog.at_level(logging.INFO, "perilune.ops"):
        assert doubling(torch.ones(3)).tolist() == [102.0] * 3
        assert doubling(torch.ones(3)).tolist() == [102.0] * 3
        assert doubling(torch.ones(5)).tolist() == [2.0] * 5
    assert asked == 2
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [
        "doubling on cpu, float32, size < 4: small; refusing refused: not today",
        "doubling on cpu, float32, size < 8: reference; refusing refused: not today; small refused: at most 3",
    ]


def test_override_holds_inside_its_context_and_thread(doubling: registry.Op[..., Any]) -> None:
    @doubling.impl("fast")
    def fast(x: Tensor) -> Tensor:
        return 2 * x + 100

    x = torch.ones(1)
    assert doubling(x).item() == 102
    with registry.using({"doubling": "reference"}):
        assert doubling(x).item() == 2
        with registry.using({}):
            assert doubling(x).item() == 102
        assert doubling(x).item() == 2
    assert doubling(x).item() == 102

    barrier, seen = threading.Barrier(2), {}

    def work(name: str) -> None:
        with registry.using({"doubling": name}):
            for _ in range(50):
                barrier.wait(60)
                seen.setdefault(name, set()).add(doubling(x).item())

    threads = [threading.Thread(target=work, args=(name,)) for name in ("reference", "fast")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert seen == {"reference": {2.0}, "fast": {102.0}}
    assert registry._overriding == 0


def test_what_is_not_measured_runs_only_where_it_is_named(doubling: registry.Op[..., Any]) -> None:
    @doubling.impl("new", when=lambda a, device: len(a.x) < 3 or "needs few", unmeasured=True)
    def new(x: Tensor) -> Tensor:
        return 2 * x + 100

    for size, reason in ((1, "no measured row yet: choose it by `ops`"), (4, "needs few")):
        chosen, refused = doubling.explain([torch.ones(size)])
        assert chosen is not None and chosen.name == "reference" and refused == {"new": reason}
        assert doubling(torch.ones(size))[0] == 2
    with registry.using({"doubling": "new"}):
        assert doubling(torch.ones(1))[0] == 102
        with pytest.raises(ConfigError, match="cannot run as 'new' here: needs few"):
            doubling(torch.ones(4))
    with registry.trying(["doubling/new"]):
        assert doubling(torch.ones(1))[0] == 102 and doubling(torch.ones(4))[0] == 2
    assert doubling(torch.ones(1))[0] == 2
    with (
        pytest.raises(ConfigError, match="no unmeasured implementation 'doubling/no'; "),
        registry.trying(["doubling/no"]),
    ):
        pass
    assert outcomes(doubling)["new"].refused == "needs few"
    assert doubling.refusal("new", [torch.ones(1)]) is None


def test_overrides_are_checked() -> None:
    registry.check_overrides({"rmsnorm": "reference", "sample": "torch"})
    with pytest.raises(ConfigError, match=r"unknown op 'rmsnrm'; known: accept_drafts, .*rmsnorm"):
        registry.check_overrides({"rmsnrm": "torch"})
    with pytest.raises(ConfigError, match=r"op rmsnorm has no implementation 'cpu'; known: cpp, cuda, torch"):
        registry.check_overrides({"rmsnorm": "cpu"})


def test_an_override_that_cannot_run_says_why() -> None:
    with (
        registry.using({"rmsnorm": "cpp"}),
        pytest.raises(ConfigError, match=r"op rmsnorm cannot run as 'cpp' here: needs a width that is a multiple of 8"),
    ):
        rmsnorm(torch.ones(2, 7), torch.ones(7), 1e-6)


def test_nothing_runnable_lists_every_reason(doubling: registry.Op[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @doubling.impl("one", when=lambda a, device: "no such chip")
    def one(x: Tensor) -> Tensor:
        return x

    # The reference always runs; take it away to reach the error.
    no_reference = registry.Impl("reference", lambda a, device: "taken away", one)
    candidates = (doubling.impls["one"], no_reference)
    monkeypatch.setattr(registry.Op, "candidates", property(lambda self: candidates))
    with pytest.raises(ConfigError, match="one: no such chip; reference: taken away"):
        doubling(torch.ones(2))


def test_deciding_arguments_are_named_and_seen_by_their_kinds() -> None:
    """A tensor by shape and dtype, a record by its `kind`, a number by itself; other arguments are not looked at."""

    def reference(x: Tensor, w: Matrix, norm: Tensor | None, k: int, other: Tensor, latents: Latents | None) -> Tensor:
        return x

    decides = ("x", "w", "norm", "k", "latents")
    op = registry.Op("deciding", [], {"y": exact()}, lambda c, g: {}, lambda c, d: None, reference, decides=decides)
    del registry._ops["deciding"]
    x, w, latents = torch.ones(2, 3), Matrix(torch.ones(4, 3)), Latents(torch.ones(2, 4, 8), torch.zeros(2))
    args: tuple[Any, ...] = (x, w, None, 3, torch.ones(1), latents)
    same = [
        args,
        (torch.zeros(2, 3), Matrix(torch.zeros(4, 3)), None, 3, torch.ones(7), Latents(latents.pages, torch.zeros(9))),
    ]
    others = [
        (torch.ones(3, 3), *args[1:]),
        (x.double(), *args[1:]),
        (x, Matrix(torch.ones(4, 3), torch.ones(4)), *args[2:]),
        (*args[:2], torch.ones(3), *args[3:]),
        (*args[:3], 4, *args[4:]),
        (*args[:5], None),
    ]
    assert len({op._key(a) for a in same}) == 1
    assert len({op._key(a) for a in (args, *others)}) == 1 + len(others)
    with pytest.raises(ValueError, match=r"tuple\.index"):
        registry.Op("wrong", [], {}, lambda c, g: {}, lambda c, d: None, reference, decides=("x", "weight"))


def test_decisions_are_bounded(doubling: registry.Op[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_DECISIONS", 4)
    for n in range(20):
        assert doubling(torch.ones(n)).shape == (n,)
        assert len(doubling._decisions) <= 4


# --- compiling


def test_without_a_compiler_the_reason_is_given_and_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build.library("rmsnorm") == "no compiler for C++ (install g++)"
    op = OPS["rmsnorm"]
    chosen, refused = op.explain([torch.ones(1, 8), torch.ones(8), 1e-6])
    assert chosen is not None and chosen.name == "torch"
    assert refused == {"cpp": "no compiler for C++ (install g++)", "cuda": "for CUDA"}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@needs_compiler
def test_libraries_are_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "ops"
    (sources / "room" / "cpu").mkdir(parents=True)
    source = sources / "room" / "cpu" / "answer.cpp"
    source.write_text('extern "C" int answer() { return 41; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    built = tmp_path / "cache" / "perilune" / "ops"

    def answer() -> Any:
        monkeypatch.setattr(build, "_loaded", {})  # as a new process would begin
        return build.function("answer", "answer", "")()

    assert answer() == 41
    assert built.stat().st_mode & 0o777 == 0o700
    (first,) = built.glob("answer-*.so")
    stamp = first.stat().st_mtime_ns
    assert answer() == 41 and first.stat().st_mtime_ns == stamp
    source.write_text('extern "C" int answer() { return 42; }')
    assert answer() == 42
    kept = {first.name, *(p.name for p in built.glob("answer-*.so")), build.TURN_PREFIX + source.name}
    assert {p.name for p in built.iterdir()} == kept and len(kept) == 3  # both libraries and a lock
    source.write_text("this is not C++")
    monkeypatch.setattr(build, "_loaded", {})
    reason = build.library("answer")
    assert isinstance(reason, str) and reason.startswith("answer.cpp does not compile here: ") and "\n" not in reason
    assert {p.name for p in built.iterdir()} == kept


@needs_compiler
def test_a_cache_that_others_can_write_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "perilune" / "ops"
    assert build.cache_directory("ops") == ours
    ours.chmod(0o777)
    assert build.cache_directory("ops") != ours


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user id without an entry
    assert build.cache_directory("ops").is_dir()


@needs_compiler
def test_old_libraries_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "KEPT_PER_SOURCE", 2)
    for i in range(4):
        for stem in ("linear", "linear_fp8"):
            path = tmp_path / f"{stem}-{i:024x}.so"
            path.touch()
            os.utime(path, (i, i))
    build._prune(tmp_path, "linear")
    kept = sorted(p.name for p in tmp_path.glob("linear-*"))
    assert kept == [f"linear-{i:024x}.so" for i in (2, 3)]
    assert len(list(tmp_path.glob("linear_fp8-*"))) == 4  # another source's


# --- what ops promise beyond their values


def int4_experts(g: Make) -> tuple[Matrix, Matrix]:
    E, D, I = NANO.experts, NANO.hidden, NANO.width  # noqa: E741
    return Matrix(*g.int4(E, 2 * I, D)), Matrix(*g.int4(E, D, I))


@needs_compiler
def test_int4_experts_do_not_depend_on_batch_or_threads_and_equal_dense_ones() -> None:
    g = make()
    weights = int4_experts(g)
    x = g.randn(40, NANO.hidden)
    ids, shares = g.rand(40, NANO.experts).topk(4)[1].int(), g.rand(40, 4)
    whole = experts_int4(x, Chosen(ids, shares), *weights)
    torch.set_num_threads(2)
    assert torch.equal(experts_int4(x, Chosen(ids, shares), *weights), whole)
    torch.set_num_threads(1)
    for rows in (slice(0, 1), slice(7, 9), slice(11, 40)):
        assert torch.equal(experts_int4(x[rows], Chosen(ids[rows], shares[rows]), *weights), whole[rows])
    gate_up, down = (Matrix(dequantize(w, FLOAT32)) for w in weights)
    assert torch.equal(experts(x, Chosen(ids, shares), gate_up, down), whole)


@needs_compiler
def test_attention_does_not_depend_on_the_batch() -> None:
    case = OPS["mla_absorbed"].cases[8]  # 16 requests of unlike lengths
    assert case.counts == (1,) * 16
    args = OPS["mla_absorbed"].inputs(case, make())
    whole = mla_absorbed(*args.values())
    for b in (0, 9, 15):
        rows = slice(b, b + 1)
        span, start = args["span"], torch.tensor([0, 1], dtype=torch.int32)
        own = Span(span.tables[rows], start, span.context[rows])
        alone = mla_absorbed(args["q_lat"][rows], args["q_pe"][rows], args["pages"], own, args["scale"])
        assert torch.equal(alone, whole[rows])


@needs_compiler
def test_wrong_indices_are_refused_before_memory_is_touched() -> None:
    g = make()
    x, shares = g.randn(1, NANO.hidden), torch.ones(1, 1)
    for bad in (-1, NANO.experts):
        with pytest.raises(AssertionError, match="no expert"):
            experts_int4(x, Chosen(torch.tensor([[bad]], dtype=torch.int32), shares), *int4_experts(g))
    cache = torch.zeros(2, 4, 16)
    for bad in (-1, 8):
        with pytest.raises(AssertionError, match="outside the cache"):
            write_cache(Latents(cache, torch.tensor([0, bad])), torch.ones(2, 8), torch.ones(2, 8))
    assert not cache.any()
    q, start = torch.ones(1, 2, 8), torch.tensor([0, 1], dtype=torch.int32)
    for block, context, message in ((2, 3, "outside the cache"), (0, 5, "disagree"), (0, 0, "disagree")):
        span = Span(torch.tensor([[block]], dtype=torch.int32), start, torch.tensor([context], dtype=torch.int32))
        with pytest.raises(AssertionError, match=message):
            mla_absorbed(q, q, cache, span, 1.0)


def test_nan_stays_in_its_row() -> None:
    g = make()
    x = g.randn(4, NANO.hidden)
    x[2] = float("nan")
    w = g.randn(64, NANO.hidden)
    chosen = router(x, g.randn(16, NANO.hidden), torch.zeros(16), Routing(4, 1, 1, 2.5, True))
    assert ((chosen.ids >= 0) & (chosen.ids < 16)).all()
    for y in (linear(x, w), chosen.weights, experts_int4(x, chosen, *int4_experts(g))):
        assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("impl", [c.name for c in OPS["router"].candidates])
def test_router_keeps_to_its_groups(impl: str) -> None:
    """Two groups of four: the best single expert is in the group whose best two sum to less, so it is not chosen."""
    choice = torch.tensor([[0.90, 0.05, 0.05, 0.05, 0.60, 0.59, 0.58, 0.05]])
    gate, bias = torch.zeros(8, 8), choice[0] - 0.5  # sigmoid(0) = 0.5
    args = (torch.zeros(1, 8), gate, bias, Routing(2, 2, 1, 3.0, True))
    if reason := OPS["router"].refusal(impl, args):
        pytest.skip(reason)
    with registry.using({"router": impl}):
        chosen = router(*args)
    assert chosen.ids.tolist() == [[4, 5]]
    torch.testing.assert_close(chosen.weights, torch.tensor([[1.5, 1.5]]))  # the bias does not weigh


SAMPLERS = [c.name for c in OPS["sample"].candidates]


def draw(impl: str, logits: Tensor, u: Tensor, **settings: float) -> Tensor:
    R = logits.shape[0]
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    rows = [torch.full((R,), given[k], dtype=torch.int32 if k == "top_k" else FLOAT32) for k in given]
    if reason := OPS["sample"].refusal(impl, (logits, *rows, u)):
        pytest.skip(reason)
    with registry.using({"sample": impl}):
        return sample(logits, *rows, u)


@pytest.mark.parametrize("impl", SAMPLERS)
def test_sample_does_not_depend_on_batch_mates(impl: str) -> None:
    """Row by row, in another order and with other mates: the same tokens."""
    op = OPS["sample"]
    case = next(c for c in op.cases if c.rows == 64 and c.mode == "mixed" and not c.big)
    args = list(op.inputs(case, make(5)).values())
    if reason := op.refusal(impl, args):
        pytest.skip(reason)
    with registry.using({"sample": impl}):
        whole = sample(*args)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
        assert torch.equal(sample(*(a[order] for a in args)), whole[order])
        alone = torch.cat([sample(*(a[r : r + 1] for a in args)) for r in range(64)])
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("impl", SAMPLERS[:-1])
@pytest.mark.parametrize(
    ("settings", "support"),
    [
        ({}, 6),
        ({"temperature": 0.5}, 6),
        ({"top_k": 3}, 3),
        ({"top_p": 0.7}, 2),
        ({"min_p": 0.2}, 4),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.05}, 4),
    ],
)
def test_sample_follows_the_distribution(impl: str, settings: dict[str, float], support: int) -> None:
    p = torch.tensor([0.02, 0.41, 0.03, 0.30, 0.15, 0.09])
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64) + make(2).rand(n, dtype=torch.float64)) / n  # stratified: little noise
    ids = draw(impl, p.log().expand(n, 6).contiguous(), u, **settings)
    kept = p ** (1 / settings.get("temperature", 1.0))
    kept[p.argsort(descending=True)[support:]] = 0
    expected = kept / kept.sum() * n
    counts = torch.bincount(ids, minlength=6).double()
    assert (counts[expected == 0] == 0).all()
    # Stratified draws miss an expected count by at most one at either end of a token's interval.
    assert (counts - expected).abs().max() <= 2.0, (counts, expected)


@pytest.mark.parametrize("impl", SAMPLERS)
def test_sample_at_its_edges(impl: str) -> None:
    inf, nan = float("inf"), float("nan")
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    flat = torch.zeros(2, 9)
    assert draw(impl, flat, u).tolist() == [0, 8]
    assert draw(impl, flat, u, top_k=3).tolist() == [0, 2]  # of equals the lower ids stay
    assert draw(impl, flat, u, top_p=1e-6).tolist() == [0, 0]
    masked = torch.tensor([[-inf, -inf, 1.0, -inf, 5.0, -inf]] * 2)
    assert draw(impl, masked, u).tolist() == [2, 4]
    assert draw(impl, masked, u, temperature=1e-40).tolist() == [4, 4]
    assert draw(impl, masked, u, temperature=0.0).tolist() == [4, 4]
    assert draw(impl, torch.tensor([[3.0, 7.0, 7.0]] * 2), u, temperature=0.0).tolist() == [1, 1]
    for broken in ([nan, 1.0, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf]):
        assert draw(impl, torch.tensor([broken] * 2), u, top_p=0.9).tolist() == [-1, -1]


def test_weights_are_the_exponential() -> None:
    z = -make(3).rand(100_000) * 28
    exact_weights = z.double().exp() * 2**36
    error = (weights(z).double() - exact_weights).abs()
    assert (error <= 3e-7 * exact_weights + 1).all()
    assert weights(torch.tensor([0.0, -28.0])).tolist() == [2**36, 0]


def test_samplers_agree_to_the_last_token() -> None:
    """Thousands of neighbours of like weight: one bit in one weight would move a draw now and then."""
    g = make(11)
    R, V = 64, 5000
    logits = g.randn(R, V, scale=0.02)
    rows = [torch.full((R,), 0.7), g.integers(0, V, R, dtype=torch.int32), g.rand(R).clamp_min(0.1), torch.zeros(R)]
    args = [logits, *rows, g.rand(R, dtype=torch.float64)]
    drawn = [impl.run(*args) for impl in OPS["sample"].candidates if OPS["sample"].refusal(impl.name, args) is None]
    assert len(drawn) >= 2 and all(torch.equal(ids, drawn[0]) for ids in drawn)


# --- costs and the command


def test_costs_count_what_a_case_needs() -> None:
    assert costs.linear(3, 8, 16, 2) == costs.Cost(2 * 3 * 8 * 16, 2 * (8 * 16 + 3 * 24))
    assert costs.attended(3, 5) == 3 + 4 + 5
    assert costs.expected_experts(1, 8, 384) == pytest.approx(8)
    assert 1 - costs.expected_experts(10_000, 8, 384) / 384 < 1e-9
    assert costs.mla_absorbed([1], [100], 64, 512, 64, 2).flops == 2 * 100 * 64 * 1088
    assert costs.linear_int4(0, 64, 64, 4).bytes == 64 * 64 // 2 + 64 * 2 * 2  # nibbles and bf16 scales
    assert costs.Cost(100, 10).seconds(10, 10) == 10 and costs.Cost(1, 50).seconds(10, 10) == 5


def test_command_lists_checks_and_times(monkeypatch: pytest.MonkeyPatch, doubling: registry.Op[..., Any]) -> None:
    monkeypatch.setattr(timing, "measure_roof", lambda device, dtype: timing.Roof(1e10, 1e11))
    monkeypatch.setattr(timing, "ROUND_SECONDS", 1e-5)

    @doubling.impl("odd", when=lambda a, device: "not here")
    def odd(x: Tensor) -> Tensor:
        return 3 * x

    run = CliRunner()
    listed = run.invoke(command, ["--device", "cpu"])
    assert listed.exit_code == 0 and "experts_int4" in listed.output
    assert "odd: not here" in next(line for line in listed.output.splitlines() if line.startswith("doubling"))
    timed = run.invoke(command, ["swiglu", "--device", "cpu", "--case", "T=1, I=256", "--dtype", "float32"])
    assert timed.exit_code == 0 and "checks passed, 0 failed" in timed.output and "x reference" in timed.output
    assert "% roof" in timed.output
    del doubling.impls["odd"]
    doubling.impl("odd")(odd)
    failed = run.invoke(command, ["doubling", "--check-only", "--device", "cpu"])
    assert failed.exit_code == 1 and "FAILED odd float32 Doubling()" in failed.output
    document = run.invoke(command, ["doubling", "--json", "--device", "cpu"])
    assert document.exit_code == 1 and '"failed": "y: ' in document.output
    unknown = run.invoke(command, ["swigluu"])
    assert isinstance(unknown.exception, ConfigError) and "unknown op 'swigluu'" in str(unknown.exception)
    nothing = run.invoke(command, ["swiglu", "--case", "T=77777"])
    assert isinstance(nothing.exception, ConfigError) and "no case" in str(nothing.exception)
