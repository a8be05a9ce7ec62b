/* What it costs to intercept calls, without MPI: `METHOD FOLDER`, with a file in FOLDER. METHOD says how they are intercepted:
 *
 * nothing: not at all. With the library made by -DWRAPPER preloaded: by functions in front of those of the C library.
 * seccomp: by a filter that traps calls on files and clocks (SECCOMP_RET_TRAP), except from one page of this program.
 * dispatch: by syscall user dispatch, which traps every call, except from this page.
 * counters: reads of the time stamp counter (PR_SET_TSC) and of CPUID (ARCH_SET_CPUID) are measured, and trapped.
 *
 * Prints `KIND: MICROSECONDS`, the processor time of one call, and ` not seen` behind it if no such call was intercepted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#ifndef __x86_64__
#error "registers and instructions here are those of x86-64"
#endif

#ifdef WRAPPER

unsigned long intercepted_calls;

#define WRAP(type, name, parameters, ...)                                                                              \
    type name parameters                                                                                               \
    {                                                                                                                  \
        static type(*real) parameters;                                                                                 \
        if (!real)                                                                                                     \
            real = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                                        \
        intercepted_calls++;                                                                                           \
        return real(__VA_ARGS__);                                                                                      \
    }

WRAP(ssize_t, write, (int file, const void *from, size_t bytes), file, from, bytes)
WRAP(ssize_t, pwrite, (int file, const void *from, size_t bytes, off_t at), file, from, bytes, at)
WRAP(ssize_t, pread, (int file, void *to, size_t bytes, off_t at), file, to, bytes, at)
WRAP(int, clock_gettime, (clockid_t clock, struct timespec *now), clock, now)

#else

#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/prctl.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <x86intrin.h>

#define CALLS 100000l
/* Trapped reads of CPUID take 100 us each on some virtual machines. */
#define CPUID_CALLS 1000l
#define BLOCK (1l << 20)
#define BLOCKS 32l
#define PASSES 8l
#define PAGE 4096
#define ARCH_SET_CPUID 0x1012

/* The only page whose system calls nothing traps: a call, and the return of a signal handler. */
long direct_call(long number, long first, long second, long third, long fourth);
void direct_return(void);
extern char direct_begin[];
__asm__(".pushsection .text\n"
        ".balign 4096\n"
        "direct_begin:\n"
        ".globl direct_call\n"
        "direct_call: mov %rdi, %rax; mov %rsi, %rdi; mov %rdx, %rsi; mov %rcx, %rdx; mov %r8, %r10; syscall; ret\n"
        ".globl direct_return\n"
        "direct_return: mov $15, %eax; syscall\n"
        ".balign 4096\n"
        ".popsection\n");

static char *block, name[4096];
static volatile unsigned long trapped;
static unsigned long *wrapped;
static char selector = SYSCALL_DISPATCH_FILTER_ALLOW;

static void must(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        exit(1);
    }
}

static long nanoseconds(clockid_t clock)
{
    struct timespec now;
    direct_call(SYS_clock_gettime, clock, (long)&now, 0, 0);
    return now.tv_sec * 1000000000l + now.tv_nsec;
}

static unsigned long seen(void) { return trapped + (wrapped ? *wrapped : 0); }

/* In processor time, on which other programs have less influence. The compiler must not move the body out of the loop. */
#define MEASURE(kind, calls, body)                                                                                     \
    do {                                                                                                               \
        unsigned long seen_before = seen();                                                                            \
        long began = nanoseconds(CLOCK_THREAD_CPUTIME_ID);                                                             \
        for (long call = 0; call < (calls); call++) {                                                                  \
            body;                                                                                                      \
            __asm__ volatile("" ::: "memory");                                                                         \
        }                                                                                                              \
        double took = (double)(nanoseconds(CLOCK_THREAD_CPUTIME_ID) - began) / 1e3 / (double)(calls);                  \
        report(kind, took, seen() > seen_before);                                                                      \
    } while (0)

static char reports[4096];

static void report(const char *kind, double took, int is_seen)
{
    size_t used = strlen(reports);
    snprintf(reports + used, sizeof reports - used, "%s: %.4f%s\n", kind, took, is_seen ? "" : " not seen");
}

/* --- the methods */

/* Makes the trapped call from the page whose calls are not trapped. */
static void on_call(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    trapped++;
    at[REG_RAX] = direct_call(info->si_syscall, at[REG_RDI], at[REG_RSI], at[REG_RDX], at[REG_R10]);
}

