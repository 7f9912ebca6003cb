// Runs every CPU function over awkward shapes, on heap blocks of exactly their size. What the sanitizers find
// ends the program; it prints how many calls it made.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "dlmkern.h"

namespace {

std::mt19937 generator(0);
int calls = 0;

int64_t size_of(int dtype) {
  const int64_t sizes[] = {8, 4, 2, 2, 8, 1};
  return sizes[dtype];
}

// A contiguous tensor in a block of its own that starts `shift` bytes in, so that its numbers may lie
// unaligned.
struct Tensor {
  std::unique_ptr<unsigned char[]> block;
  dlmkern_view view = {};

  Tensor(int dtype, std::vector<int64_t> shape, int shift = 0) {
    int64_t count = 1;
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    for (int axis = view.ndim - 1; axis >= 0; --axis) {
      view.shape[axis] = shape[axis];
      view.stride[axis] = count;
      count *= shape[axis];
    }
    block = std::make_unique<unsigned char[]>(count * size_of(dtype) + shift);
    view.data = block.get() + shift;
  }

  operator const dlmkern_view*() const { return &view; }

  int64_t count() const {
    int64_t result = 1;
    for (int axis = 0; axis < view.ndim; ++axis) result *= view.shape[axis];
    return result;
  }

  template <class T>
  void set(int64_t i, T value) {
    std::memcpy(static_cast<T*>(view.data) + i, &value, sizeof value);
  }

  // Random numbers of any kind, special ones among them.
  Tensor& fill(double special) {
    std::normal_distribution<double> normal(0, 4);
    std::uniform_real_distribution<double> uniform;
    for (int64_t i = 0; i < count(); ++i) {
      const double choices[] = {NAN, INFINITY, -INFINITY, -3e38, 1e-42};
      const double value = uniform(generator) < special ? choices[generator() % 5] : normal(generator);
      const float single = static_cast<float>(value);
      uint32_t bits;
      std::memcpy(&bits, &single, sizeof bits);
      if (view.dtype == DLMKERN_FLOAT64) set(i, value);
      if (view.dtype == DLMKERN_FLOAT32) set(i, single);
      if (view.dtype == DLMKERN_BFLOAT16) set(i, static_cast<uint16_t>(bits >> 16));
      if (view.dtype == DLMKERN_FLOAT16) set(i, static_cast<uint16_t>(generator()));
      if (view.dtype == DLMKERN_BOOL) set(i, static_cast<uint8_t>(generator() % 3 == 0));
    }
    return *this;
  }

