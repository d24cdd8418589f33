/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "format/base/err.h"

#if defined(__SANITIZE_ADDRESS__)
#define FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FIBER_ASAN 1
#endif
#endif

#ifdef FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#define STACK_BYTES (512u << 10)
#define GUARD_BYTES (16u << 10)

struct stack {
    struct stack *next;
    uint8_t *p;
};

struct fiber {
    ucontext_t context, outside;
    struct stack *stack;
    void (*main)(void *arg);
    void *arg;
    bool over;
    void *fake; /* the address sanitizer's */
    const void *outside_stack;
    size_t outside_bytes;
};

static struct stack *spare;
static struct fiber *running;

static struct stack *stack_take(void)
{
    struct stack *s = spare;
    if (s) {
        spare = s->next;
        return s;
    }
    s = calloc(1, sizeof *s);
    check(s);
    s->p = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(s->p != MAP_FAILED && mprotect(s->p, GUARD_BYTES, PROT_NONE) == 0);
    return s;
}

static void arrived(struct fiber *f)
{
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(f->fake, &f->outside_stack, &f->outside_bytes);
#else
    (void)f;
#endif
}

static void leave(struct fiber *f)
{
    running = NULL;
#ifdef FIBER_ASAN
    __sanitizer_start_switch_fiber(f->over ? NULL : &f->fake, f->outside_stack, f->outside_bytes);
#endif
    check(swapcontext(&f->context, &f->outside) == 0);
    arrived(f);
}

static void begin(void)
{
    struct fiber *f = running;
    arrived(f);
    f->main(f->arg);
    f->over = true;
    leave(f);
}

struct fiber *fiber_new(void (*main)(void *arg), void *arg)
{
    struct fiber *f = calloc(1, sizeof *f);
    check(f);
    f->stack = stack_take();
    f->main = main;
    f->arg = arg;
    check(getcontext(&f->context) == 0);
    f->context.uc_stack.ss_sp = f->stack->p + GUARD_BYTES;
    f->context.uc_stack.ss_size = STACK_BYTES - GUARD_BYTES;
    f->context.uc_link = NULL;
    makecontext(&f->context, begin, 0);
    return f;
}

void fiber_resume(struct fiber *f)
{
    check(!running && !f->over);
    running = f;
#ifdef FIBER_ASAN
    void *fake = NULL;
    __sanitizer_start_switch_fiber(&fake, f->stack->p + GUARD_BYTES, STACK_BYTES - GUARD_BYTES);
#endif
    check(swapcontext(&f->outside, &f->context) == 0);
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#endif
}

void fiber_wait(struct fiber *f)
{
    check(running == f);
    leave(f);
}

bool fiber_over(const struct fiber *f)
{
    return f->over;
}

bool fiber_inside(void)
{
    return running != NULL;
}

void fiber_free(struct fiber *f)
{
    check(f->over && running != f);
    f->stack->next = spare;
    spare = f->stack;
    free(f);
}
