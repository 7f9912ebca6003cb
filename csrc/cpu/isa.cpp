#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "dlmkern.h"

namespace dlmkern {
namespace {

#if defined(DLMKERN_HAS_AVX2)
// Every processor with AVX2 has F16C, which not all compilers can ask for.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

struct Isa {
  const char* name;
  bool (*supported)();
  const RowKernelTable* rows;
  const ScoreKernelTable* scores;
};

// The best first.
const Isa kIsas[] = {
#if defined(DLMKERN_HAS_AVX512)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     },
     &avx512::kTable, &avx512::kScoreTable},
#endif
#if defined(DLMKERN_HAS_AVX2)
    {"avx2", has_avx2, &avx2::kTable, &avx2::kScoreTable},
#endif
#if defined(DLMKERN_HAS_AVX512_ON_AVX2)
    {"avx512-on-avx2", has_avx2, &avx512_on_avx2::kTable, &avx512_on_avx2::kScoreTable},
#endif
    {"portable", [] { return true; }, &portable::kTable, &portable::kScoreTable},
};

const char* const kKnownNames[] = {"avx512", "avx2", "portable"};

// Returns an error code if `name` is not to be had.
int look_up(const char* name, const Isa** found) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) == 0) {
      if (!isa.supported()) return DLMKERN_ERROR_UNAVAILABLE;
      *found = &isa;
      return DLMKERN_OK;
    }
  }
  for (const char* known : kKnownNames) {
    if (std::strcmp(known, name) == 0) return DLMKERN_ERROR_UNAVAILABLE;
  }
  return DLMKERN_ERROR_VALUE;
}

// What the environment names, NULL if that is not to be had; else the best.
const Isa* choose() {
  const char* const name = std::getenv("DLMKERN_CPU_ISA");
  const Isa* isa = nullptr;
  if (name != nullptr && *name != '\0') {
    look_up(name, &isa);
    return isa;
  }
  for (const Isa& candidate : kIsas) {
    if (candidate.supported()) return &candidate;
  }
  return nullptr;  // not reached: the portable one is always supported
}

std::atomic<const Isa*>& current() {
  static std::atomic<const Isa*> isa = choose();
  return isa;
}

}  // namespace

int check_isa() { return current().load() == nullptr ? DLMKERN_ERROR_UNAVAILABLE : DLMKERN_OK; }

const RowKernels& row_kernels(int32_t dtype) {
  const RowKernelTable& table = *current().load()->rows;
  if (dtype == DLMKERN_BFLOAT16) return table.bfloat16;
  return dtype == DLMKERN_FLOAT16 ? table.float16 : table.float32;
}

const ScoreKernelTable& score_kernels() { return *current().load()->scores; }

}  // namespace dlmkern

extern "C" const char* dlmkern_cpu_isa(void) {
  const dlmkern::Isa* const isa = dlmkern::current().load();
  return isa != nullptr ? isa->name : "unavailable";
}

extern "C" int dlmkern_cpu_set_isa(const char* name) {
  if (name == nullptr) return DLMKERN_ERROR_NULL;
  const dlmkern::Isa* isa = nullptr;
  const int error = dlmkern::look_up(name, &isa);
  if (error == DLMKERN_OK) dlmkern::current().store(isa);
  return error;
}
