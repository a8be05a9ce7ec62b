/* Kills a process within one of its system calls: `kill_at_call PID CALL enter|exit`.
 *
 * CALL is the number of the system call. The process is killed at its next such call that the
 * kernel performs: `enter`, before the call has any effect; `exit`, after its effect and before the
 * process sees the result. Prints `attached` once the process is watched. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#include <linux/ptrace.h>

/* Whether the process has stopped where it is to be killed. */
static int is_there(pid_t pid, unsigned long call, int at_exit)
{
    static int is_inside;
    struct ptrace_syscall_info info;
    memset(&info, 0, sizeof info);
    ptrace(PTRACE_GET_SYSCALL_INFO, pid, (void *)sizeof info, &info);
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY)
        is_inside = info.entry.nr == call;
    return is_inside && info.op == (at_exit ? PTRACE_SYSCALL_INFO_EXIT : PTRACE_SYSCALL_INFO_ENTRY);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    pid_t pid = atoi(argv[1]);
    unsigned long call = strtoul(argv[2], NULL, 10);
    int at_exit = !strcmp(argv[3], "exit"), status;
    if (ptrace(PTRACE_SEIZE, pid, 0, (void *)PTRACE_O_TRACESYSGOOD) || ptrace(PTRACE_INTERRUPT, pid, 0, 0)) {
        perror("ptrace");
        return 1;
    }
    puts("attached");
    fflush(stdout);
    while (waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status)) {
        int signal = WSTOPSIG(status), is_event = status >> 16;
        if (signal == (SIGTRAP | 0x80) && is_there(pid, call, at_exit)) {
            struct user_regs_struct registers;
            ptrace(PTRACE_GETREGS, pid, 0, &registers);
            if (!at_exit) {
                registers.orig_rax = -1ul; /* The kernel performs nothing. */
                ptrace(PTRACE_SETREGS, pid, 0, &registers);
            }
            return kill(pid, SIGKILL);
        }
        int is_own = signal == (SIGTRAP | 0x80) || is_event;
        ptrace(PTRACE_SYSCALL, pid, 0, (void *)(long)(is_own ? 0 : signal));
    }
    return 3;
}
