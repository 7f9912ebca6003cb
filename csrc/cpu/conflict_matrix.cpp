#include <limits>
#include <vector>

#include "check.h"
#include "parallel.h"
#include "tensor.h"

namespace dlmkern {
namespace {

// log p_i(token_j) for all i and j of one sequence, row by row: the logits of a row share pages, a column's
// do not.
template <class T>
void gather_sequence(const dlmkern_view& logits, const dlmkern_view& token, const dlmkern_view& logsumexp,
                     int64_t b, double* gathered) {
  const int64_t n = logits.shape[1], V = logits.shape[2];
  const bool worth = n * n > kParallelWork / 8;
#pragma omp parallel for if (worth)
  for (int64_t i = 0; i < n; ++i) {
    const Row<T> row = row_of<T>(logits, b, i);
    const double lse = read_float(logsumexp, b, i);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t v = read_int64(token, b, j);
      gathered[i * n + j] = v >= 0 && v < V ? row[v] - lse : std::numeric_limits<double>::quiet_NaN();
    }
  }
}

}  // namespace
}  // namespace dlmkern

using namespace dlmkern;

extern "C" int dlmkern_cpu_conflict_matrix(const dlmkern_view* logits, const dlmkern_view* token,
                                           const dlmkern_view* logsumexp, const dlmkern_view* conflict) {
  DLMKERN_TRY(check_rows(logits));
  const int64_t B = logits->shape[0], n = logits->shape[1];
  DLMKERN_TRY(check_input(token, kInt64, {B, n}));
  DLMKERN_TRY(check_input(logsumexp, kReal, {B, n}));
  DLMKERN_TRY(check_output(conflict, kFloat32, {B, n, n}));
  if (B == 0 || n == 0) return DLMKERN_OK;
  return guarded([&] {
    std::vector<double> gathered(static_cast<size_t>(n * n));
    for (int64_t b = 0; b < B; ++b) {
      with_float_type(logits->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        gather_sequence<T>(*logits, *token, *logsumexp, b, gathered.data());
      });
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          store(address_of<float>(*conflict, b, i, j),
                static_cast<float>(gathered[i * n + j] + gathered[j * n + i]));
        }
      }
    }
    return DLMKERN_OK;
  });
}
