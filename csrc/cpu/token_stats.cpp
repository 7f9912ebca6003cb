#include <vector>

#include "check.h"
#include "parallel.h"
#include "row_scan.h"

namespace dlmkern {
namespace {

// Rows are scanned in sections that are joined in order, so that the result does not depend on the number of
// threads.
constexpr int64_t kSection = 32768;

struct Arguments {
  const dlmkern_view& logits;
  const dlmkern_view *prev_logits, *prev_rows;
  int64_t banned_token;
  const dlmkern_view *token, *confidence, *logsumexp, *entropy, *kl;

  ScanRequest request() const {
    ScanRequest request;
    request.mass = confidence != nullptr || logsumexp != nullptr || entropy != nullptr || kl != nullptr;
    request.energy = entropy != nullptr;
    request.cross = kl != nullptr && prev_logits != nullptr;
    request.in_float64 = logits.shape[2] <= kShortRow;
    return request;
  }

  // The row of prev_logits that belongs to a position, or -1.
  int64_t prev_row(int64_t b, int64_t i) const {
    if (prev_logits == nullptr) return -1;
    if (prev_rows == nullptr) return i;
    const int64_t r = read_int64(*prev_rows, b, i);
    return r >= 0 && r < prev_logits->shape[1] ? r : -1;
  }

  // The logits [begin, end) of a row, without the banned one.
  template <class T>
  RowScan scan(int64_t b, int64_t i, int64_t begin, int64_t end) const {
    ScanRequest wanted = request();
    const int64_t r = prev_row(b, i);
    wanted.cross = wanted.cross && r >= 0;
    const Row<T> row = row_of<T>(logits, b, i);
    RowScanner<T> scanner(row, wanted.cross ? row_of<T>(*prev_logits, b, r) : row, wanted);
    if (banned_token < begin || banned_token >= end) return scanner.scan(begin, end);
    RowScan result = scanner.scan(begin, banned_token);
    result.join(scanner.scan(banned_token + 1, end));
    return result;
  }

  void write(int64_t b, int64_t i, const RowScan& row) const {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const bool defined = row.defined();
    if (token != nullptr) write_int64(*token, defined ? row.token : -1, b, i);
    if (confidence != nullptr) write_float(*confidence, defined ? row.confidence() : nan, b, i);
    if (logsumexp != nullptr) write_float(*logsumexp, defined ? row.logsumexp() : nan, b, i);
    if (entropy != nullptr) write_float(*entropy, defined ? row.entropy() : nan, b, i);
    if (kl != nullptr) write_float(*kl, defined && prev_row(b, i) >= 0 ? row.kl() : nan, b, i);
  }
};

template <class T>
void run(const Arguments& a) {
  const int64_t n = a.logits.shape[1], V = a.logits.shape[2];
  const int64_t rows = a.logits.shape[0] * n, sections = (V + kSection - 1) / kSection;
  const bool worth = rows * V > kParallelWork;
  if (rows >= thread_count() || sections == 1) {
#pragma omp parallel for schedule(static) if (worth)
    for (int64_t r = 0; r < rows; ++r) {
      RowScan row;
      for (int64_t begin = 0; begin < V; begin += kSection) {
        row.join(a.scan<T>(r / n, r % n, begin, std::min(begin + kSection, V)));
      }
      a.write(r / n, r % n, row);
    }
    return;
  }
  std::vector<RowScan> parts(static_cast<size_t>(rows * sections));
#pragma omp parallel for schedule(static) if (worth)
  for (int64_t p = 0; p < rows * sections; ++p) {
    const int64_t r = p / sections, begin = p % sections * kSection;
    parts[p] = a.scan<T>(r / n, r % n, begin, std::min(begin + kSection, V));
  }
  for (int64_t r = 0; r < rows; ++r) {
    RowScan row;
    for (int64_t s = 0; s < sections; ++s) row.join(parts[r * sections + s]);
    a.write(r / n, r % n, row);
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_token_stats(const dlmkern_view* logits, const dlmkern_view* prev_logits,
                                       const dlmkern_view* prev_rows, int64_t banned_token,
                                       const dlmkern_view* token, const dlmkern_view* confidence,
                                       const dlmkern_view* logsumexp, const dlmkern_view* entropy,
                                       const dlmkern_view* kl) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1], V = logits->shape[2];
  if (prev_logits != nullptr) {
    const int64_t m = prev_rows == nullptr ? n : kAnySize;
    DLMKERN_TRY(check_input(prev_logits, dtype_bit(logits->dtype), {B, m, V}));
    DLMKERN_TRY(check_optional_input(prev_rows, kInt64, {B, n}));
  } else if (prev_rows != nullptr) {
    return DLMKERN_ERROR_NULL;
  }
  if (banned_token < -1 || banned_token >= V) return DLMKERN_ERROR_VALUE;
  DLMKERN_TRY(check_optional_output(token, kInt64, {B, n}));
  for (const dlmkern_view* statistic : {confidence, logsumexp, entropy, kl}) {
    DLMKERN_TRY(check_optional_output(statistic, kReal, {B, n}));
  }
  DLMKERN_TRY(check_isa());
  return guarded([&] {
    const Arguments arguments{*logits,   prev_logits, prev_rows, banned_token, token, confidence,
                              logsumexp, entropy,     kl};
    with_float_type(logits->dtype,
                    [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(arguments); });
    return DLMKERN_OK;
  });
}
