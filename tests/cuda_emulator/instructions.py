"""PTX instructions as calls of the emulator's functions (include/emulator.h).

Each entry: a pattern of the whole opcode, and a function of (match, operands) that gives C++. An operand is the C++
text of a register or a number; `Address` and `Group` are operands in brackets and braces.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """[base], [base + offset], or [base, {coordinates}] of a tensor copy."""

    base: str
    coordinates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """{a, b, ...}"""

    parts: tuple[str, ...]


Operand = str | Address | Group
Emit = Callable[[re.Match[str], list[Operand]], str]

TYPES = {"b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t"}
TYPES |= {"b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float"}
TYPES |= {"b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double", "pred": "bool"}
SPECIAL = {
    "%globaltimer": "emu::clock_ns()",
    "%cluster_ctarank": "emu::cluster_rank()",
    "%cluster_nctarank": "emu::cluster_size()",
    "%smid": "emu::sm()",
    "%laneid": "static_cast<uint32_t>(emu::view->lane)",
}


def _text(operand: Operand) -> str:
    assert isinstance(operand, str), operand
    return operand


def _base(operand: Operand) -> str:
    assert isinstance(operand, Address), operand
    return operand.base


def _place(operand: Operand, space: str, size: int) -> str:
    """C++ of the operand's host pointer; `size` bytes are checked in shared memory."""
    base = _base(operand)
    if space.startswith("shared"):
        return f"emu::from_shared(static_cast<uint32_t>({base}), {size}, {str(space != 'shared::cluster').lower()})"
    return f"reinterpret_cast<void*>(static_cast<uint64_t>({base}))"


def _load(m: re.Match[str], o: list[Operand]) -> str:
    kind = TYPES[m["type"]]
    size = int(re.sub(r"\D", "", m["type"])) // 8
    targets = o[0].parts if isinstance(o[0], Group) else (_text(o[0]),)
    waits = "emu::poll(); " if re.search(r"\.(relaxed|acquire|volatile)", m[0]) else ""
    lines = [f"auto* at = static_cast<uint8_t*>({_place(o[1], m['space'] or 'global', size * len(targets))});"]
    if len(targets) > 1:
        lines.append(f'if (reinterpret_cast<uintptr_t>(at) % {size * len(targets)}) emu::fail("a misaligned load");')
    lines += [f"emu::set({t}, emu::load<{kind}>(at + {i * size}));" for i, t in enumerate(targets)]
    return waits + "{ " + " ".join(lines) + " }"


def _store(m: re.Match[str], o: list[Operand]) -> str:
    kind = TYPES[m["type"]]
    size = int(re.sub(r"\D", "", m["type"])) // 8
    values = o[1].parts if isinstance(o[1], Group) else (_text(o[1]),)
    lines = [f"auto* at = static_cast<uint8_t*>({_place(o[0], m['space'] or 'global', size * len(values))});"]
    if len(values) > 1:
        lines.append(f'if (reinterpret_cast<uintptr_t>(at) % {size * len(values)}) emu::fail("a misaligned store");')
    lines += [f"emu::store<{kind}>(at + {i * size}, emu::as<{kind}>({v}));" for i, v in enumerate(values)]
    return "{ " + " ".join(lines) + " emu::happened(); }"


def _st_async(m: re.Match[str], o: list[Operand]) -> str:
    kind = TYPES[m["type"]]
    values = o[1].parts if isinstance(o[1], Group) else (_text(o[1]),)
    held = ", ".join(f"emu::as<{kind}>({v})" for v in values)
    return f"{{ const {kind} v[] = {{{held}}}; emu::st_async({_base(o[0])}, v, sizeof v, {_base(o[2])}); }}"


def _mma(m: re.Match[str], o: list[Operand]) -> str:
    kind = {"bf16": "BF16", "f16": "F16", "e4m3": "E4M3", "e5m2": "E5M2", "s8": "S8"}[m["type"]]
    d, a, b, c = (g.parts for g in o if isinstance(g, Group))
    return (
        f"{{ const uint32_t a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}}; const float c[] = {{{', '.join(c)}}};"
        f" emu::mma(emu::{kind}, {m['k']}, {', '.join(d)}, a, b, c); }}"
    )


def _mma_bytes(m: re.Match[str], o: list[Operand]) -> str:
    """By the product of floats, which have the sum of 32 products of bytes exactly; c is added as int32."""
    d, a, b, c = (g.parts for g in o if isinstance(g, Group))
    sums = " ".join(f"{x} = {y} + static_cast<int>(d[{i}]);" for i, (x, y) in enumerate(zip(d, c)))
    return (
        f"{{ const uint32_t a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}}; float d[4]; const float c[4] = {{}};"
        f" emu::mma(emu::S8, 32, d[0], d[1], d[2], d[3], a, b, c); {sums} }}"
    )


