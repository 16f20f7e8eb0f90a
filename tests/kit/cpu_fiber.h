/* Fibers: stacks that take turns on one OS thread, for cpu_cuda.h. On x86-64 a change of stack
 * is a dozen instructions; elsewhere (or with XGPT_UCONTEXT) it is the C library's, which asks the
 * system at every change. AddressSanitizer is told of every change. */
#ifndef XGPT_CPU_FIBER_H
#define XGPT_CPU_FIBER_H

#include <cstddef>
#include <cstdint>

#include <sys/mman.h>

#if defined(__x86_64__) && !defined(XGPT_UCONTEXT)
#define XGPT_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define XGPT_LEAVE_STACK(kept, to) __sanitizer_start_switch_fiber(kept, (to).stack, (to).bytes)
#define XGPT_ENTER_STACK(kept, from, bytes) __sanitizer_finish_switch_fiber(kept, from, bytes)
#else
#define XGPT_LEAVE_STACK(kept, to) (void)0
#define XGPT_ENTER_STACK(kept, from, bytes) (void)0
#endif

namespace cpu_cuda {

constexpr size_t STACK_BYTES = 256 << 10;

/* A stack and where it stopped. Of the OS thread's own fiber the stack is the thread's. */
struct Fiber {
#ifdef XGPT_OWN_SWITCH
    void *stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    const void *stack = nullptr;  // kept from one launch to the next
    size_t bytes = 0;
    void *fake_stack = nullptr;  // of AddressSanitizer
};

#ifdef XGPT_OWN_SWITCH
/* Keeps the registers that a call must preserve on the stack that is left. */
extern "C" void xgpt_switch_stack(void **from, void *to);
__asm__(R"(
    .text
    .weak xgpt_switch_stack
    .hidden xgpt_switch_stack
    .type xgpt_switch_stack, @function
xgpt_switch_stack:
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
    .size xgpt_switch_stack, .-xgpt_switch_stack
)");
#endif

inline void switch_stack(Fiber &from, Fiber &to) {
#ifdef XGPT_OWN_SWITCH
    xgpt_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
}

/* From one fiber to another; returns when something changes back. */
inline void change(Fiber &from, Fiber &to) {
    XGPT_LEAVE_STACK(&from.fake_stack, to);
    switch_stack(from, to);
    XGPT_ENTER_STACK(from.fake_stack, nullptr, nullptr);
}

/* The first thing a fiber does. */
inline void entered(Fiber &by) {
    (void)by;
    XGPT_ENTER_STACK(nullptr, &by.stack, &by.bytes);
}

/* The last thing a fiber does. */
inline void leave(Fiber &from, Fiber &to) {
    XGPT_LEAVE_STACK(nullptr, to);
    switch_stack(from, to);
}

/* Makes the fiber ready to begin with `body`, which must not return. */
inline void prepare(Fiber &fiber, void (*body)()) {
    if (!fiber.stack) {
        fiber.stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        fiber.bytes = STACK_BYTES;
    }
    char *base = static_cast<char *>(const_cast<void *>(fiber.stack));
#ifdef XGPT_OWN_SWITCH
    /* As if `body` had been called: seven words for the switch to take, and the stack 8 off 16. */
    void **top = reinterpret_cast<void **>(base + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(body);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = base;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
#endif
}

}  // namespace cpu_cuda
#endif
