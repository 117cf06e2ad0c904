"""Ops and their implementations: which one runs is decided here, once per device, types and sizes.

An op file makes one `Op` and decorates its implementations; their order in the file is the order of preference, and
the op's reference, always runnable, comes last under the name "reference". The decision for a call is cached under
what the op says decides it (shapes and types of arguments, and single values), so that a call costs one dictionary
lookup beyond the call itself. The implementation that is decided on and logged is the one that runs: none hands a call
on to another one of its op, so what it cannot take must be among that.
"""

import contextlib
import importlib
import inspect
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from perilune.core.errors import ConfigError
from perilune.ops.harness.case import Tol

log = logging.getLogger("perilune.ops")

REFERENCE = "reference"
MAX_DECISIONS = 4096  # per op; a decision is cheap to make again

When = Callable[[Any, torch.device], bool | str]

_ops: dict[str, "Op"] = {}
_overrides: ContextVar[Mapping[str, str] | None] = ContextVar("perilune_op_overrides", default=None)
_overriding = 0  # contexts that override anything, in all threads: while there is none, calls need not ask for theirs
_counting = threading.Lock()


@dataclass(frozen=True)
class Impl:
    """One way to compute an op. `when(args, device)` is True, or the reason why it cannot run there.

    `args` has the call's arguments as attributes. `when` may look at the types and shapes of the op's deciding
    arguments, at what is in its `also` and at this machine, at nothing else: its answer is cached under those. `alone`:
    its kernel needs the GPU for itself, see `alone` below.
    """

    name: str
    when: When
    run: Callable[..., Any]
    alone: bool = False

    def refusal(self, args: Any, device: torch.device) -> str | None:
        answer = self.when(args, device)
        assert answer is True or isinstance(answer, str), f"{self.name}: when() must give True or a reason"
        return None if answer is True else str(answer)


class Op:
    """An operation with its contract: cases, tolerances, inputs, cost, and the reference that defines it.

    `decides` are the positions of at most two arguments whose shape and type choose the implementation; the first
    one also gives the device and the size. `also` has expressions of further arguments, by their names, whose values
    do: "top_k", "w.shape". `cost(case, dtype)` counts what the op must do at least.
    """

    def __init__(
        self,
        name: str,
        cases: Sequence[Any],
        tol: Mapping[str, Mapping[torch.dtype, Tol]],
        inputs: Callable[..., dict[str, Any]],
        cost: Callable[..., Any],
        reference: Callable[..., Any],
        *,
        decides: tuple[int, ...] = (0,),
        also: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    ) -> None:
        assert name not in _ops, f"op {name} exists twice"
        assert len(decides) in (1, 2), decides
        self.name = name
        self.cases = cases
        self.tol = tol
        self.inputs = inputs
        self.cost = cost
        self.reference = reference
        self.dtypes = dtypes
        self.parameters = tuple(inspect.signature(reference).parameters)
        self.impls: dict[str, Impl] = {}
        self._key = _key(self.parameters, decides, also)
        self._decides = decides
        self._decisions: dict[Any, Callable[..., Any]] = {}
        self._logged: dict[Any, str] = {}
        _ops[name] = self

    def impl(self, name: str, *, when: When = lambda args, device: True, alone: bool = False) -> Callable[[Any], Any]:
        assert name != REFERENCE and name not in self.impls, name

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            assert tuple(inspect.signature(run).parameters) == self.parameters, f"{self.name}/{name}: other parameters"
            self.impls[name] = Impl(name, when, run, alone)
            return run

        return register

    @property
    def candidates(self) -> tuple[Impl, ...]:
        """All implementations in order of preference, the reference last."""
        return (*self.impls.values(), Impl(REFERENCE, lambda args, device: True, self.reference))

    def __call__(self, *args: Any) -> Any:
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

    def explain(self, args: Sequence[Any]) -> tuple[Impl | None, dict[str, str]]:
        """(the implementation these arguments get, why each one tried before it refused)."""
        device = args[self._decides[0]].device
        named = SimpleNamespace(**dict(zip(self.parameters, args)))
        refused: dict[str, str] = {}
        for candidate in self.candidates:
            reason = candidate.refusal(named, device)
            if reason is None:
                return candidate, refused
            refused[candidate.name] = reason
        return None, refused

    def refusal(self, name: str, args: Sequence[Any]) -> str | None:
        """Why implementation `name` cannot take these arguments; None if it can."""
        named = SimpleNamespace(**dict(zip(self.parameters, args)))
        (candidate,) = (c for c in self.candidates if c.name == name)
        return candidate.refusal(named, args[self._decides[0]].device)

    def _decide(self, key: Any, args: Sequence[Any], wanted: str | None) -> Callable[..., Any]:
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
        if len(self._decisions) >= MAX_DECISIONS:
            self._decisions.clear()
            self._logged.clear()
        self._decisions[key] = chosen.run
        return chosen.run

    def _log_once(self, args: Sequence[Any], name: str, refused: dict[str, str], wanted: str | None) -> None:
        lead = args[self._decides[0]]
        size = lead.shape[0].bit_length()
        kind = (lead.device, size, *(args[i].dtype for i in self._decides), wanted)
        if self._logged.get(kind) == name:
            return
        self._logged[kind] = name
        types = ", ".join(str(args[i].dtype).removeprefix("torch.") for i in self._decides)
        why = "".join(f"; {other} refused: {reason}" for other, reason in refused.items())
        asked = " (asked for)" if wanted else ""
        log.info("%s on %s, %s, size < %d: %s%s%s", self.name, lead.device, types, 1 << size, name, asked, why)


def _key(parameters: Sequence[str], decides: Sequence[int], also: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """What decides a call, of its arguments. Compiled: a loop would take longer than all the rest of a call.

    The device is its index, -1 for the CPU, which is made and compared in less time than a torch.device.
    """
    parts = [f"a[{decides[0]}].get_device()", *(f"a[{i}].shape, a[{i}].dtype" for i in decides)]
    for expression in also:
        name, *rest = expression.split(".")
        parts.append(".".join([f"a[{parameters.index(name)}]", *rest]))
    key: Callable[[Sequence[Any]], Any] = eval(f"lambda a: ({', '.join(parts)})")
    return key


def all_ops() -> dict[str, Op]:
    """Every op of this package by name; an op exists when its file does."""
    for module in pkgutil.walk_packages([str(Path(__file__).parents[1])], "perilune.ops."):
        importlib.import_module(module.name)
    return dict(sorted(_ops.items()))


def alone() -> dict[str, str]:
    """{op: implementation} without any whose CTAs wait for each other, all of which must be on the GPU at once: two
    such kernels of two streams could each have a part of it, for ever."""
    return {
        name: next(impl.name for impl in op.candidates if not impl.alone)
        for name, op in all_ops().items()
        if any(impl.alone for impl in op.impls.values())
    }


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
    """Within it, in this thread, ops named in {op: implementation} run as told; names as in `check_overrides`."""
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