def _matrix_load(m: re.Match[str], o: list[Operand]) -> str:
    parts = o[0].parts if isinstance(o[0], Group) else (_text(o[0]),)
    count = int(m["count"])
    moves = " ".join(f"{p} = v[{i}];" for i, p in enumerate(parts))
    return f"{{ uint32_t v[4]; emu::ldmatrix(v, {count}, {_flag(m['trans'])}, {_base(o[1])}); {moves} }}"


def _matrix_store(m: re.Match[str], o: list[Operand]) -> str:
    parts = o[1].parts if isinstance(o[1], Group) else (_text(o[1]),)
    held = ", ".join(parts)
    return f"{{ const uint32_t v[] = {{{held}}}; emu::stmatrix(v, {m['count']}, {_flag(m['trans'])}, {_base(o[0])}); }}"


def _flag(found: object) -> str:
    return "true" if found else "false"


def _wgmma(m: re.Match[str], o: list[Operand]) -> str:
    kind = {"bf16": "BF16", "f16": "F16", "e4m3": "E4M3", "e5m2": "E5M2", "s8": "S8"}[m["type"]]
    assert isinstance(o[0], Group)
    d = o[0].parts
    in_registers = isinstance(o[1], Group)
    flags = [_text(x) for x in o[3:]]
    add, negate_a, negate_b = flags[0], flags[1:2] == ["-1"], flags[2:3] == ["-1"]  # integer wgmma has neither
    rest = flags[3:]
    a_transposed = not in_registers and len(rest) == 2 and rest[0] != "0"
    b_transposed = bool(rest) and rest[-1] != "0"
    fields = [f"emu::{kind}", m["n"], m["k"], _flag(not in_registers), f"static_cast<bool>({add})"]
    fields += [_flag(negate_a), _flag(negate_b), _flag(a_transposed), _flag(b_transposed)]
    a = (
        f"const uint32_t a[] = {{{', '.join(o[1].parts)}}};"
        if isinstance(o[1], Group)
        else "const uint32_t* a = nullptr;"
    )
    descriptor = "0" if in_registers else _text(o[1])
    first, last = (f"reinterpret_cast<float*>(&{x})" for x in (d[0], d[-1]))
    return f"{{ {a} emu::wgmma({{{', '.join(fields)}}}, {first}, {last}, a, {descriptor}, {_text(o[2])}); }}"


def _tensor(m: re.Match[str], o: list[Operand]) -> str:
    map_ = o[1]
    assert isinstance(map_, Address)
    mask = _text(o[3]) if m["multicast"] else "0"
    at = ", ".join(f"static_cast<int>({c})" for c in map_.coordinates)
    return (
        f"{{ const int at[] = {{{at}}}; emu::tensor_load({_base(o[0])}, reinterpret_cast<const void*>({map_.base}), at,"
        f" {m['dims']}, {_base(o[2])}, {mask}); }}"
    )


def _tensor_store(m: re.Match[str], o: list[Operand]) -> str:
    map_ = o[0]
    assert isinstance(map_, Address)
    at = ", ".join(f"static_cast<int>({c})" for c in map_.coordinates)
    return (
        f"{{ const int at[] = {{{at}}}; emu::tensor_store(reinterpret_cast<const void*>({map_.base}), at,"
        f" {m['dims']}, {_base(o[1])}); }}"
    )


def _cp_async(m: re.Match[str], o: list[Operand]) -> str:
    rest = [_text(x) for x in o[2:]]
    if m["hint"]:
        rest = rest[:-1]  # the cache policy
    size = rest[0]
    valid = rest[1] if len(rest) > 1 else size
    return f"emu::cp_async({_base(o[0])}, reinterpret_cast<const void*>({_base(o[1])}), {size}, {valid});"


def _arrive(m: re.Match[str], o: list[Operand]) -> str:
    at = next(i for i, x in enumerate(o) if isinstance(x, Address))
    rest = [_text(x) for x in o[at + 1 :]]
    if m["expect"]:
        return f"emu::mbarrier_arrive({_base(o[at])}, 1, {rest[0]});"
    return f"emu::mbarrier_arrive({_base(o[at])}, {rest[0] if rest else '1'}, 0);"


