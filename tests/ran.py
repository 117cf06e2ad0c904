"""Which implementations of ops a call runs, by their code, against what the registry logged."""

import dis
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch

from perilune.ops.harness import check, registry
from perilune.ops.harness.case import Make, clone
from perilune.ops.harness.registry import REFERENCE, Op

_LOGGED = re.compile(r"(\w+) on [^ ]+, .*size < \d+: (\w+)")


@cache
def implementations() -> dict[CodeType, set[tuple[str, str]]]:
    """(op, implementation) by code; several where ops share a function."""
    found: dict[CodeType, set[tuple[str, str]]] = {}
    for op in registry.all_ops().values():
        for impl in op.candidates:
            found.setdefault(impl.run.__code__, set()).add((op.name, impl.name))
    return found


def named_in(function: FunctionType) -> Iterator[FunctionType]:
    """Functions of ops that a function calls by name, itself or through others of them: also on branches not taken."""
    todo, seen = [function], {function.__code__}
    while todo:
        f = todo.pop()
        held: Any = None
        for code in (f.__code__, *(c for c in f.__code__.co_consts if isinstance(c, CodeType))):
            for step in dis.get_instructions(code):
                if step.opname == "LOAD_GLOBAL":
                    held = f.__globals__.get(step.argval)
                else:
                    held = getattr(held, step.argval, None) if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
                found = getattr(held, "__wrapped__", held)
                if not isinstance(found, FunctionType) or found.__code__ in seen:
                    continue
                if found.__module__.startswith("perilune.ops.") and found.__module__ != registry.__name__:
                    seen.add(found.__code__)
                    todo.append(found)
                    yield found


class Trace:
    """Runs of implementations within `watch`.

    chosen   {op: names that ran because the registry called them}; an entry is all names that share the function
    unasked  "op/name within op/name" of those called past the registry, by an implementation that is no reference
    """

    def __init__(self) -> None:
        self.chosen: dict[str, set[frozenset[str]]] = {}
        self.unasked: list[str] = []
        self._codes = implementations()
        self._running: list[tuple[CodeType, bool]] = []  # whether it is a reference

    def watch(self, call: Callable[..., Any], *args: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            call(*args)
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        mine = self._codes.get(frame.f_code)
        if mine is None or event not in ("call", "return"):
            return
        if event == "return":
            self._running.pop()
            return
        caller = frame.f_back
        if caller is not None and caller.f_code is Op.__call__.__code__:
            op = caller.f_locals["self"].name
            self.chosen.setdefault(op, set()).add(frozenset(name for of, name in mine if of == op))
        elif not (self._running and self._running[-1][1] and any(name == REFERENCE for _, name in mine)):
            within = sorted(self._codes[self._running[-1][0]]) if self._running else "no implementation"
            self.unasked.append(f"{sorted(mine)} within {within}")
        self._running.append((frame.f_code, all(name == REFERENCE for _, name in mine)))


def what_ran_is_what_was_logged(
    op: Op, case: Any, dtype: torch.dtype, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Asserts that the logged implementation runs: the one chosen for a case, and each other that is called by name."""
    args = list(op.inputs(case, Make(dtype, device, check.SEED)).values())
    able = [c.name for c in op.candidates if op.refusal(c.name, args) is None]
    if case.big:
        able.remove(REFERENCE)  # seconds each, and it has nothing to choose
    others = list(registry.all_ops().values())
    for name in (None, *able):
        for other in others:
            other._decisions.clear()
            other._logged.clear()
        own = list(clone({str(i): a for i, a in enumerate(args)}).values())
        trace = Trace()
        caplog.clear()
        with caplog.at_level(logging.INFO, "perilune.ops"), registry.using({} if name is None else {op.name: name}):
            trace.watch(op, *own)
        logged: dict[str, set[str]] = {}
        for record in caplog.records:
            if found := _LOGGED.match(record.getMessage()):
                logged.setdefault(found[1], set()).add(found[2])
        assert not trace.unasked, f"{op.name}/{name or 'chosen'}: {trace.unasked}"
        assert trace.chosen.keys() == logged.keys() and op.name in logged, f"{trace.chosen} {logged}"
        for each, said in logged.items():
            ran = trace.chosen[each]
            assert all(names & said for names in ran) and said <= set().union(*ran), f"{each}: {ran} ran, {said} logged"
        if name is not None:
            assert logged[op.name] == {name}


def what_decides_decides(op: Op, device: torch.device) -> None:
    """Asserts that cases among which `Op.__call__` sees no difference get the same implementation."""
    chosen: dict[Any, str] = {}
    for case in check.cases(op, device):
        for dtype in op.dtypes:
            args = list(op.inputs(case, Make(dtype, device, check.SEED)).values())
            impl, _ = op.explain(args)
            assert impl is not None and chosen.setdefault(op._key(args), impl.name) == impl.name, f"{case} {dtype}"