/* Answers a trapped instruction with the clock of the kernel: in the handler, the counter traps as well. */
static void on_instruction(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)at[REG_RIP];
    long now = nanoseconds(CLOCK_MONOTONIC);
    trapped++;
    at[REG_RAX] = now & 0xffffffff;
    at[REG_RDX] = now >> 32;
    if (code[0] == 0x0f && code[1] == 0xa2)
        at[REG_RBX] = 0;
    int is_cpuid_or_rdtscp = code[1] != 0x31;
    if (is_cpuid_or_rdtscp)
        at[REG_RCX] = 0;
    at[REG_RIP] += code[1] == 0x01 ? 3 : 2;
}

/* The C library would name a function of its own for the return of the handler, where dispatch traps. */
static void handle(int signal, void (*handler)(int, siginfo_t *, void *))
{
    struct {
        void (*handler)(int, siginfo_t *, void *);
        unsigned long flags;
        void (*restorer)(void);
        unsigned long mask;
    } action = {handler, SA_SIGINFO | 0x04000000, direct_return, 0};
    must(!syscall(SYS_rt_sigaction, signal, &action, NULL, 8), "sigaction");
}

static void by_filter(void)
{
    uint64_t page = (uint64_t)direct_begin;
    unsigned address = offsetof(struct seccomp_data, instruction_pointer);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(page >> 32), 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, address),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~(uint32_t)(PAGE - 1)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)page, 6, 0),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pwrite64, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_gettime, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    handle(SIGSYS, on_call);
    must(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS");
    must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), "PR_SET_SECCOMP");
}

static void by_dispatch(void)
{
    handle(SIGSYS, on_call);
    int is_on = !prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, direct_begin, PAGE, &selector);
    must(is_on, "PR_SET_SYSCALL_USER_DISPATCH");
    selector = SYSCALL_DISPATCH_FILTER_BLOCK;
}

/* --- what is measured */

static void calls(void)
{
    struct timespec now;
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(file >= 0, name);
    MEASURE("write, 64 B", CALLS, must(write(file, block, 64) == 64, "write"));
    FILE *stream = fopen(name, "w");
    must(stream != NULL, name);
    MEASURE("fwrite, 64 B", CALLS, must(fwrite(block, 64, 1, stream) == 1, "fwrite"));
    fclose(stream);
    /* Only from the second time on, the file has all its memory. */
    for (long at = 0; at < BLOCKS; at++)
        must(pwrite(file, block, BLOCK, at * BLOCK) == BLOCK, "pwrite");
    MEASURE("1 MiB written and read", BLOCKS * PASSES, {
        off_t at = call % BLOCKS * BLOCK;
        must(pwrite(file, block, BLOCK, at) == BLOCK && pread(file, block, BLOCK, at) == BLOCK, "block");
    });
    MEASURE("clock by the vDSO", CALLS, clock_gettime(CLOCK_MONOTONIC, &now));
    MEASURE("clock by a system call", CALLS, syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now));
    MEASURE("getppid, not to be intercepted", CALLS, syscall(SYS_getppid));
    close(file);
    unlink(name);
}

static void read_cpuid(void)
{
    unsigned a, b, c, d;
    __cpuid(0, a, b, c, d);
}

static void counters(void)
{
    struct timespec now;
    handle(SIGSEGV, on_instruction);
    MEASURE("rdtsc", CALLS, (void)__rdtsc());
    MEASURE("clock by the vDSO", CALLS, clock_gettime(CLOCK_MONOTONIC, &now));
    MEASURE("clock by a system call", CALLS, syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now));
    MEASURE("cpuid", CPUID_CALLS, read_cpuid());
    must(!prctl(PR_SET_TSC, PR_TSC_SIGSEGV), "PR_SET_TSC");
    MEASURE("rdtsc, trapped", CALLS, (void)__rdtsc());
    MEASURE("clock by the vDSO, trapped", CALLS, clock_gettime(CLOCK_MONOTONIC, &now));
    must(!prctl(PR_SET_TSC, PR_TSC_ENABLE), "PR_SET_TSC");
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        must(errno == ENODEV, "ARCH_SET_CPUID");
        return;
    }
    MEASURE("cpuid, trapped", CPUID_CALLS, read_cpuid());
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
}

int main(int argc, char **argv)
{
    must(argc == 3, "METHOD FOLDER");
    snprintf(name, sizeof name, "%s/file", argv[2]);
    wrapped = dlsym(RTLD_DEFAULT, "intercepted_calls");
    block = malloc(BLOCK);
    must(block != NULL, "malloc");
    memset(block, 'x', BLOCK);
    if (!strcmp(argv[1], "seccomp"))
        by_filter();
    if (!strcmp(argv[1], "dispatch"))
        by_dispatch();
    if (strcmp(argv[1], "counters"))
        calls();
    else
        counters();
    selector = SYSCALL_DISPATCH_FILTER_ALLOW;
    fputs(reports, stdout);
    return 0;
}

#endif