def _mov(m: re.Match[str], o: list[Operand]) -> str:
    if isinstance(o[0], Group):  # unpack
        size = 32 // len(o[0].parts) if m["type"].endswith("32") else 64 // len(o[0].parts)
        parts = " ".join(
            f"emu::set({p}, static_cast<uint{size}_t>(v >> {i * size}));" for i, p in enumerate(o[0].parts)
        )
        return f"{{ const uint64_t v = {_text(o[1])}; {parts} }}"
    if isinstance(o[1], Group):
        size = 32 // len(o[1].parts) if m["type"].endswith("32") else 64 // len(o[1].parts)
        packed = " | ".join(
            f"static_cast<uint64_t>(emu::as<uint{size}_t>({p})) << {i * size}" for i, p in enumerate(o[1].parts)
        )
        return f"emu::set({o[0]}, {packed});"
    return f"emu::set({o[0]}, {SPECIAL.get(_text(o[1]), _text(o[1]))});"


def _bar(m: re.Match[str], o: list[Operand]) -> str:
    threads = _text(o[1]) if len(o) > 1 else "-1"
    return f"emu::bar_{m['what']}({_text(o[0])}, {threads});"


def _arithmetic(expression: str) -> Emit:
    return lambda m, o: f"{_text(o[0])} = {expression.format(*[_text(x) for x in o])};"


def _nothing(m: re.Match[str], o: list[Operand]) -> str:
    return ";"


SCOPE = r"(\.(relaxed|acquire|release|volatile|weak))?(\.(cta|cluster|gpu|sys))?"
SPACE = r"(\.(?P<space>global|shared::cluster|shared::cta|shared))?"
CACHE = r"(\.nc)?(\.L1::\w+)?(\.L2::(cache_hint|\d+B|evict_\w+))*"
HINT = r"(?P<hint>\.L2::cache_hint)?"
BULK = r"cp\.async\.bulk\.shared::cluster\.global(\.tile)?\.mbarrier::complete_tx::bytes"

