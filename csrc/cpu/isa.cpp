#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "dlmkern.h"

namespace dlmkern {
namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  const RowKernelTable* kernels;
};

// The best first.
const Isa kIsas[] = {
#if defined(DLMKERN_HAS_AVX512)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     },
     &avx512::kTable},
#endif
#if defined(DLMKERN_HAS_AVX2)
    {"avx2",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     },
     &avx2::kTable},
#endif
    {"portable", [] { return true; }, &portable::kTable},
};

const char* const kKnownNames[] = {"avx512", "avx2", "portable"};

const Isa* best() {
  for (const Isa& isa : kIsas) {
    if (isa.supported()) return &isa;
  }
  return nullptr;  // not reached: portable always is
}

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

std::atomic<const Isa*>& current() {
  static std::atomic<const Isa*> isa = [] {
    const Isa* chosen = best();
    const char* const name = std::getenv("DLMKERN_CPU_ISA");
    if (name != nullptr) look_up(name, &chosen);
    return chosen;
  }();
  return isa;
}

}  // namespace

const RowKernels& row_kernels(int32_t dtype) {
  const RowKernelTable& table = *current().load()->kernels;
  if (dtype == DLMKERN_BFLOAT16) return table.bfloat16;
  return dtype == DLMKERN_FLOAT16 ? table.float16 : table.float32;
}

}  // namespace dlmkern

extern "C" const char* dlmkern_cpu_isa(void) { return dlmkern::current().load()->name; }

extern "C" int dlmkern_cpu_set_isa(const char* name) {
  if (name == nullptr) return DLMKERN_ERROR_NULL;
  const dlmkern::Isa* isa = nullptr;
  const int error = dlmkern::look_up(name, &isa);
  if (error == DLMKERN_OK) dlmkern::current().store(isa);
  return error;
}
