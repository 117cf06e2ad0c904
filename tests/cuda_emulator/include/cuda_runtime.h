// The part of CUDA's runtime header that kernels of this project use, for the emulator.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <tuple>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define EMU_VECTOR(T, name, align)                                                                  \
  struct alignas(align) name##2 { T x, y; };                                                        \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                        \
  struct name##1 { T x; };                                                                          \
  struct name##3 { T x, y, z; };                                                                    \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                \
  struct alignas(align * 2 > 16 ? 16 : align * 2) name##4 { T x, y, z, w; };                        \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(int, int, 8)
EMU_VECTOR(float, float, 8)
EMU_VECTOR(short, short, 4)
EMU_VECTOR(unsigned short, ushort, 4)
EMU_VECTOR(char, char, 2)
EMU_VECTOR(unsigned char, uchar, 2)
EMU_VECTOR(long long, longlong, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16)
EMU_VECTOR(double, double, 16)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- host ----

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9;
using cudaStream_t = struct EmuStream*;
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
    struct { unsigned x, y, z; } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaDeviceProp {
  int multiProcessorCount, major, minor;
  struct { char bytes[16]; } uuid;
};
struct cudaIpcMemHandle_t { char reserved[64]; };
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                      cudaMemcpyDefault };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned cudaEnableDefault = 0;

namespace emu {
size_t& shared_limit(const void* kernel);
int sms();
int active_clusters(const Config& config);
Config config_of(const cudaLaunchConfig_t& config, const void* kernel);
}  // namespace emu

