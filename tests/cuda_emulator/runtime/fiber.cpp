// Stacks of fibers and the switch between them.
#include <sys/mman.h>

#include "machine.h"

#ifdef __x86_64__
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#else
#include <ucontext.h>
extern "C" void emu_switch(void** save, void* to) {
  ucontext_t own;
  *save = &own;
  swapcontext(&own, static_cast<ucontext_t*>(to));
}
#endif

namespace emu {

uint8_t* take_stack() {
  auto& free = machine.free_stacks;
  if (free.empty()) {
    constexpr size_t COUNT = 256;
    auto* slab = static_cast<uint8_t*>(
        mmap(nullptr, COUNT * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (slab == MAP_FAILED) fail("no memory for stacks");
    for (size_t i = COUNT; i-- > 0;) free.push_back(slab + i * STACK);
  }
  uint8_t* stack = free.back();
  free.pop_back();
  memcpy(stack, &CANARY, sizeof CANARY);
  return stack;
}

#ifdef __x86_64__
void prepare(Thread* thread, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(thread->stack + STACK - 64);
  *--top = nullptr;  // the return address of `entry`, which never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  thread->stack_pointer = top;
}
#else
void prepare(Thread* thread, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(thread->stack + STACK - sizeof(ucontext_t) - 64);
  getcontext(context);
  context->uc_stack.ss_sp = thread->stack + 64;
  context->uc_stack.ss_size = STACK - sizeof(ucontext_t) - 128;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  thread->stack_pointer = context;
}
#endif

}  // namespace emu
