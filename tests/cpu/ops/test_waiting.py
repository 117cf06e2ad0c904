"""Kernels whose CTAs wait for other CTAs: every one is registered, so that what runs beside a step can be checked."""

import re

from perilune.ops.harness import build, registry

# Loads that see what other CTAs write while the kernel runs: only a loop that waits has a use for them.
WAITING = re.compile(r"ld\.(relaxed|acquire)\.(gpu|sys)")


def waiting_sources() -> set[str]:
    found = set()
    for name, path in build._paths().items():
        text = "".join(header.read_text() for header in build._with_headers(path))
        if path.suffix == ".cu" and WAITING.search(text):
            found.add(name)
    return found


def test_every_waiting_kernel_is_registered() -> None:
    sources = waiting_sources()
    assert {"mla_pre_attention_t1.cu", "mla_pre_attention_mma.cu", "mla_decode_output_t1.cu"} <= sources
    assert "mla_decode_output_mma.cu" in sources
    assert {"mla_decode_router_t1.cu", "router_mma.cu", "moe_int4_t1.cu"} <= sources
    assert registry.waiting().keys() == sources
    assert all(registry.waiting().values())


def test_registered_implementations_name_their_kernels() -> None:
    found = registry.waiting()
    assert found["router_mma.cu"] == ["router/cuda"] and found["moe_int4_t1.cu"] == ["moe_int4/cuda"]
    for kernel, impl in (("mla_decode_output_t1.cu", "cuda"), ("mla_decode_output_mma.cu", "cuda_mma")):
        ops = "mla_decode_output", "mla_decode_router", "mla_merge_output", "mla_merge_router"
        assert sorted(found[kernel]) == [f"{op}/{impl}" for op in ops]


def test_what_needs_the_gpu_for_itself_waits() -> None:
    for op in registry.all_ops().values():
        for impl in op.impls.values():
            assert impl.waits or not impl.alone, f"{op.name}/{impl.name}"
