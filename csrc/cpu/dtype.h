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

[[maybe_unused]] static uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The nearest number of type T, the even one of two; NaN stays NaN.
template <class T>
static T round_to(float value);

template <>
[[maybe_unused]] float round_to<float>(float value) {
  return value;
}

template <>
[[maybe_unused]] BFloat16 round_to<BFloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
[[maybe_unused]] Float16 round_to<Float16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and above
    rounded = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: next to 0.5 a float's last bit is worth as much
    rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  } else {  // the exponent's bias is smaller by 112
    rounded = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

}  // namespace dlmkern
