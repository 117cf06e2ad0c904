"""Ops and their implementations: chooses which implementation runs, once per device and kind of arguments.

An op file makes one `Op` and decorates its implementations. Their order in the file is the order of preference; the
reference, which runs everywhere, comes last under the name "reference". The choice for a call is cached under the kinds
of the op's deciding arguments (shape and dtype of a tensor, `kind` of a record, a number itself), so a call costs one
dictionary lookup more than its implementation. What was chosen and logged is what runs: no implementation may call
another one of its op, so it can refuse a call only by its deciding arguments, in `when`.
"""

import contextlib
import importlib
import inspect
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.ops.harness.case import Tol

log = logging.getLogger("perilune.ops")

REFERENCE = "reference"
UNMEASURED = "no measured row yet: choose it by `ops`"
MAX_DECISIONS = 4096  # cached choices per op. Fewer: a choice is made again, which is cheap.

P = ParamSpec("P")
R = TypeVar("R")
When = Callable[[Any, torch.device], bool | str]

_ops: dict[str, "Op[..., Any]"] = {}
_overrides: ContextVar[Mapping[str, str] | None] = ContextVar("perilune_op_overrides", default=None)
_overriding = 0  # active `using` contexts in all threads; at 0 a call does not read its context variable
_counting = threading.Lock()


@dataclass(frozen=True)
class Impl:
    """One implementation of an op. `when(args, device)` is True, or the reason why it cannot run there.

    `args` has all of the call's arguments as attributes. The result of `when` is cached under the kinds of the op's
    deciding arguments, so it may depend only on these and on this machine. `alone`: only one engine per GPU may use the
    kernel, see `alone` below. `waits`: CUDA sources of its kernels in which CTAs wait for other CTAs, of the same
    launch or of the one before. `unmeasured`: it has not been timed on the hardware that it is for, and runs only if
    the setting `ops` names it.
    """

    name: str
    when: When
    run: Callable[..., Any]
    alone: bool = False
    waits: tuple[str, ...] = ()
    unmeasured: bool = False

    def refusal(self, args: Any, device: torch.device) -> str | None:
        answer = self.when(args, device)
        assert answer is True or isinstance(answer, str), f"{self.name}: when() must give True or a reason"
        return None if answer is True else str(answer)