TABLE: list[tuple[str, Emit]] = [
    (r"griddepcontrol\.wait", lambda m, o: "emu::wait_for_predecessor();"),
    (r"griddepcontrol\.launch_dependents", lambda m, o: "emu::launch_dependents();"),
    (rf"cp\.async\.(ca|cg)\.shared(::cta)?\.global{HINT}(\.L2::\d+B)?", _cp_async),
    (r"cp\.async\.commit_group", lambda m, o: "emu::cp_async_commit();"),
    (r"cp\.async\.wait_group", lambda m, o: f"emu::cp_async_wait({_text(o[0])});"),
    (r"cp\.async\.wait_all", lambda m, o: "emu::cp_async_wait(-1);"),
    (
        r"cp\.async\.mbarrier\.arrive(\.noinc)(\.shared(::cta)?)?\.b64",
        lambda m, o: f"emu::cp_async_arrive({_base(o[0])}, false);",
    ),
    (rf"ld{SCOPE}{SPACE}{CACHE}(\.v[248])?\.(?P<type>\w+)", _load),
    (rf"st{SCOPE}{SPACE}{CACHE}(\.v[248])?\.(?P<type>\w+)", _store),
    (r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.(?P<type>\w+)", _st_async),
    (r"mma\.sync\.aligned\.m16n8k(?P<k>16|32)\.row\.col\.f32\.(?P<type>\w+)\.\w+\.f32", _mma),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32", _mma_bytes),
    (r"lop3\.b32", lambda m, o: f"{_text(o[0])} = emu::lop3({', '.join(map(_text, o[1:]))});"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16", _matrix_load),
    (r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16", _matrix_store),
    (r"mbarrier\.init(\.shared(::cta)?)?\.b64", lambda m, o: f"emu::mbarrier_init({_base(o[0])}, {_text(o[1])});"),
    (r"mbarrier\.inval(\.shared(::cta)?)?\.b64", _nothing),
    (
        r"mbarrier\.arrive(?P<expect>\.expect_tx)?(\.(release|relaxed))?(\.(cta|cluster))?(\.shared(::(cta|cluster))?)?\.b64",
        _arrive,
    ),
    (
        r"mbarrier\.expect_tx(\.relaxed)?(\.(cta|cluster))?(\.shared(::(cta|cluster))?)?\.b64",
        lambda m, o: f"emu::mbarrier_expect({_base(o[0])}, {_text(o[1])});",
    ),
    (
        r"mbarrier\.try_wait\.parity(\.(acquire|relaxed))?(\.(cta|cluster))?(\.shared(::cta)?)?\.b64",
        lambda m, o: f"{_text(o[0])} = emu::mbarrier_wait({_base(o[1])}, {_text(o[2])});",
    ),
    (
        r"mbarrier\.test_wait\.parity(\.(acquire|relaxed))?(\.(cta|cluster))?(\.shared(::cta)?)?\.b64",
        lambda m, o: f"{_text(o[0])} = emu::mbarrier_test({_base(o[1])}, {_text(o[2])});",
    ),
    (r"(fence|membar|prefetch|prefetchu|applypriority|discard)\..*", _nothing),
    (r"cp\.async\.bulk\.prefetch\..*", _nothing),
    (r"setmaxnreg\..*", _nothing),
    (r"mapa(\.shared::cluster)?\.u32", lambda m, o: f"{_text(o[0])} = emu::mapa({_text(o[1])}, {_text(o[2])});"),
    (
        r"elect\.sync",
        lambda m, o: f"{o[0].parts[1] if isinstance(o[0], Group) else _text(o[0])} = emu::elect({_text(o[1])});",
    ),
    (r"selp\.\w+", _arithmetic("{3} ? {1} : {2}")),
    (r"setp\.ne\.\w+", _arithmetic("({1}) != ({2})")),
    (r"setp\.eq\.\w+", _arithmetic("({1}) == ({2})")),
    (r"mov\.(?P<type>\w+)", _mov),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32", _arithmetic("emu::e4m3x2({1}, {2})")),
    (r"cvt\.rn\.f16x2\.e4m3x2", _arithmetic("emu::f16x2_of_e4m3x2({1})")),
    (r"mul(\.rn)?\.bf16x2", _arithmetic("emu::mul_bf16x2({1}, {2})")),
    (r"fma\.rn\.bf16x2", _arithmetic("emu::fma_bf16x2({1}, {2}, {3})")),
    (r"add(\.rn)?\.f32", _arithmetic("({1}) + ({2})")),
    (r"ex2\.approx(\.ftz)?\.f32", _arithmetic("exp2f({1})")),
    (r"lg2\.approx(\.ftz)?\.f32", _arithmetic("log2f({1})")),
    (r"rcp\.approx(\.ftz)?\.f32", _arithmetic("1.0f / ({1})")),
    (r"tanh\.approx\.f32", _arithmetic("tanhf({1})")),
    (r"(bar|barrier)(\.cta)?\.(?P<what>sync|arrive)(\.aligned)?", _bar),
    (r"barrier\.cluster\.arrive(\.(release|relaxed))?(\.aligned)?", lambda m, o: "emu::cluster_arrive();"),
    (r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?", lambda m, o: "emu::cluster_wait();"),
    (
        rf"{BULK}(?P<multicast>\.multicast::cluster)?(\.L2::cache_hint)?",
        lambda m, o: (
            f"emu::bulk_load({_base(o[0])}, reinterpret_cast<const void*>({_base(o[1])}), {_text(o[2])}, {_base(o[3])},"
            f" {_text(o[4]) if m['multicast'] else '0'});"
        ),
    ),
    (
        r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes",
        lambda m, o: f"emu::bulk_share({_base(o[0])}, {_base(o[1])}, {_text(o[2])}, {_base(o[3])});",
    ),
    (
        r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?",
        lambda m, o: f"emu::bulk_store(reinterpret_cast<void*>({_base(o[0])}), {_base(o[1])}, {_text(o[2])});",
    ),
    (r"cp\.async\.bulk\.commit_group", lambda m, o: "emu::bulk_commit();"),
    (
        r"cp\.async\.bulk\.wait_group(?P<read>\.read)?",
        lambda m, o: f"emu::bulk_wait({_text(o[0])}, {_flag(m['read'])});",
    ),
    (
        r"cp\.async\.bulk\.tensor\.(?P<dims>[1-5])d\.shared::cluster\.global(\.tile)?\.mbarrier::complete_tx::bytes"
        r"(?P<multicast>\.multicast::cluster)?(\.L2::cache_hint)?",
        _tensor,
    ),
    (
        r"cp\.async\.bulk\.tensor\.(?P<dims>[1-5])d\.global\.shared::cta(\.tile)?\.bulk_group(\.L2::cache_hint)?",
        _tensor_store,
    ),
    (r"wgmma\.fence\.sync\.aligned", _nothing),
    (r"wgmma\.commit_group\.sync\.aligned", lambda m, o: "emu::wgmma_commit();"),
    (r"wgmma\.wait_group\.sync\.aligned", lambda m, o: f"emu::wgmma_wait({_text(o[0])});"),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)\.(?:f32|s32)\.(?P<type>\w+)\.\w+", _wgmma),
    (r"nanosleep\.u32", lambda m, o: "emu::poll();"),
    (r"ret", lambda m, o: "return;"),
]
COMPILED = [(re.compile(pattern), emit) for pattern, emit in TABLE]


def emit(opcode: str, operands: list[Operand]) -> str:
    """C++ of an instruction. KeyError if it is not known."""
    for pattern, make in COMPILED:
        if m := pattern.fullmatch(opcode):
            return make(m, operands)
    raise KeyError(opcode)
