/* Kills a rank in the middle of a frame that it appends to a message log: `kill_in_logs PID`.
 *
 * Watchpoints of the processor lie some kilobytes behind the ends of the longest logs that the
 * process has mapped: it is killed as it writes there. If it does not for some seconds, it is killed
 * wherever it is. Prints `within` or `elsewhere`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOGS "landbridge-logs"
/* Milliseconds of the whole, and between two looks at the lengths of logs. */
#define PATIENCE_MS 4000
#define PAUSE_MS 20
/* Bytes behind the memory that a log has taken: in the middle of a long frame. */
#define BEHIND 50000
/* A smaller mapping is the beginning of a log, or no log. */
#define LOG_MIN (64l << 20)
/* A log that has taken less may be one that is not used any more. */
#define TAKEN_MIN (2l << 20)
#define WATCHPOINTS 4
/* For each watchpoint: it is on, for writes, of four bytes. */
#define IS_ON(at) (1ul << 2 * (at))
#define IS_FOR_WRITES(at) (13ul << (16 + 4 * (at)))

static pid_t pid;

/* The file of the logs, by a descriptor of the process; -1 if it has none yet. */
static int open_logs(void)
{
    for (int number = 500; number < 600; number++) {
        char path[64], name[256];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, number);
        ssize_t length = readlink(path, name, sizeof name - 1);
        name[length < 0 ? 0 : length] = 0;
        if (strstr(name, LOGS))
            return open(path, O_RDONLY);
    }
    return -1;
}

/* Sets watchpoints behind the longest logs. */
static void watch_logs(void)
{
    unsigned long places[WATCHPOINTS] = {0}, from, to, offset;
    long longest[WATCHPOINTS] = {0};
    char path[64], line[512];
    int file = open_logs();
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = file < 0 ? NULL : fopen(path, "r");
    while (maps && fgets(line, sizeof line, maps)) {
        if (!strstr(line, LOGS) || sscanf(line, "%lx-%lx %*s %lx", &from, &to, &offset) != 3 || (long)(to - from) < LOG_MIN)
            continue;
        long taken = lseek(file, offset, SEEK_HOLE) - (long)offset;
        if (taken < TAKEN_MIN || taken + BEHIND >= (long)(to - from))
            continue;
        int least = 0;
        for (int at = 1; at < WATCHPOINTS; at++)
            least = longest[at] < longest[least] ? at : least;
        if (taken > longest[least])
            longest[least] = taken, places[least] = (from + taken + BEHIND) & ~7ul;
    }
    if (maps)
        fclose(maps);
    if (file >= 0)
        close(file);
    unsigned long control = 0;
    for (int at = 0; at < WATCHPOINTS; at++)
        if (places[at] && !ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[0]) + 8 * at, places[at]))
            control |= IS_ON(at) | IS_FOR_WRITES(at);
    ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[7]), control);
}

/* Waits until the process is at a watchpoint, or has been interrupted, or for a while. Signals are
 * passed on. */
static enum {NOTHING, WATCHPOINT, INTERRUPTED} stops(int milliseconds)
{
    for (int status; milliseconds > 0; usleep(200)) {
        static int part;
        milliseconds -= ++part % 5 == 0;
        pid_t found = waitpid(pid, &status, __WALL | WNOHANG);
        if (found == 0)
            continue;
        if (found != pid || !WIFSTOPPED(status))
            exit(3);
        if (WSTOPSIG(status) == SIGTRAP)
            return status >> 16 ? INTERRUPTED : WATCHPOINT;
        ptrace(PTRACE_CONT, pid, 0, (void *)(long)(status >> 16 ? 0 : WSTOPSIG(status)));
    }
    return NOTHING;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    pid = atoi(argv[1]);
    if (ptrace(PTRACE_SEIZE, pid, 0, 0)) {
        perror("ptrace");
        return 1;
    }
    int is_within = 0;
    for (int passed = 0; passed < PATIENCE_MS && !is_within; passed += PAUSE_MS) {
        if (ptrace(PTRACE_INTERRUPT, pid, 0, 0))
            return 3;
        is_within = stops(PATIENCE_MS) == WATCHPOINT;
        if (!is_within) {
            /* Other logs may be the longest by now. */
            watch_logs();
            ptrace(PTRACE_CONT, pid, 0, 0);
            is_within = stops(PAUSE_MS) == WATCHPOINT;
        }
    }
    puts(is_within ? "within" : "elsewhere");
    return kill(pid, SIGKILL);
}
