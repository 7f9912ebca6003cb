// Runs every CUDA kernel in the emulator over awkward shapes and layouts, for the sanitizers: each tensor is
// an allocation of exactly the bytes that its view spans, so that any access beyond it is seen.
//
//   kernels_driver ORDER SEED    prints a hash of all outputs, which must not depend on the schedule
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "dlmkern.h"
#include "dlmkern_cuda.h"

namespace {

std::mt19937_64 generator(1);
std::uint64_t hash = 14695981039346656037u;

double uniform() { return std::uniform_real_distribution<double>()(generator); }

// How a tensor lies in memory.
struct Layout {
  std::int64_t step;    // stride of the last axis
  std::int64_t gap;     // elements between the rows of the second to last axis
  std::int64_t offset;  // elements before the first, which takes vectors off their alignment
};

constexpr Layout kLayouts[] = {{1, 0, 0}, {1, 3, 1}, {2, 5, 0}, {1, 1, 0}, {1, 1 << 16, 3}};

std::size_t bytes_of(int dtype) {
  switch (dtype) {
    case DLMKERN_FLOAT32:
      return 4;
    case DLMKERN_BFLOAT16:
    case DLMKERN_FLOAT16:
      return 2;
    case DLMKERN_BOOL:
      return 1;
    default:
      return 8;
  }
}

class Tensor {
 public:
  Tensor(int dtype, std::vector<std::int64_t> shape, Layout layout = kLayouts[0]) : dtype_(dtype) {
    view_.dtype = dtype;
    view_.ndim = static_cast<int>(shape.size());
    std::int64_t stride = layout.step;
    for (int axis = view_.ndim - 1; axis >= 0; --axis) {
      view_.shape[axis] = shape[axis];
      view_.stride[axis] = stride;
      stride = stride * shape[axis] + (axis == view_.ndim - 1 ? layout.gap : 0);
    }
    std::int64_t last = 0;
    for (int axis = 0; axis < view_.ndim; ++axis)
      last += std::max<std::int64_t>(shape[axis] - 1, 0) * view_.stride[axis];
    const std::size_t elements = size() == 0 ? 0 : static_cast<std::size_t>(layout.offset + last + 1);
    bytes_ = std::make_unique<unsigned char[]>(elements * bytes_of(dtype));
    std::memset(bytes_.get(), 0xff, elements * bytes_of(dtype));
    view_.data = bytes_.get() + layout.offset * static_cast<std::int64_t>(bytes_of(dtype));
  }

  operator const dlmkern_view*() const { return &view_; }  // as the C API takes it

  std::int64_t size() const {
    std::int64_t size = 1;
    for (int axis = 0; axis < view_.ndim; ++axis) size *= view_.shape[axis];
    return size;
  }

  template <class Value>
  Tensor& fill(Value value) {
    each([&](void* address) { store(address, value()); });
    return *this;
  }

  // FNV-1a over the elements.
  void add_to_hash() const {
    each([&](const void* address) {
      for (std::size_t i = 0; i < bytes_of(dtype_); ++i) {
        hash = (hash ^ static_cast<const unsigned char*>(address)[i]) * 1099511628211u;
      }
    });
  }

 private:
  template <class Body>
  void each(Body body) const {
    const auto extent = [&](int axis) { return axis < view_.ndim ? view_.shape[axis] : 1; };
    const auto stride = [&](int axis) { return axis < view_.ndim ? view_.stride[axis] : 0; };
    for (std::int64_t i = 0; i < extent(0); ++i) {
      for (std::int64_t j = 0; j < extent(1); ++j) {
        for (std::int64_t k = 0; k < extent(2); ++k) {
          for (std::int64_t l = 0; l < extent(3); ++l) {
            const std::int64_t element = i * stride(0) + j * stride(1) + k * stride(2) + l * stride(3);
            body(static_cast<unsigned char*>(view_.data) +
                 element * static_cast<std::int64_t>(bytes_of(dtype_)));
          }
        }
      }
    }
  }

  void store(void* address, double value) const {
    const auto put = [&](auto element) {
      std::memcpy(address, static_cast<const void*>(&element), sizeof element);
    };
    switch (dtype_) {
      case DLMKERN_FLOAT64:
        return put(value);
      case DLMKERN_FLOAT32:
        return put(static_cast<float>(value));
      case DLMKERN_BFLOAT16:
        return put(__float2bfloat16(static_cast<float>(value)));
      case DLMKERN_FLOAT16:
        return put(__float2half(static_cast<float>(value)));
      case DLMKERN_INT64:
        return put(static_cast<std::int64_t>(value));
      default:
        return put(static_cast<unsigned char>(value));
    }
  }