class Op(Generic[P, R]):
    """An operation with its contract: cases, tolerances, inputs, cost, and the reference that defines it.

    `decides` names the arguments that choose the implementation: a tensor by shape and dtype, a record by its
    `kind`, a number by itself. The first one (default: the first parameter) is a tensor and gives device and size.
    `tol` has the outputs in order; an output with the name of an argument ("residual", or "latents.pages" for a field
    of a record) is written in place. `cost(case, dtype)`: least FLOPs and bytes of the op. Arguments are positional.
    """

    def __init__(
        self,
        name: str,
        cases: Sequence[Any],
        tol: Mapping[str, Mapping[torch.dtype, Tol]],
        inputs: Callable[..., dict[str, Any]],
        cost: Callable[..., Any],
        reference: Callable[P, R],
        *,
        decides: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    ) -> None:
        assert name not in _ops, f"op {name} exists twice"
        self.name = name
        self.cases = cases
        self.tol = tol
        self.inputs = inputs
        self.cost = cost
        self.reference = reference
        self.dtypes = dtypes
        types = {p.name: p.annotation for p in inspect.signature(reference).parameters.values()}
        self.parameters = tuple(types)
        self.impls: dict[str, Impl] = {}
        self._deciding = tuple(self.parameters.index(name) for name in decides or self.parameters[:1])
        self._key = _key([(i, types[self.parameters[i]]) for i in self._deciding])
        self._decisions: dict[Any, Callable[P, R]] = {}
        self._logged: dict[Any, str] = {}
        _ops[name] = self

    def impl(
        self,
        name: str,
        *,
        when: When = lambda args, device: True,
        alone: bool = False,
        waits: tuple[str, ...] = (),
        unmeasured: bool = False,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        assert name != REFERENCE and name not in self.impls, name

        def register(run: Callable[P, R]) -> Callable[P, R]:
            assert tuple(inspect.signature(run).parameters) == self.parameters, f"{self.name}/{name}: other parameters"
            self.impls[name] = Impl(name, when, run, alone, waits, unmeasured)
            return run

        return register

    @property
    def candidates(self) -> tuple[Impl, ...]:
        """All implementations in order of preference, the reference last."""
        return (*self.impls.values(), Impl(REFERENCE, lambda args, device: True, self.reference))

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:  # positional arguments only: passing on empty keyword arguments makes a call a third slower

        def __call__(self, *args):
            overrides = _overrides.get() if _overriding else None
            key = self._key(args)
            if overrides is not None and (name := overrides.get(self.name)) is not None:
                key = (name, key)
                run = self._decisions.get(key)
                if run is None:
                    run = self._decide(key, args, name)
                return run(*args)
            run = self._decisions.get(key)
            if run is None:
                run = self._decide(key, args, None)
            return run(*args)

    def choice(self, *args: Any) -> Callable[P, R]:
        """The implementation that a call with these arguments runs, chosen and logged as by a call."""
        name = (_overrides.get() or {}).get(self.name)
        key = self._key(args) if name is None else (name, self._key(args))
        return self._decisions.get(key) or self._decide(key, args, name)

    def explain(self, args: Sequence[Any]) -> tuple[Impl | None, dict[str, str]]:
        """(the implementation that these arguments get, the reason of each one that refused before it)."""
        named, device = self._named(args)
        refused: dict[str, str] = {}
        for candidate in self.candidates:
            reason = candidate.refusal(named, device)
            if reason is None and candidate.unmeasured:
                reason = UNMEASURED
            if reason is None:
                return candidate, refused
            refused[candidate.name] = reason
        return None, refused

    def refusal(self, name: str, args: Sequence[Any]) -> str | None:
        """Why implementation `name` cannot take these arguments; None if it can."""
        (candidate,) = (c for c in self.candidates if c.name == name)
        return candidate.refusal(*self._named(args))

    def _named(self, args: Sequence[Any]) -> tuple[SimpleNamespace, torch.device]:
        return SimpleNamespace(**dict(zip(self.parameters, args))), args[self._deciding[0]].device

    def forget(self) -> None:
        """Drops cached choices: the next calls choose anew."""
        self._decisions = {}

    def _decide(self, key: Any, args: Sequence[Any], wanted: str | None) -> Callable[P, R]:
        decisions = self._decisions  # this dict, even if another thread calls `forget` meanwhile and replaces it
        if wanted is None:
            chosen, refused = self.explain(args)
            if chosen is None:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
                raise ConfigError(f"no implementation of op {self.name} runs here: {reasons}")
        else:
            reason = self.refusal(wanted, args)
            if reason is not None:
                raise ConfigError(f"op {self.name} cannot run as {wanted!r} here: {reason}")
            (chosen,) = (c for c in self.candidates if c.name == wanted)
            refused = {}
        self._log_once(args, chosen.name, refused, wanted)
        if len(decisions) >= MAX_DECISIONS:
            decisions.clear()
            self._logged.clear()
        decisions[key] = chosen.run
        return chosen.run

    def _log_once(self, args: Sequence[Any], name: str, refused: dict[str, str], wanted: str | None) -> None:
        lead = args[self._deciding[0]]
        size = lead.shape[0].bit_length()
        types = ", ".join(filter(None, (_type(args[i]) for i in self._deciding)))
        line = (lead.device, size, types, wanted)
        if self._logged.get(line) == name:
            return
        self._logged[line] = name
        why = "".join(f"; {other} refused: {reason}" for other, reason in refused.items())
        asked = " (asked for)" if wanted else ""
        log.info("%s on %s, %s, size < %d: %s%s%s", self.name, lead.device, types, 1 << size, name, asked, why)


def forget() -> None:
    """Drops the cached choices of all ops: implementations that could not run before may run now."""
    for op in list(_ops.values()):
        op.forget()


def _key(deciding: Sequence[tuple[int, Any]]) -> Callable[[Sequence[Any]], Any]:
    """Compiles the function from a call's arguments to the key under which its choice is cached. deciding: (position,
    annotated type) of the deciding arguments. A loop over them would take longer than the rest of a call.

    The device is its index, -1 for the CPU: an int is made and compared in less time than a torch.device.
    """
    parts = [f"a[{deciding[0][0]}].get_device()"]
    for i, annotation in deciding:
        types = get_args(annotation) or (annotation,)
        if annotation is Tensor:
            part = f"a[{i}].shape, a[{i}].dtype"
        elif Tensor in types:
            part = f"None if a[{i}] is None else (a[{i}].shape, a[{i}].dtype)"
        elif annotation in (bool, int):
            part = f"a[{i}]"
        else:  # a record of layouts/operands.py
            part = f"a[{i}].kind" if len(types) == 1 else f"a[{i}] and a[{i}].kind"
        parts.append(part)
    key: Callable[[Sequence[Any]], Any] = eval(f"lambda a: ({', '.join(parts)})")
    return key


def _type(argument: Any) -> str:
    """The dtype of a tensor or of a record's first tensor, as text; "" for anything else."""
    if is_dataclass(argument):
        return _type(getattr(argument, fields(argument)[0].name))
    return str(argument.dtype).removeprefix("torch.") if isinstance(argument, Tensor) else ""


def all_ops() -> dict[str, Op[..., Any]]:
    """Every op of this package by name: imports every file of perilune/ops."""
    for module in pkgutil.walk_packages([str(Path(__file__).parents[1])], "perilune.ops."):
        importlib.import_module(module.name)
    return dict(sorted(_ops.items()))


def alone() -> dict[str, str]:
    """{op: implementation}: replacements for implementations in which CTAs wait for each other, so that all must be
    resident at once: two such kernels on two streams could each occupy a part of the SMs and deadlock."""
    return {
        name: next(impl.name for impl in op.candidates if not impl.alone and not impl.unmeasured)
        for name, op in all_ops().items()
        if any(impl.alone for impl in op.impls.values())
    }


def waiting() -> dict[str, list[str]]:
    """{CUDA source: ["op/implementation", ...]} of every kernel in which CTAs wait for other CTAs. All of its CTAs must
    be able to become resident: beside it only copies and kernels that end by themselves may run."""
    found: dict[str, list[str]] = {}
    for op in all_ops().values():
        for impl in op.impls.values():
            for source in impl.waits:
                found.setdefault(source, []).append(f"{op.name}/{impl.name}")
    return found


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Raise ConfigError if an op or an implementation named in {op: implementation} does not exist."""
    if not overrides:
        return
    ops = all_ops()
    for name, wanted in overrides.items():
        if name not in ops:
            raise ConfigError(f"ops: unknown op {name!r}; known: {', '.join(ops)}")
        known = [c.name for c in ops[name].candidates]
        if wanted not in known:
            raise ConfigError(f"ops: op {name} has no implementation {wanted!r}; known: {', '.join(known)}")


@contextlib.contextmanager
def using(overrides: Mapping[str, str]) -> Iterator[None]:
    """In this context, ops named in {op: implementation} run as that implementation; names as in `check_overrides`."""
    global _overriding
    token = _overrides.set(dict(overrides) or None)
    with _counting:
        _overriding += bool(overrides)
    try:
        yield
    finally:
        with _counting:
            _overriding -= bool(overrides)
        _overrides.reset(token)


@contextlib.contextmanager
def trying(names: Sequence[str]) -> Iterator[None]:
    """In this context, the unmeasured implementations `names` ("op/implementation") are chosen wherever they fit and
    none before them does, on all threads: to time them. ConfigError if one is unknown or not unmeasured."""
    known = {f"{op.name}/{i.name}": op for op in all_ops().values() for i in op.impls.values() if i.unmeasured}
    if absent := [name for name in names if name not in known]:
        raise ConfigError(f"no unmeasured implementation {absent[0]!r}; there are: {', '.join(known) or 'none'}")
    before = [(known[name], name.partition("/")[2], known[name].impls[name.partition("/")[2]]) for name in names]
    try:
        for op, name, impl in before:
            op.impls[name] = replace(impl, unmeasured=False)
        forget()
        yield
    finally:
        for op, name, impl in before:
            op.impls[name] = impl
        forget()