template <typename F>
cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > 227 * 1024) return cudaErrorInvalidValue;
  emu::shared_limit(reinterpret_cast<const void*>(kernel)) = value;
  return cudaSuccess;
}
template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  std::tuple<std::decay_t<P>...> held(static_cast<P>(arguments)...);
  return emu::launch(emu::config_of(*config, reinterpret_cast<const void*>(kernel)),
                     [=] { std::apply(kernel, held); });
}
template <typename... P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*kernel)(P...), const cudaLaunchConfig_t* config) {
  *clusters = emu::active_clusters(emu::config_of(*config, reinterpret_cast<const void*>(kernel)));
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) { return *p = {emu::sms(), 9, 0}, cudaSuccess; }
inline cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *p ? cudaSuccess : 2;
}
inline cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
inline cudaError_t cudaMemset(void* p, int v, size_t bytes) { return memset(p, v, bytes), cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  emu::on_stream(reinterpret_cast<uint64_t>(stream), [=] { memcpy(to, from, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int v, size_t bytes, cudaStream_t stream) {
  emu::on_stream(reinterpret_cast<uint64_t>(stream), [=] { memset(p, v, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p) {
  return memcpy(handle->reserved, &p, sizeof p), cudaSuccess;
}
inline cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned) {
  return memcpy(p, handle.reserved, sizeof *p), cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
extern "C" cudaError_t emu_driver_entry_point(const char* name, void** f);
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned,
                                                    cudaDriverEntryPointQueryResult* status) {
  *status = cudaDriverEntryPointSuccess;
  return emu_driver_entry_point(name, f);
}

// ---- device ----

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline size_t __cvta_generic_to_shared(const void* p) { return emu::to_shared(p); }
inline void* __cvta_shared_to_generic(size_t p) { return emu::from_shared(static_cast<uint32_t>(p), 0); }
inline void __syncthreads() { emu::bar_sync(0, -1); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::poll(); }
inline uint32_t __activemask() { return emu::active_lanes(); }

namespace emu {
template <typename T>
struct Exchanged {
  T value, result;
  int from;  // lane; negative: its own
};
template <typename T>
T exchange(uint32_t mask, T value, int from) {
  Exchanged<T> own{value, value, from};
  meet(mask, &own, [](void** all, uint32_t lanes) {
    for (int i = 0; i < 32; i++) {
      if (!all[i]) continue;
      auto& it = *static_cast<Exchanged<T>*>(all[i]);
      if (it.from >= 0 && all[it.from]) it.result = static_cast<Exchanged<T>*>(all[it.from])->value;
    }
  }, "shuffle");
  return own.result;
}
template <typename T, typename F>
struct Reduced {
  T value, result;
  F f;
};
template <typename T, typename F>
T reduce(uint32_t mask, T value, F f, const char* what) {
  Reduced<T, F> own{value, value, f};
  meet(mask, &own, [](void** all, uint32_t lanes) {
    bool first = true;
    T sum{};
    for (int i = 0; i < 32; i++) {
      if (!all[i]) continue;
      auto& it = *static_cast<Reduced<T, F>*>(all[i]);
      sum = first ? it.value : it.f(sum, it.value), first = false;
    }
    for (int i = 0; i < 32; i++) {
      if (all[i]) static_cast<Reduced<T, F>*>(all[i])->result = sum;
    }
  }, what);
  return own.result;
}
}  // namespace emu

inline void __syncwarp(uint32_t mask = ~0u) {
  emu::meet(mask, nullptr, [](void**, uint32_t) {}, "__syncwarp");
}
template <typename T>
T __shfl_sync(uint32_t mask, T v, int from, int width = 32) {
  const int lane = emu::view->lane;
  return emu::exchange(mask, v, lane / width * width + (from & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T v, int flip, int width = 32) {
  const int lane = emu::view->lane, from = lane ^ flip;
  return emu::exchange(mask, v, from / width <= lane / width ? from : -1);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T v, unsigned by, int width = 32) {
  const int lane = emu::view->lane;
  return emu::exchange(mask, v, lane % width >= static_cast<int>(by) ? lane - static_cast<int>(by) : -1);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T v, unsigned by, int width = 32) {
  const int lane = emu::view->lane;
  return emu::exchange(mask, v, lane % width + static_cast<int>(by) < width ? lane + static_cast<int>(by) : -1);
}
inline uint32_t __ballot_sync(uint32_t mask, int yes) {
  const uint32_t bit = yes ? 1u << emu::view->lane : 0;
  return emu::reduce(mask, bit, [](uint32_t a, uint32_t b) { return a | b; }, "__ballot_sync");
}
inline int __any_sync(uint32_t mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(uint32_t mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
inline uint32_t __match_any_sync(uint32_t mask, uint32_t v) {
  uint32_t same = 0;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    if (emu::exchange(mask, v, i) == v) same |= 1u << i;
  }
  return same;
}
#define EMU_REDUCE(name, T, expression)                                       \
  inline T __reduce_##name##_sync(uint32_t mask, T v) {                       \
    return emu::reduce(mask, v, [](T a, T b) -> T { return expression; }, "__reduce_" #name "_sync"); \
  }
EMU_REDUCE(add, unsigned, a + b)
EMU_REDUCE(add, int, a + b)
EMU_REDUCE(min, unsigned, a < b ? a : b)
EMU_REDUCE(min, int, a < b ? a : b)
EMU_REDUCE(max, unsigned, a > b ? a : b)
EMU_REDUCE(max, int, a > b ? a : b)
EMU_REDUCE(or, unsigned, a | b)
EMU_REDUCE(and, unsigned, a & b)
EMU_REDUCE(xor, unsigned, a ^ b)

template <typename T>
T __ldg(const T* p) { return *p; }
template <typename T>
T __ldcg(const T* p) { return *p; }
template <typename T>
T __ldcs(const T* p) { return *p; }
template <typename T>
T __ldcv(const T* p) { return *p; }
template <typename T>
void __stcs(T* p, T v) { *p = v; }
template <typename T>
void __stcg(T* p, T v) { *p = v; }
template <typename T>
struct EmuSame { using type = T; };
#define EMU_ATOMIC(name, expression)                                  \
  template <typename T>                                               \
  T atomic##name(T* p, typename EmuSame<T>::type v) {                 \
    const T old = *p;                                                 \
    *p = static_cast<T>(expression);                                  \
    emu::happened();                                                  \
    return old;                                                       \
  }
EMU_ATOMIC(Add, old + v)
EMU_ATOMIC(Sub, old - v)
EMU_ATOMIC(Max, old > v ? old : v)
EMU_ATOMIC(Min, old < v ? old : v)
EMU_ATOMIC(Or, old | v)
EMU_ATOMIC(And, old & v)
EMU_ATOMIC(Exch, v)
EMU_ATOMIC(Inc, old >= v ? 0 : old + 1)
template <typename T>
T atomicCAS(T* p, typename EmuSame<T>::type expected, typename EmuSame<T>::type v) {
  const T old = *p;
  emu::poll();  // loops repeat it
  if (*p == expected) { const T was = *p; *p = v; emu::happened(); return was; }
  return *p == old ? old : *p;
}

inline float __uint_as_float(unsigned v) { return emu::bits<float>(v); }
inline unsigned __float_as_uint(float v) { return emu::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emu::bits<float>(v); }
inline int __float_as_int(float v) { return emu::bits<int>(v); }
inline long long __double_as_longlong(double v) { return emu::bits<long long>(v); }
inline double __longlong_as_double(long long v) { return emu::bits<double>(v); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fadd_rd(float a, float b) {  // a double holds the sum of two floats of near magnitude exactly
  const double sum = static_cast<double>(a) + b;
  const float nearest = static_cast<float>(sum);
  return nearest > sum ? nextafterf(nearest, -INFINITY) : nearest;
}
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
  return r;
}
inline int __umulhi_signed(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return __umulhi_signed(a, b); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
  const unsigned high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return high << 16 | low;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> 4 * i & 15;
    unsigned byte = both >> (s & 7) * 8 & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
