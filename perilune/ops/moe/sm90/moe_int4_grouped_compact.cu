// The MoE block for many tokens, with compact scales. Contract in moe_int4_grouped.py.
#include "moe/sm90/moe_int4_grouped.cuh"

API int moe_int4_grouped_compact(const void* x, int64_t stride, const void* ids, const void* weights,
                                 const void* gate_up, const void* gate_up_scale, const void* gate_up_row,
                                 const void* down, const void* down_scale, const void* down_row, const void* shared,
                                 void* y, void* plan, void* position, void* slabs, void* h, int64_t T, int64_t k,
                                 int64_t E, int64_t D, int64_t I, int64_t classes, int64_t capacity, int64_t groups,
                                 int64_t processors, void* stream) {
  return run<true>({x, stride, ids, weights, gate_up, gate_up_scale, gate_up_row, down, down_scale, down_row, shared,
                    y, plan, position, slabs, h, T, k, E, D, I, classes, capacity, groups, processors,
                    stream});
}
