// Conversions and arithmetic of narrow types, rounded to nearest, ties to even.
#include <cmath>

#include "../include/cuda_bf16.h"

namespace emu {

float of_e4m3(uint8_t v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float sign = v & 128 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * ldexpf(static_cast<float>(mantissa), -9);
  return sign * ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
}

float of_e5m2(uint8_t v) {
  const auto h = static_cast<uint16_t>(v << 8);
  return static_cast<float>(bits<_Float16>(h));
}

namespace {

uint8_t e4m3(float f) {  // saturating
  const uint8_t sign = std::signbit(f) ? 128 : 0;
  const float a = std::fabs(f);
  if (f != f) return 0x7f;
  if (a >= 448.0f) return sign | 0x7e;
  int exponent;
  frexpf(a, &exponent);                          // a = m 2^exponent, m in [0.5, 1)
  const int unit = std::max(exponent - 4, -9);   // the last bit's weight
  const auto steps = static_cast<int>(nearbyintf(ldexpf(a, -unit)));
  if (steps == 0) return sign;
  const float rounded = ldexpf(static_cast<float>(steps), unit);
  if (rounded > 448.0f) return sign | 0x7e;
  if (rounded < ldexpf(1.0f, -6)) return sign | static_cast<uint8_t>(ldexpf(rounded, 9));
  frexpf(rounded, &exponent);
  const auto mantissa = static_cast<int>(ldexpf(rounded, 4 - exponent)) & 7;
  return static_cast<uint8_t>(sign | (exponent - 1 + 7) << 3 | mantissa);
}

float low(uint32_t v) { return bits<float>(v << 16); }
float high(uint32_t v) { return bits<float>(v & 0xffff0000u); }
uint32_t pair(uint16_t a, uint16_t b) { return a | static_cast<uint32_t>(b) << 16; }

uint16_t rounded(double v) {  // one rounding: to odd as float, then to bf16
  float f = static_cast<float>(v);
  if (std::isfinite(f) && static_cast<double>(f) != v) {
    const bool beyond = std::fabs(static_cast<double>(f)) > std::fabs(v);
    uint32_t u = bits<uint32_t>(f);
    if (beyond) u--;
    f = bits<float>(u | 1);
  }
  return __nv_bfloat16::rounded(f);
}

}  // namespace

uint16_t e4m3x2(float a, float b) { return static_cast<uint16_t>(e4m3(a) << 8 | e4m3(b)); }

uint32_t f16x2_of_e4m3x2(uint16_t v) {
  const auto half = [](uint8_t e) { return bits<uint16_t>(static_cast<_Float16>(of_e4m3(e))); };
  return pair(half(static_cast<uint8_t>(v)), half(static_cast<uint8_t>(v >> 8)));
}

uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return pair(rounded(static_cast<double>(low(a)) * low(b)), rounded(static_cast<double>(high(a)) * high(b)));
}

// A double holds the product, and nearly always the sum, exactly.
uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return pair(rounded(static_cast<double>(low(a)) * low(b) + low(c)),
              rounded(static_cast<double>(high(a)) * high(b) + high(c)));
}

}  // namespace emu