  // Integers from -1 to V.
  Tensor& tokens(int64_t V) {
    for (int64_t i = 0; i < count(); ++i) set(i, static_cast<int64_t>(generator() % (V + 2)) - 1);
    return *this;
  }
};

void expect_ok(int code) {
  ++calls;
  if (code == DLMKERN_OK) return;
  std::fprintf(stderr, "call %d: %s\n", calls, dlmkern_error_string(code));
  std::exit(1);
}

void scan(int dtype, int64_t n, int64_t V, double special) {
  Tensor logits(dtype, {1, n, V}, 1), prev(dtype, {1, n + 1, V}, 3);
  logits.fill(special);
  prev.fill(special);
  Tensor rows(DLMKERN_INT64, {1, n});
  rows.tokens(n + 1);
  Tensor token(DLMKERN_INT64, {1, n}), confidence(DLMKERN_FLOAT64, {1, n}), lse(DLMKERN_FLOAT32, {1, n});
  Tensor entropy(DLMKERN_FLOAT64, {1, n}), kl(DLMKERN_FLOAT32, {1, n});
  for (const int64_t banned : {int64_t{-1}, int64_t{0}, V / 2, V - 1}) {
    expect_ok(dlmkern_cpu_token_stats(logits, prev, rows, banned, token, confidence, lse, entropy, kl));
    expect_ok(
        dlmkern_cpu_token_stats(logits, nullptr, nullptr, banned, token, nullptr, nullptr, nullptr, nullptr));
    for (const int64_t k : {int64_t{1}, int64_t{31}, int64_t{64}}) {
      if (k > V - (banned >= 0 ? 1 : 0)) continue;
      Tensor ids(DLMKERN_INT64, {1, n, k}), logp(DLMKERN_FLOAT64, {1, n, k}), floor(DLMKERN_FLOAT64, {1, n});
      expect_ok(dlmkern_cpu_topk_snapshot(logits, banned, ids, logp, floor));
      Tensor snapshot_kl(DLMKERN_FLOAT64, {1, n});
      expect_ok(dlmkern_cpu_topk_kl(ids, logp, ids, logp, floor, snapshot_kl));
    }
  }
}

void select(int dtype, int64_t B, int64_t n, double special) {
  const int64_t V = 7;
  Tensor logits(dtype, {B, n, V}, 1), token(DLMKERN_INT64, {B, n}, 1), lse(DLMKERN_FLOAT64, {B, n}, 1);
  logits.fill(special);
  token.tokens(V);
  lse.fill(special);
  Tensor conflict(DLMKERN_FLOAT32, {B, n, n}), matrix(DLMKERN_BOOL, {B, n, n});
  Tensor some(DLMKERN_BOOL, {B, n}), others(DLMKERN_BOOL, {B, n}), selected(DLMKERN_BOOL, {B, n});
  matrix.fill(0);
  some.fill(0);
  others.fill(0);
  expect_ok(dlmkern_cpu_conflict_matrix(logits, token, lse, conflict));
  expect_ok(dlmkern_cpu_independent_set(matrix, lse, some, others, selected));
  expect_ok(dlmkern_cpu_independent_set(matrix, lse, nullptr, nullptr, selected));
  Tensor low(DLMKERN_FLOAT64, {B}), high(DLMKERN_FLOAT64, {B}), gamma(DLMKERN_FLOAT64, {B});
  low.fill(special), high.fill(special), gamma.fill(special);
  Tensor confidence(DLMKERN_FLOAT32, {B, n});
  for (const int strict : {0, 1}) {
    expect_ok(
        dlmkern_cpu_cap_select(logits, token, lse, some, low, high, gamma, strict, selected, confidence));
    expect_ok(
        dlmkern_cpu_cap_select(logits, token, nullptr, nullptr, low, high, gamma, strict, selected, nullptr));
  }
  Tensor remaining(DLMKERN_INT64, {B}), l_min(DLMKERN_INT64, {B}), l_max(DLMKERN_INT64, {B}),
      length(DLMKERN_INT64, {B});
  for (int64_t b = 0; b < B; ++b) {
    const int64_t least = 1 + generator() % 5;
    remaining.set(b, static_cast<int64_t>(generator() % (2 * n + 2)));
    l_min.set(b, least);
    l_max.set(b, least + static_cast<int64_t>(generator() % (n + 1)));
  }
  for (const int reflect : {0, 1}) {
    expect_ok(dlmkern_cpu_depga_block(lse, lse, remaining, low, l_min, l_max, reflect, length));
  }
}

void select_by_confidence(int dtype, int64_t B, int64_t n, double special) {
  Tensor confidence(dtype, {B, n}, 1), mask(DLMKERN_BOOL, {B, n}), p(DLMKERN_FLOAT64, {B}, 1);
  Tensor selected(DLMKERN_BOOL, {B, n});
  confidence.fill(special), mask.fill(0), p.fill(special);
  for (const int rule : {0, 1, 2, 3}) {
    expect_ok(dlmkern_cpu_confidence_select(confidence, mask, p, rule, selected));
    expect_ok(dlmkern_cpu_confidence_select(confidence, nullptr, p, rule, selected));
  }
}

void select_by_graph(int dtype, int64_t B, int64_t M, double special) {
  Tensor scores(dtype, {B, M, M}, 1), confidence(dtype, {B, M}, 1), valid(DLMKERN_BOOL, {B, M});
  Tensor tau(DLMKERN_FLOAT64, {B}, 1), certain(DLMKERN_FLOAT64, {B}, 1), late(DLMKERN_FLOAT64, {B}, 1);
  Tensor selected(DLMKERN_BOOL, {B, M});
  scores.fill(special), confidence.fill(special), valid.fill(0);
  tau.fill(special), certain.fill(special), late.fill(special);
  for (const int symmetric : {0, 1}) {
    expect_ok(dlmkern_cpu_dapd_select(scores, confidence, valid, tau, certain, late, symmetric, selected));
    expect_ok(dlmkern_cpu_dapd_select(scores, confidence, nullptr, tau, certain, late, symmetric, selected));
  }
}

void revise(int dtype, int64_t B, int64_t n, double special) {
  Tensor uncertainty(dtype, {B, n}, 1), influence(dtype, {B, n}, 1), drift(DLMKERN_FLOAT64, {B, n}, 1);
  Tensor eligible(DLMKERN_BOOL, {B, n}), most(DLMKERN_INT64, {B}, 1);
  Tensor seeds(DLMKERN_BOOL, {B, n}), score(DLMKERN_FLOAT64, {B, n}, 1);
  uncertainty.fill(special), influence.fill(special), drift.fill(special), eligible.fill(0), most.tokens(n);
  for (const int additive : {0, 1}) {
    for (const int above_mean : {0, 1}) {
      expect_ok(dlmkern_cpu_cover_seeds(uncertainty, influence, drift, eligible, most, additive, above_mean,
                                        seeds, score));
      expect_ok(dlmkern_cpu_cover_seeds(uncertainty, nullptr, nullptr, nullptr, most, additive, above_mean,
                                        seeds, score));
    }
  }
  Tensor token(DLMKERN_INT64, {B, n}, 1), predicted(DLMKERN_INT64, {B, n}, 1);
  Tensor remasks(DLMKERN_INT64, {B, n}, 1), verdict(DLMKERN_INT64, {B, n}, 1);
  token.tokens(1), predicted.tokens(1), remasks.tokens(1);
  expect_ok(dlmkern_cpu_cover_verify(uncertainty, token, predicted, eligible, remasks, INFINITY, 1, verdict));
}

void write_cache(int dtype, int64_t B, int64_t n, double special) {
  const int64_t H = 3, L = n / 2 + 1;
  for (const int64_t d : {0, 1, 2, 6, 18}) {
    Tensor k_cache(dtype, {B, H, L, d}, 1), v_cache(dtype, {B, H, L, d}, 1);
    Tensor k(dtype, {B, H, n, d}, 1), v(dtype, {B, H, n, d}, 1), positions(DLMKERN_INT64, {B, n}, 1);
    Tensor drift(DLMKERN_FLOAT32, {4, B, n}, 1);
    k_cache.fill(special), v_cache.fill(special), k.fill(special), v.fill(special), positions.tokens(L);
    expect_ok(dlmkern_cpu_kv_block_write(k_cache, v_cache, k, v, positions, nullptr, nullptr, nullptr));
    expect_ok(dlmkern_cpu_kv_block_write(k_cache, v_cache, k, v, positions, nullptr, nullptr, drift));
    if (d % 2 != 0) continue;
    const int table = dtype == DLMKERN_FLOAT64 ? DLMKERN_FLOAT64 : DLMKERN_FLOAT32;
    Tensor cos(table, {L, d}, 1), sin(table, {L, d}, 1);
    cos.fill(special), sin.fill(special);
    expect_ok(dlmkern_cpu_kv_block_write(k_cache, v_cache, k, v, positions, cos, sin, nullptr));
    expect_ok(dlmkern_cpu_kv_block_write(k_cache, v_cache, k, v, positions, cos, sin, drift));
  }
}

void graph(int dtype, int64_t B, int64_t M, double special) {
  const int64_t Hq = 4, Hkv = 2, L = M / 2 + 1;
  const int arithmetic = dtype == DLMKERN_FLOAT64 ? DLMKERN_FLOAT64 : DLMKERN_FLOAT32;
  for (const int64_t d : {1, 6, 17}) {
    Tensor q(dtype, {B, Hq, L, d}, 1), k(dtype, {B, Hkv, L, d}, 1), lse(arithmetic, {B, Hq, L}, 1);
    Tensor positions(DLMKERN_INT64, {B, M}, 1), rows(DLMKERN_INT64, {B, M}, 1);
    Tensor lengths(DLMKERN_INT64, {B}, 1), out(arithmetic, {B, M, M}, 1);
    q.fill(special), k.fill(special), lse.fill(special), out.fill(special);
    positions.tokens(L), rows.tokens(L), lengths.tokens(L);
    expect_ok(dlmkern_cpu_attention_graph(q, k, positions, nullptr, nullptr, nullptr, 0.5, out));
    expect_ok(dlmkern_cpu_attention_graph(q, k, positions, rows, lengths, nullptr, 0.5, out));
    expect_ok(dlmkern_cpu_attention_graph(q, k, positions, nullptr, lengths, lse, 0.5, out));
  }
}

void correct(int dtype, int64_t B, int64_t n, double special) {
  const int64_t Hq = 4, Hkv = 2;
  const int arithmetic = dtype == DLMKERN_FLOAT64 ? DLMKERN_FLOAT64 : DLMKERN_FLOAT32;
  for (const int64_t L : {n, n / 2 + 1}) {
    for (const int64_t d : {1, 6, 17}) {
      Tensor out(dtype, {B, Hq, n, d}, 1), lse(arithmetic, {B, Hq, n}, 1), q(dtype, {B, Hq, n, d}, 1);
      Tensor k(dtype, {B, Hkv, n, d}, 1), v(dtype, {B, Hkv, n, d}, 1);
      Tensor k_cached(dtype, {B, Hkv, L, d}, 1), v_cached(dtype, {B, Hkv, L, d}, 1);
      Tensor seeds(DLMKERN_BOOL, {B, n}), lengths(DLMKERN_INT64, {B}, 1), positions(DLMKERN_INT64, {B, n}, 1);
      for (Tensor* tensor : {&out, &lse, &q, &k, &v, &k_cached, &v_cached, &seeds}) tensor->fill(special);
      lengths.tokens(L), positions.tokens(L);
      for (const int shift : {0, 1}) {
        for (const double recompute_below : {0.0, 0.9, static_cast<double>(INFINITY)}) {
          const dlmkern_view* const places = L == n ? nullptr : &positions.view;
          expect_ok(dlmkern_cpu_diagonal_correction(out, lse, q, k, v, k_cached, v_cached, seeds, lengths,
                                                    places, shift, 0.5, recompute_below));
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const char* isa : {"portable", "avx2", "avx512-on-avx2", "avx512"}) {
    if (dlmkern_cpu_set_isa(isa) != DLMKERN_OK) continue;
    for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32, DLMKERN_BFLOAT16, DLMKERN_FLOAT16}) {
      for (const double special : {0.0, 0.001, 0.3}) {
        for (const int64_t V : {1, 2, 3, 31, 33, 1025, 1039, 2049, 4127}) scan(dtype, V % 3, V, special);
        scan(dtype, 1, 33003, special);
        for (const int64_t n : {0, 1, 2, 33, 70}) {
          select(dtype, 2, n, special);
          write_cache(dtype, 2, n, special);
          graph(dtype, 2, n, special);
          correct(dtype, 2, n, special);
          if (dtype > DLMKERN_FLOAT32) continue;
          select_by_confidence(dtype, 2, n, special);
          select_by_graph(dtype, 2, n, special);
          revise(dtype, 2, n, special);
        }
      }
    }
  }
  std::printf("%d calls\n", calls);
  return 0;
}
