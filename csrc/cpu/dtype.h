// The 16-bit float types and their conversion. The functions are static, not inline: this header is also
// compiled for newer instruction sets, and the linker must never pick one of those copies for code that runs
// anywhere.
#pragma once

#include <cstdint>
#include <cstring>

namespace dlmkern {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

[[maybe_unused]] static float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] static float to_float(float value) { return value; }

[[maybe_unused]] static float to_float(BFloat16 value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

[[maybe_unused]] static float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return bits_to_float(sign | 0x7f800000u | magnitude);  // infinity or NaN
  // A float's exponent has a bias larger by 112; the product is also right for subnormal numbers.
  return bits_to_float(sign | magnitude) * 0x1p112f;
}

}  // namespace dlmkern
