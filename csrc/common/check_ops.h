// What the CPU and the CUDA function of an op refuse alike.
#pragma once

#include <cmath>

#include "check.h"

namespace dlmkern {

inline int check_confidence_select(const dlmkern_view* confidence, const dlmkern_view* mask,
                                   const dlmkern_view* parameter, int rule, const dlmkern_view* selected) {
  DLMKERN_TRY(check_input(confidence, kReal, {kAnySize, kAnySize}));
  const int64_t B = confidence->shape[0], n = confidence->shape[1];
  DLMKERN_TRY(check_optional_input(mask, kBool, {B, n}));
  DLMKERN_TRY(check_input(parameter, kFloat64, {B}));
  if (rule < DLMKERN_RULE_THRESHOLD || rule > DLMKERN_RULE_FACTOR_OFFICIAL) return DLMKERN_ERROR_VALUE;
  return check_output(selected, kBool, {B, n});
}

inline int check_cover_seeds(const dlmkern_view* uncertainty, const dlmkern_view* influence,
                             const dlmkern_view* drift, const dlmkern_view* eligible,
                             const dlmkern_view* most, int additive, int above_mean,
                             const dlmkern_view* seeds, const dlmkern_view* score) {
  DLMKERN_TRY(check_input(uncertainty, kReal, {kAnySize, kAnySize}));
  const int64_t B = uncertainty->shape[0], n = uncertainty->shape[1];
  DLMKERN_TRY(check_optional_input(influence, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(drift, kReal, {B, n}));
  DLMKERN_TRY(check_optional_input(eligible, kBool, {B, n}));
  DLMKERN_TRY(check_input(most, kInt64, {B}));
  if ((additive != 0 && additive != 1) || (above_mean != 0 && above_mean != 1)) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_output(seeds, kBool, {B, n}));
  return check_output(score, kFloat64, {B, n});
}

inline int check_cover_verify(const dlmkern_view* confidence, const dlmkern_view* token,
                              const dlmkern_view* predicted, const dlmkern_view* seeds,
                              const dlmkern_view* remasks, double tau_replace, int64_t max_remasks,
                              const dlmkern_view* verdict) {
  DLMKERN_TRY(check_input(confidence, kReal, {kAnySize, kAnySize}));
  const int64_t B = confidence->shape[0], n = confidence->shape[1];
  DLMKERN_TRY(check_input(token, kInt64, {B, n}));
  DLMKERN_TRY(check_input(predicted, kInt64, {B, n}));
  DLMKERN_TRY(check_input(seeds, kBool, {B, n}));
  DLMKERN_TRY(check_input(remasks, kInt64, {B, n}));
  if (tau_replace != tau_replace || max_remasks < 0) return DLMKERN_ERROR_VALUE;
  return check_output(verdict, kInt64, {B, n});
}

inline int check_dapd_select(const dlmkern_view* scores, const dlmkern_view* confidence,
                             const dlmkern_view* valid, const dlmkern_view* tau, const dlmkern_view* certain,
                             const dlmkern_view* late, int symmetric, const dlmkern_view* selected) {
  DLMKERN_TRY(check_input(scores, kReal, {kAnySize, kAnySize, kAnySize}));
  const int64_t B = scores->shape[0], M = scores->shape[1];
  if (scores->shape[2] != M) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_input(confidence, kReal, {B, M}));
  DLMKERN_TRY(check_optional_input(valid, kBool, {B, M}));
  DLMKERN_TRY(check_input(tau, kFloat64, {B}));
  DLMKERN_TRY(check_input(certain, kFloat64, {B}));
  DLMKERN_TRY(check_input(late, kFloat64, {B}));
  if (symmetric != 0 && symmetric != 1) return DLMKERN_ERROR_VALUE;
  return check_output(selected, kBool, {B, M});
}

inline int check_kv_block_write(const dlmkern_view* k_cache, const dlmkern_view* v_cache,
                                const dlmkern_view* k, const dlmkern_view* v, const dlmkern_view* positions,
                                const dlmkern_view* cos, const dlmkern_view* sin, const dlmkern_view* drift) {
  DLMKERN_TRY(check_output(k_cache, kFloat, {kAnySize, kAnySize, kAnySize, kAnySize}));
  const int64_t B = k_cache->shape[0], H = k_cache->shape[1], L = k_cache->shape[2], d = k_cache->shape[3];
  const unsigned dtype = dtype_bit(k_cache->dtype);
  DLMKERN_TRY(check_output(v_cache, dtype, {B, H, L, d}));
  DLMKERN_TRY(check_input(positions, kInt64, {B, kAnySize}));
  const int64_t n = positions->shape[1];
  DLMKERN_TRY(check_input(k, dtype, {B, H, n, d}));
  DLMKERN_TRY(check_input(v, dtype, {B, H, n, d}));
  if ((cos == nullptr) != (sin == nullptr)) return DLMKERN_ERROR_NULL;
  if (cos != nullptr) {
    const unsigned arithmetic = dtype == kFloat64 ? kFloat64 : kFloat32;
    DLMKERN_TRY(check_input(cos, arithmetic, {kAnySize, d}));
    DLMKERN_TRY(check_input(sin, arithmetic, {cos->shape[0], d}));
    if (cos->shape[0] < L || d % 2 != 0) return DLMKERN_ERROR_SHAPE;
  }
  return check_optional_output(drift, kFloat32, {4, B, n});
}

inline int check_diagonal_correction(const dlmkern_view* out, const dlmkern_view* lse, const dlmkern_view* q,
                                     const dlmkern_view* k, const dlmkern_view* v,
                                     const dlmkern_view* k_cached, const dlmkern_view* v_cached,
                                     const dlmkern_view* seeds, const dlmkern_view* lengths,
                                     const dlmkern_view* positions, int shift, double scale,
                                     double recompute_below) {
  DLMKERN_TRY(check_output(out, kFloat, {kAnySize, kAnySize, kAnySize, kAnySize}));
  const int64_t B = out->shape[0], Hq = out->shape[1], n = out->shape[2], d = out->shape[3];
  const unsigned dtype = dtype_bit(out->dtype);
  DLMKERN_TRY(check_output(lse, dtype == kFloat64 ? kFloat64 : kFloat32, {B, Hq, n}));
  DLMKERN_TRY(check_input(q, dtype, {B, Hq, n, d}));
  DLMKERN_TRY(check_input(k, dtype, {B, kAnySize, n, d}));
  const int64_t Hkv = k->shape[1];
  if (d < 1 || (Hkv == 0 ? Hq != 0 : Hq % Hkv != 0)) return DLMKERN_ERROR_SHAPE;
  DLMKERN_TRY(check_input(v, dtype, {B, Hkv, n, d}));
  DLMKERN_TRY(check_input(k_cached, dtype, {B, Hkv, positions == nullptr ? n : kAnySize, d}));
  DLMKERN_TRY(check_input(v_cached, dtype, {B, Hkv, k_cached->shape[2], d}));
  DLMKERN_TRY(check_input(seeds, kBool, {B, n}));
  DLMKERN_TRY(check_optional_input(lengths, kInt64, {B}));
  DLMKERN_TRY(check_optional_input(positions, kInt64, {B, n}));
  const bool valid = (shift == 0 || shift == 1) && std::isfinite(scale) && recompute_below >= 0;
  return valid ? DLMKERN_OK : DLMKERN_ERROR_VALUE;
}

}  // namespace dlmkern
