#include "fibre.h"

#include <cstdint>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef DLMKERN_FIBRE_UCONTEXT
// void dlmkern_switch_stack(void** saved, void* next): the System V ABI's callee-saved registers stay on the
// stack.
asm(R"(
.text
.hidden dlmkern_switch_stack
.globl dlmkern_switch_stack
.type dlmkern_switch_stack, @function
dlmkern_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dlmkern_switch_stack, . - dlmkern_switch_stack
)");
extern "C" void dlmkern_switch_stack(void** saved, void* next);
#endif

namespace dlmkern::emulator {
namespace {

constexpr int kSavedRegisters = 6;

// The two sides of the switch in progress.
thread_local Fibre* leaving = nullptr;
thread_local Fibre* entering = nullptr;

}  // namespace

void Fibre::prepare(void* stack, std::size_t stack_size, void (*entry)()) {
  entry_ = entry;
  stack_ = stack;
  stack_size_ = stack_size;
  fake_stack_ = nullptr;
#ifdef __SANITIZE_ADDRESS__
  // Frames that an earlier fibre abandoned have left red zones behind.
  __asan_unpoison_memory_region(stack, stack_size);
#endif
#ifdef DLMKERN_FIBRE_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = stack_size;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fibre::begin, 0);
#else
  // What the first switch pops: the registers, the address of begin, and a null return address below it,
  // which also leaves the stack aligned as after a call.
  const auto top = (reinterpret_cast<std::uintptr_t>(stack) + stack_size) & ~std::uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top) - (kSavedRegisters + 2);
  std::memset(frame, 0, (kSavedRegisters + 2) * sizeof(void*));
  frame[kSavedRegisters] = reinterpret_cast<void*>(&Fibre::begin);
  stack_pointer_ = frame;
#endif
}

void Fibre::switch_to(Fibre& next, [[maybe_unused]] bool for_good) {
  leaving = this;
  entering = &next;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, next.stack_, next.stack_size_);
#endif
#ifdef DLMKERN_FIBRE_UCONTEXT
  swapcontext(&context_, &next.context_);
#else
  dlmkern_switch_stack(&stack_pointer_, next.stack_pointer_);
#endif
  arrive();
}

void Fibre::arrive() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &leaving->stack_, &leaving->stack_size_);
#endif
}

void Fibre::begin() {
  entering->arrive();
  entering->entry_();
  __builtin_trap();
}

}  // namespace dlmkern::emulator