  int dtype_;
  dlmkern_view view_{};
  std::unique_ptr<unsigned char[]> bytes_;
};

class Workspace {
 public:
  explicit Workspace(std::size_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(256, (bytes + 255) / 256 * 256)) {
    std::memset(data_, 0xff, bytes);
  }
  ~Workspace() { std::free(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return bytes_ == 0 ? nullptr : data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  void* data_;
};

void check(const char* function, int error) {
  if (error == DLMKERN_OK) return;
  std::fprintf(stderr, "%s: error %d %s\n", function, error, cudaGetErrorString(cudaErrorUnknown));
  std::exit(EXIT_FAILURE);
}

// Mostly ordinary logits; sometimes banned ones, rarely a NaN or an infinity, which make their row undefined.
double logit() {
  const double kind = uniform();
  if (kind < 0.02) return -INFINITY;
  if (kind < 0.0201) return NAN;
  if (kind < 0.0202) return INFINITY;
  return 20 * uniform() - (kind < 0.5 ? 100 : 0);
}

void run_rows(int dtype, std::int64_t B, std::int64_t n, std::int64_t V, Layout layout) {
  const Tensor logits = std::move(Tensor(dtype, {B, n, V}, layout).fill(logit));
  const Tensor prev = std::move(Tensor(dtype, {B, n + 1, V}, kLayouts[V % 5]).fill(logit));
  const Tensor prev_rows =
      std::move(Tensor(DLMKERN_INT64, {B, n}).fill([&] { return std::floor(uniform() * (n + 3)) - 1; }));
  const Tensor token(DLMKERN_INT64, {B, n}, {2, 1, 0}), confidence(DLMKERN_FLOAT32, {B, n});
  const Tensor logsumexp(DLMKERN_FLOAT64, {B, n}, {3, 0, 0}), entropy(DLMKERN_FLOAT32, {B, n}, {1, 2, 0});
  const Tensor kl(DLMKERN_FLOAT64, {B, n});
  const std::int64_t banned = V > 1 ? V / 2 : -1;
  {
    const Workspace w(dlmkern_cuda_token_stats_workspace(B, n, V));
    check("token_stats", dlmkern_cuda_token_stats(logits, prev, prev_rows, banned, token, confidence,
                                                  logsumexp, entropy, kl, w.data(), w.bytes(), nullptr));
    for (const Tensor* output : {&token, &confidence, &logsumexp, &entropy, &kl}) output->add_to_hash();
    check("token_stats", dlmkern_cuda_token_stats(logits, nullptr, nullptr, -1, token, nullptr, logsumexp,
                                                  nullptr, nullptr, w.data(), w.bytes(), nullptr));
    token.add_to_hash();
    logsumexp.add_to_hash();
  }
  {
    const Tensor conflict(DLMKERN_FLOAT32, {B, n, n}, layout);
    check("conflict_matrix",
          dlmkern_cuda_conflict_matrix(logits, token, logsumexp, conflict, nullptr, 0, nullptr));
    conflict.add_to_hash();
  }
  for (const int strict : {0, 1}) {
    const Tensor mask =
        std::move(Tensor(DLMKERN_BOOL, {B, n}, {1, 1, 1}).fill([] { return uniform() < 0.8; }));
    const bool probabilities = strict == 1;  // the logits taken for them
    const auto each = [&](double value) {
      return std::move(Tensor(DLMKERN_FLOAT64, {B}).fill([=] { return value; }));
    };
    const Tensor low = each(0.05), high = each(0.4), gamma = each(-9),
                 selected(DLMKERN_BOOL, {B, n}, {2, 0, 0});
    const Workspace w(dlmkern_cuda_cap_select_workspace(B, n, V));
    check("cap_select",
          dlmkern_cuda_cap_select(
              logits, token, probabilities ? nullptr : static_cast<const dlmkern_view*>(logsumexp), mask, low,
              high, gamma, strict, selected, confidence, w.data(), w.bytes(), nullptr));
    selected.add_to_hash();
    confidence.add_to_hash();
  }
  {
    const std::int64_t k = std::min<std::int64_t>(V - (banned >= 0), 5);
    const Tensor ids(DLMKERN_INT64, {B, n, k}), logp(DLMKERN_FLOAT64, {B, n, k}, {1, 2, 0}),
        floor(DLMKERN_FLOAT64, {B, n});
    const Workspace w(dlmkern_cuda_topk_snapshot_workspace(B, n, V));
    check("topk_snapshot",
          dlmkern_cuda_topk_snapshot(logits, banned, ids, logp, floor, w.data(), w.bytes(), nullptr));
    check("topk_kl", dlmkern_cuda_topk_kl(ids, logp, ids, logp, floor, kl, nullptr));
    for (const Tensor* output : {&ids, &logp, &floor, &kl}) output->add_to_hash();
  }
}

void run_independent_set(std::int64_t B, std::int64_t n, Layout layout) {
  const auto often = [](double share) { return [=] { return uniform() < share; }; };
  const Tensor conflict = std::move(Tensor(DLMKERN_BOOL, {B, n, n}, layout).fill(often(0.1)));
  const Tensor priority = std::move(Tensor(DLMKERN_FLOAT32, {B, n}, {2, 0, 0}).fill([] {
    const double p = std::floor(uniform() * 20);
    return p == 0 ? NAN : p == 1 ? -INFINITY : p;
  }));
  const Tensor eligible = std::move(Tensor(DLMKERN_BOOL, {B, n}).fill(often(0.8)));
  const Tensor preselected = std::move(Tensor(DLMKERN_BOOL, {B, n}, {3, 0, 0}).fill(often(0.05)));
  const Tensor selected(DLMKERN_BOOL, {B, n});
  const Workspace w(dlmkern_cuda_independent_set_workspace(B, n, 1));
  check("independent_set", dlmkern_cuda_independent_set(conflict, priority, eligible, preselected, selected,
                                                        w.data(), w.bytes(), nullptr));
  selected.add_to_hash();
}

void run_depga_block(std::int64_t B, std::int64_t W, int reflect) {
  const auto value = [] { return uniform() < 0.02 ? (uniform() < 0.5 ? NAN : INFINITY) : uniform(); };
  const Tensor kl = std::move(Tensor(DLMKERN_FLOAT32, {B, W}, {2, 1, 0}).fill(value));
  const Tensor entropy = std::move(Tensor(DLMKERN_FLOAT64, {B, W}).fill(value));
  const Tensor remaining =
      std::move(Tensor(DLMKERN_INT64, {B}).fill([&] { return std::floor(uniform() * (2 * W + 2)); }));
  const Tensor lam = std::move(Tensor(DLMKERN_FLOAT64, {B}).fill([] { return 1.2; }));
  const Tensor l_min = std::move(Tensor(DLMKERN_INT64, {B}).fill([] { return 2; }));
  const Tensor l_max =
      std::move(Tensor(DLMKERN_INT64, {B}).fill([&] { return std::max<std::int64_t>(W - 1, 2); }));
  const Tensor length(DLMKERN_INT64, {B}, {2, 0, 0});
  const Workspace w(dlmkern_cuda_depga_block_workspace(B, W));
  check("depga_block", dlmkern_cuda_depga_block(kl, entropy, remaining, lam, l_min, l_max, reflect, length,
                                                w.data(), w.bytes(), nullptr));
  length.add_to_hash();
}

void run_confidence_select(int dtype, std::int64_t B, std::int64_t n, int rule) {
  // Few values, so that there are ties.
  const Tensor confidence = std::move(Tensor(dtype, {B, n}, {2, 1, 1}).fill([] {
    const double c = std::floor(uniform() * 20) / 19;
    return c == 0 ? NAN : c;
  }));
  const Tensor mask = std::move(Tensor(DLMKERN_BOOL, {B, n}, {3, 0, 1}).fill([] { return uniform() < 0.8; }));
  const double scale = rule == DLMKERN_RULE_SCHEDULE ? static_cast<double>(n) : 1;
  const Tensor parameter =
      std::move(Tensor(DLMKERN_FLOAT64, {B}, {2, 0, 0}).fill([&] { return uniform() * scale; }));
  const Tensor selected(DLMKERN_BOOL, {B, n}, {2, 0, 0});
  for (const dlmkern_view* given : {static_cast<const dlmkern_view*>(mask), {}}) {
    check("confidence_select",
          dlmkern_cuda_confidence_select(confidence, given, parameter, rule, selected, nullptr));
    selected.add_to_hash();
  }
}

void run_dapd_select(int dtype, std::int64_t B, std::int64_t M, Layout layout) {
  const auto often = [](double share) { return [=] { return uniform() < share; }; };
  // Few values, so that there are ties.
  const Tensor scores = std::move(Tensor(dtype, {B, M, M}, layout).fill([] {
    const double x = std::floor(uniform() * 100);
    return x == 0 ? NAN : x == 1 ? INFINITY : x == 2 ? -INFINITY : x;
  }));
  const Tensor confidence = std::move(Tensor(dtype, {B, M}, {2, 1, 1}).fill([] {
    const double c = std::floor(uniform() * 20) / 19;
    return c == 0 ? NAN : c;
  }));
  const Tensor valid = std::move(Tensor(DLMKERN_BOOL, {B, M}, {3, 0, 1}).fill(often(0.8)));
  const Tensor tau = std::move(Tensor(DLMKERN_FLOAT64, {B}, {2, 0, 0}).fill(uniform));
  const Tensor certain = std::move(Tensor(DLMKERN_FLOAT64, {B}).fill([] { return 0.95; }));
  const Tensor late = std::move(Tensor(DLMKERN_FLOAT64, {B}).fill([] { return 1; }));
  const Tensor selected(DLMKERN_BOOL, {B, M}, {2, 0, 0});
  const Workspace w(dlmkern_cuda_dapd_select_workspace(B, M));
  for (const int symmetric : {0, 1}) {
    const dlmkern_view* const given = symmetric == 0 ? static_cast<const dlmkern_view*>(valid) : nullptr;
    check("dapd_select", dlmkern_cuda_dapd_select(scores, confidence, given, tau, certain, late, symmetric,
                                                  selected, w.data(), w.bytes(), nullptr));
    selected.add_to_hash();
  }
}

void run_cover(int dtype, std::int64_t B, std::int64_t n) {
  const auto often = [](double share) { return [=] { return uniform() < share; }; };
  const auto some = [](double count) { return [=] { return std::floor(uniform() * count); }; };
  // Few values, so that there are ties.
  const auto value = [] {
    const double x = std::floor(uniform() * 20) - 1;
    return x == 18 ? NAN : x == 17 ? INFINITY : x;
  };
  const Tensor uncertainty = std::move(Tensor(dtype, {B, n}, {2, 1, 1}).fill(value));
  const Tensor influence = std::move(Tensor(DLMKERN_FLOAT64, {B, n}).fill(value));
  const Tensor drift = std::move(Tensor(dtype, {B, n}, {1, 3, 0}).fill(value));
  const Tensor eligible = std::move(Tensor(DLMKERN_BOOL, {B, n}, {3, 0, 1}).fill(often(0.8)));
  const Tensor most = std::move(Tensor(DLMKERN_INT64, {B}, {2, 0, 0}).fill(some(10)));
  const Tensor seeds(DLMKERN_BOOL, {B, n}, {2, 0, 0}), score(DLMKERN_FLOAT64, {B, n}, {1, 2, 1});
  for (const int additive : {0, 1}) {
    for (const int above_mean : {0, 1}) {
      const dlmkern_view* const given = additive == 0 ? static_cast<const dlmkern_view*>(influence) : nullptr;
      check("cover_seeds", dlmkern_cuda_cover_seeds(uncertainty, given, drift, eligible, most, additive,
                                                    above_mean, seeds, score, nullptr));
      seeds.add_to_hash();
      score.add_to_hash();
    }
  }
  const Tensor token = std::move(Tensor(DLMKERN_INT64, {B, n}, {2, 1, 0}).fill(some(3)));
  const Tensor predicted = std::move(Tensor(DLMKERN_INT64, {B, n}).fill(some(3)));
  const Tensor remasks = std::move(Tensor(DLMKERN_INT64, {B, n}, {3, 0, 0}).fill(some(2)));
  const Tensor verdict(DLMKERN_INT64, {B, n}, {2, 0, 1});
  check("cover_verify", dlmkern_cuda_cover_verify(uncertainty, token, predicted, eligible, remasks, 9.0, 1,
                                                  verdict, nullptr));
  verdict.add_to_hash();
}

struct CacheShape {
  std::int64_t B, H, L, n, d;
};

void run_kv_block_write(int dtype, CacheShape shape, Layout layout) {
  const auto [B, H, L, n, d] = shape;
  const auto value = [] { return uniform() - 0.5; };
  const Tensor k_cache = std::move(Tensor(dtype, {B, H, L, d}, layout).fill(value));
  const Tensor v_cache = std::move(Tensor(dtype, {B, H, L, d}, layout).fill(value));
  const Tensor k = std::move(Tensor(dtype, {B, H, n, d}, layout).fill(value));
  const Tensor v = std::move(Tensor(dtype, {B, H, n, d}).fill(value));
  const int table_dtype = dtype == DLMKERN_FLOAT64 ? DLMKERN_FLOAT64 : DLMKERN_FLOAT32;
  const Tensor cos = std::move(Tensor(table_dtype, {L + 1, d}, layout).fill(value));
  const Tensor sin = std::move(Tensor(table_dtype, {L + 1, d}).fill(value));
  const Tensor drift(DLMKERN_FLOAT32, {4, B, n}, {2, 1, 1});
  // Distinct, some outside the cache.
  std::int64_t place = 0;
  const Tensor positions =
      std::move(Tensor(DLMKERN_INT64, {B, n}, {2, 0, 0}).fill([&] { return place++ % (L + 2) - 1; }));
  const dlmkern_view* const absent = nullptr;
  check("kv_block_write",
        dlmkern_cuda_kv_block_write(k_cache, v_cache, k, v, positions, absent, absent, drift, nullptr));
  for (const Tensor* output : {&k_cache, &v_cache, &drift}) output->add_to_hash();
  if (d % 2 != 0) return;
  for (const dlmkern_view* compared : {static_cast<const dlmkern_view*>(drift), absent}) {
    check("kv_block_write",
          dlmkern_cuda_kv_block_write(k_cache, v_cache, v, k, positions, cos, sin, compared, nullptr));
    for (const Tensor* output : {&k_cache, &v_cache, &drift}) output->add_to_hash();
  }
}

// Several rows may be at the same place, some at none. There are two key heads.
void run_diagonal_correction(int dtype, CacheShape shape, Layout layout) {
  const auto [B, heads, L, n, d] = shape;
  const auto value = [] { return uniform() - 0.5; };
  const auto some = [&](int of, std::vector<std::int64_t> sizes) {
    return std::move(Tensor(of, std::move(sizes), layout).fill(value));
  };
  const int real = dtype == DLMKERN_FLOAT64 ? DLMKERN_FLOAT64 : DLMKERN_FLOAT32;
  const Tensor out = some(dtype, {B, heads, n, d}), q = some(dtype, {B, heads, n, d});
  const Tensor k = some(dtype, {B, 2, n, d}), v = some(dtype, {B, 2, n, d});
  const Tensor k_cached = some(dtype, {B, 2, L, d}), v_cached = some(dtype, {B, 2, L, d});
  const Tensor lse = some(real, {B, heads, n});
  const Tensor seeds =
      std::move(Tensor(DLMKERN_BOOL, {B, n}, {2, 1, 1}).fill([] { return uniform() < 0.6; }));
  const Tensor lengths =
      std::move(Tensor(DLMKERN_INT64, {B}).fill([&] { return std::floor(uniform() * (L + 4)) - 1; }));
  const Tensor positions = std::move(
      Tensor(DLMKERN_INT64, {B, n}, {2, 0, 0}).fill([&] { return std::floor(uniform() * (L + 2)) - 1; }));
  for (const double recompute_below : {0.0, 0.9, static_cast<double>(INFINITY)}) {
    for (const int shift : {0, 1}) {
      const bool placed = shift == 1 || L != n;
      check("diagonal_correction",
            dlmkern_cuda_diagonal_correction(out, lse, q, k, v, k_cached, v_cached, seeds,
                                             shift == 0 ? static_cast<const dlmkern_view*>(lengths) : nullptr,
                                             placed ? static_cast<const dlmkern_view*>(positions) : nullptr,
                                             shift, 0.7, recompute_below, nullptr));
      out.add_to_hash();
      lse.add_to_hash();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return EXIT_FAILURE;
  dlmkern::emulator::settings.order = static_cast<dlmkern::emulator::Order>(std::atoi(argv[1]));
  dlmkern::emulator::settings.seed = std::strtoull(argv[2], nullptr, 10);

  const std::int64_t vocabularies[] = {1, 2, 3, 31, 257, 1024, 1025, 1031};
  int layout = 0;
  for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32, DLMKERN_BFLOAT16, DLMKERN_FLOAT16}) {
    for (const std::int64_t V : vocabularies) run_rows(dtype, 2, 3, V, kLayouts[layout++ % 5]);
    run_rows(dtype, 0, 3, 7, kLayouts[0]);
    run_rows(dtype, 2, 0, 7, kLayouts[0]);
    run_rows(dtype, 1, 1, 9001, kLayouts[layout++ % 5]);  // several splits
  }
  run_rows(DLMKERN_BFLOAT16, 1, 40, 33, kLayouts[1]);
  for (const std::int64_t n : {0, 1, 31, 33, 70}) run_independent_set(2, n, kLayouts[layout++ % 4]);
  run_independent_set(1, 640, kLayouts[0]);  // beyond shared memory
  for (const std::int64_t W : {0, 1, 2, 5, 128, 200}) run_depga_block(3, W, static_cast<int>(W % 2));
  run_depga_block(1, 3200, 0);  // beyond shared memory
  for (const int rule :
       {DLMKERN_RULE_THRESHOLD, DLMKERN_RULE_FACTOR, DLMKERN_RULE_SCHEDULE, DLMKERN_RULE_FACTOR_OFFICIAL}) {
    for (const std::int64_t n : {0, 1, 2, 31, 64, 65}) run_confidence_select(DLMKERN_FLOAT32, 2, n, rule);
    run_confidence_select(DLMKERN_FLOAT64, 2, 1100, rule);  // several positions a thread
  }
  for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32}) {
    for (const std::int64_t M : {0, 1, 2, 31, 64, 65}) run_dapd_select(dtype, 2, M, kLayouts[layout++ % 4]);
    run_dapd_select(dtype, 0, 3, kLayouts[0]);
  }
  run_dapd_select(DLMKERN_FLOAT32, 1, 600, kLayouts[0]);  // a scan beyond shared memory
  for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32, DLMKERN_BFLOAT16, DLMKERN_FLOAT16}) {
    for (const Layout& each : kLayouts) {
      if (each.gap > 100) continue;  // of a row of tokens
      run_kv_block_write(dtype, {2, 2, 5, 3, 32}, each);
      run_kv_block_write(dtype, {1, 3, 4, 2, 6}, each);
    }
    run_kv_block_write(dtype, {1, 2, 4, 2, 32}, {1, 0, 1});    // aligned but for the start
    run_kv_block_write(dtype, {1, 2, 4, 2, 24}, kLayouts[0]);  // or for half a row of 16 bits
    run_kv_block_write(dtype, {2, 9, 5, 4, 64}, kLayouts[0]);  // several elements a thread
    run_kv_block_write(dtype, {1, 2, 3, 5, 5}, kLayouts[0]);
    for (const CacheShape& empty :
         {CacheShape{0, 2, 3, 2, 4}, CacheShape{2, 0, 3, 2, 4}, CacheShape{2, 2, 0, 2, 4},
          CacheShape{2, 2, 3, 0, 4}, CacheShape{2, 2, 3, 2, 0}}) {
      run_kv_block_write(dtype, empty, kLayouts[0]);
    }
  }
  for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32}) {
    for (const std::int64_t n : {0, 1, 2, 31, 64, 65}) run_cover(dtype, 2, n);
    run_cover(dtype, 0, 3);
    run_cover(dtype, 1, 1100);  // several positions a thread
  }
  for (const int dtype : {DLMKERN_FLOAT64, DLMKERN_FLOAT32, DLMKERN_BFLOAT16, DLMKERN_FLOAT16}) {
    for (const Layout& each : kLayouts) {
      if (each.gap < 100) run_diagonal_correction(dtype, {2, 4, 5, 5, 6}, each);
    }
    run_diagonal_correction(dtype, {1, 2, 70, 3, 130}, kLayouts[0]);  // a second walk over the keys
    for (const CacheShape& empty : {CacheShape{0, 2, 3, 2, 4}, CacheShape{2, 0, 3, 2, 4},
                                    CacheShape{2, 2, 0, 2, 4}, CacheShape{2, 2, 3, 0, 4}}) {
      run_diagonal_correction(dtype, empty, kLayouts[0]);
    }
  }
  run_diagonal_correction(DLMKERN_FLOAT32, {1, 2, 2, 260, 1}, kLayouts[0]);  // several blocks a head
  std::printf("%016llx\n", static_cast<unsigned long long>(hash));
  return EXIT_SUCCESS;
}
