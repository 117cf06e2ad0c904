// The search of nvfp4_from_int4.py: a CTA per row, a warp per block of 16, a lane per candidate scale.
#include "cuda/hopper.cuh"

using namespace hopper;

namespace {

constexpr int WARPS = 8;
constexpr int LANES = 32;  // one lane per candidate scale
constexpr int LOWEST = -11, HIGHEST = 6;
constexpr double UNIT = 1.0 / (1 << 14);
constexpr unsigned ALL = ~0u;

struct Args {
  const uint8_t* packed;   // [o, inputs / 2]
  const uint16_t* scale;   // [o, inputs / 32]
  const uint8_t* often;    // [inputs], may be null
  const float* cost;       // [128][9][32], or the coarse one
  const float* error;      // [128][9][32]
  const uint8_t* codes;    // [128][32][16]
  const float* price;      // [18][32]
  const uint8_t* byte;     // [18][32]
  uint8_t *values, *steps;
  double* energy;
  int inputs, exponent;
};

__global__ __launch_bounds__(WARPS * 32) void search(Args a) {
  __shared__ double partial[WARPS][2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = a.inputs / 16;
  const int64_t row = blockIdx.x;
  wait_for_predecessor();
  double signal = 0, lost = 0;
  for (int b = warp; b < blocks; b += WARPS) {
    const int64_t at = row * blocks + b;
    const uint32_t bits = a.scale[row * (a.inputs / 32) + b / 2];
    const int power = int(bits >> 7) - 127 - a.exponent, mantissa = bits & 127;
    const int octave = min(max(power, LOWEST), HIGHEST) - LOWEST;
    // Lanes from 16 on hold the same nibbles as lanes 0 to 15.
    const int nibble = a.packed[at * 8 + lane % 16 / 2] >> lane % 2 * 4 & 15;
    const int level = lane < 16 ? abs(nibble - 8) : 0;
    const int often = a.often ? a.often[b * 16 + lane % 16] : 1;
    const float* cost = a.cost + mantissa * 9 * LANES;
    float total = a.price[octave * LANES + lane];
    int squares = 0;
    float count[9];
#pragma unroll
    for (int n = 1; n <= 8; n++) {
      const int many = __popc(__ballot_sync(ALL, level == n));
      squares += many * n * n;
      count[n] = many;
      const float judged = a.often ? __reduce_add_sync(ALL, level == n ? often : 0) : many;
      total += judged * cost[n * LANES + lane];
    }
    const int k = __reduce_min_sync(ALL, (int(total) << 5) + lane) & 31;
    const bool kept = power >= LOWEST;
    float units = 0;
#pragma unroll
    for (int n = 1; n <= 8; n++) units += count[n] * a.error[(mantissa * 9 + n) * LANES + k];
    const double s = __uint_as_float(bits << 16), square = s * s;
    signal += squares * square;
    lost += kept ? units * UNIT * square : squares * square;
    const uint32_t code = a.codes[(mantissa * LANES + k) * 16 + nibble];
    const uint32_t above = __shfl_down_sync(ALL, code, 1);
    if (lane < 16 && lane % 2 == 0) a.values[at * 8 + lane / 2] = kept ? code | above << 4 : 0;
    if (lane == 0) a.steps[at] = kept ? a.byte[octave * LANES + k] : 0;
  }
  if (lane == 0) partial[warp][0] = signal, partial[warp][1] = lost;
  __syncthreads();
  if (threadIdx.x < 2) {
    double sum = 0;
    for (int w = 0; w < WARPS; w++) sum += partial[w][threadIdx.x];
    a.energy[2 * row + threadIdx.x] = sum;
  }
}

}  // namespace

// inputs is a multiple of 32, o at least 1; scales are neither negative nor beyond the exponent.
API int nvfp4_from_int4(const void* packed, const void* scale, const void* often, int64_t o, int64_t inputs,
                        int64_t exponent, const void* cost, const void* error, const void* codes, const void* price, const void* byte,
                        void* values, void* steps, void* energy, void* stream) {
  Args a{static_cast<const uint8_t*>(packed),
         static_cast<const uint16_t*>(scale),
         static_cast<const uint8_t*>(often),
         static_cast<const float*>(cost),
         static_cast<const float*>(error),
         static_cast<const uint8_t*>(codes),
         static_cast<const float*>(price),
         static_cast<const uint8_t*>(byte),
         static_cast<uint8_t*>(values),
         static_cast<uint8_t*>(steps),
         static_cast<double*>(energy),
         static_cast<int>(inputs),
         static_cast<int>(exponent)};
  return launch(search, dim3(o), dim3(WARPS * 32), 0, stream, 1, a);
}
