// Fibres: flows of control with stacks of their own, which run until they switch away by themselves.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(DLMKERN_EMULATOR_UCONTEXT)
#define DLMKERN_FIBRE_UCONTEXT 1
#include <ucontext.h>
#endif

namespace dlmkern::emulator {

// Where a suspended flow of control goes on. The caller of switch_to fills its own in; others begin with
// prepare.
class Fibre {
 public:
  // The next switch here calls entry() on the given stack. entry must leave by switch_to(..., true), never
  // return.
  void prepare(void* stack, std::size_t stack_size, void (*entry)());

  // Suspends the running flow as *this and goes on with next; for_good says that *this is never resumed.
  void switch_to(Fibre& next, bool for_good = false);

 private:
  static void begin();
  void arrive();

#ifdef DLMKERN_FIBRE_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
  void (*entry_)() = nullptr;
  // For AddressSanitizer, which must know the bounds of the running stack.
  const void* stack_ = nullptr;
  std::size_t stack_size_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace dlmkern::emulator
