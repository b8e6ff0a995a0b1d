// A fiber: a stack and the place where its execution stopped. Switching costs a few nanoseconds on x86-64;
// other processors use ucontext, which is slower and otherwise the same.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__) && !defined(SIMT_USE_UCONTEXT)
#define SIMT_USE_UCONTEXT
#endif
#if defined(SIMT_USE_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kGuardBytes = 4096; // a stack overflow faults instead of corrupting a neighbour

#if !defined(SIMT_USE_UCONTEXT)
extern "C" void simt_switch_stack(void **save, void *load);
__asm__(".text\n.weak simt_switch_stack\n.hidden simt_switch_stack\n.type simt_switch_stack,@function\n"
        "simt_switch_stack:\n push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
        " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
#endif

class Fiber {
public:
  // (Re)starts the fiber at `entry`, which must never return.
  void start(void (*entry)()) {
    if (!stack_)
      allocate();
#if !defined(SIMT_USE_UCONTEXT)
    void **top = reinterpret_cast<void **>(stack_ + kGuardBytes + kStackBytes - 64);
    *--top = nullptr; // entry sees a stack aligned as after a call
    *--top = reinterpret_cast<void *>(entry);
    for (int callee_saved = 0; callee_saved < 6; callee_saved++)
      *--top = nullptr;
    pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_ + kGuardBytes;
    context_.uc_stack.ss_size = kStackBytes;
    makecontext(&context_, entry, 0);
#endif
  }

  friend void switch_fiber(Fiber &from, Fiber &to) {
#if !defined(SIMT_USE_UCONTEXT)
    simt_switch_stack(&from.pointer_, to.pointer_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
  }

private:
  void allocate() {
    void *memory =
        mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0)
      abort();
    stack_ = static_cast<char *>(memory);
  }

  char *stack_ = nullptr; // kept for the life of the process: fibers are reused by every launch
#if !defined(SIMT_USE_UCONTEXT)
  void *pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

} // namespace simt
