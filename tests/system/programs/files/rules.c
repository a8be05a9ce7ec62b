/* Rows of rules of the kernel that a replay must follow as well: where a write goes, which signal an
 * error brings, who has a lock. See rows.h. */
#include "rows.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define NEXT ((rank + 1) % size)

static int files[ROWS_MAX];
#define row_file files[tally - tallies]

static void file_begin(void)
{
    row_file = open(path("of", rank), O_RDWR | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(row_file);
}

static void file_end(void) { EXPECT_OK(close(row_file)); }

/* Checks the length of the file of the next rank. */
static void expect_length(long wanted)
{
    struct stat about;
    EXPECT_OK(stat(path("of", NEXT), &about));
    EXPECT_SAME(about.st_size, wanted);
}

/* --- set-append: a locked file, which the agent of the node holds, gets O_APPEND for each write. No
 * look comes in between: the first call on files after a replay is fcntl */

static void set_append_begin(void)
{
    file_begin();
    EXPECT_OK(flock(row_file, LOCK_EX));
}

static void set_append_act(int step)
{
    EXPECT_OK(fcntl(row_file, F_SETFL, O_APPEND));
    EXPECT_SAME(fcntl(row_file, F_GETFL) & O_APPEND, O_APPEND);
    EXPECT_SAME(write(row_file, &step, sizeof step), sizeof step);
    EXPECT_OK(fcntl(row_file, F_SETFL, 0));
    EXPECT_SAME(lseek(row_file, 0, SEEK_SET), 0);
}

/* --- no-append: a write at the position of a file that is open for appending */

#ifndef RWF_NOAPPEND
#define RWF_NOAPPEND 0x20
#endif

static void no_append_begin(void)
{
    row_file = open(path("of", rank), O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0644);
    EXPECT_OK(row_file);
    EXPECT_OK(ftruncate(row_file, BLOCK));
    EXPECT_SAME(lseek(row_file, 0, SEEK_SET), 0);
}

static void no_append_act(int step)
{
    struct iovec piece = {&step, sizeof step};
    ssize_t done = pwritev2(row_file, &piece, 1, -1, RWF_NOAPPEND);
    /* Linux 6.9 and later have the flag. */
    if (done < 0 && (errno == EOPNOTSUPP || errno == EINVAL))
        done = sizeof step;
    EXPECT_SAME(done, sizeof step);
}

static void no_append_look(int step)
{
    (void)step;
    expect_length(BLOCK);
}

/* --- copy-memory: a file in memory is copied piece by piece, at its position, and back into another
 * one */

static int memory, memory_again;

static void copy_memory_begin(void)
{
    uint32_t block[BLOCK / 4];
    file_begin();
    memory = memfd_create("rules", 0);
    EXPECT_OK(memory);
    for (int step = 0; step < steps; step++) {
        fill(block, BLOCK, rank, step);
        EXPECT_SAME(write(memory, block, BLOCK), BLOCK);
    }
    EXPECT_SAME(lseek(memory, 0, SEEK_SET), 0);
    memory_again = memfd_create("rules", 0);
    EXPECT_OK(memory_again);
}

static void copy_memory_act(int step)
{
    uint32_t block[BLOCK / 4];
    off_t from = (off_t)step * BLOCK;
    EXPECT_SAME(sendfile(row_file, memory, NULL, BLOCK), BLOCK);
    EXPECT_SAME(sendfile(memory_again, row_file, &from, BLOCK), BLOCK);
    EXPECT_SAME(lseek(memory_again, 0, SEEK_CUR), (step + 1) * BLOCK);
    expect_block(block, pread(memory_again, block, BLOCK, from - BLOCK), BLOCK, rank, step);
}

static void copy_memory_look(int step)
{
    uint32_t block[BLOCK / 4];
    int file = open(path("of", NEXT), O_RDONLY);
    EXPECT_OK(file);
    expect_block(block, pread(file, block, BLOCK, (off_t)step * BLOCK), BLOCK, NEXT, step);
    EXPECT_OK(close(file));
}

/* --- size-limit: writes and truncations beyond the largest size of files bring a signal */

static volatile sig_atomic_t signals;

static void on_limit(int signal)
{
    (void)signal;
    signals++;
}

static void size_limit_begin(void)
{
    file_begin();
    signal(SIGXFSZ, on_limit);
}

static void size_limit_act(int step)
{
    struct rlimit limit, low;
    EXPECT_OK(getrlimit(RLIMIT_FSIZE, &limit));
    low = limit;
    low.rlim_cur = 10;
    EXPECT_OK(setrlimit(RLIMIT_FSIZE, &low));
    EXPECT_SAME(pwrite(row_file, "0123456789abcdef", 16, 0), 10);
    EXPECT_SAME(pwrite(row_file, "0123456789abcdef", 16, 10), -1);
    EXPECT_SAME(ftruncate(row_file, 11), -1);
    EXPECT_SAME(truncate(path("of", rank), 12), -1);
    EXPECT_OK(setrlimit(RLIMIT_FSIZE, &limit));
    EXPECT_SAME(signals, 3 * (step + 1));
}

static void size_limit_look(int step)
{
    EXPECT_SAME(signals, 3 * (step + 1));
    expect_length(10);
}

/* --- lock-closed: a range lock of the process ends when it closes any descriptor of the file; a lock
 * on another file stays, also when a call fails that would have closed that file */

static int range_lock(int file)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(file, F_SETLK, &range);
}

static int lock_of(const char *name)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int file = open(name, O_RDWR);
    EXPECT_OK(file);
    EXPECT_OK(fcntl(file, F_GETLK, &range));
    EXPECT_OK(close(file));
    return range.l_type;
}

static int kept_lock;

static void lock_closed_begin(void)
{
    file_begin();
    kept_lock = open(path("kept", rank), O_RDWR | O_CREAT, 0644);
    EXPECT_OK(range_lock(kept_lock));
}

static void lock_closed_act(int step)
{
    int other = open(path("of", rank), O_RDONLY);
    int last = fcntl(other, F_DUPFD, 700);
    EXPECT_SAME(close(other), 0);
    EXPECT_OK(range_lock(row_file));
    if (step % 3 == 0)
        EXPECT_OK(close(last));
    else if (step % 3 == 1)
        EXPECT_OK(close(dup2(0, last)));
    else
        EXPECT_OK(close_range(last, last, 0));
    EXPECT_SAME(dup2(last, kept_lock), -1);
}

static void lock_closed_look(int step)
{
    (void)step;
    EXPECT_SAME(lock_of(path("of", NEXT)), F_UNLCK);
    EXPECT_SAME(lock_of(path("kept", NEXT)), F_WRLCK);
}

/* --- lock-child: a child keeps the lock of a descriptor that the rank has closed */

static void lock_child_act(int step)
{
    int ends[2], file = open(path("of", rank), O_RDWR | O_CREAT, 0644);
    char word;
    (void)step;
    EXPECT_OK(flock(file, LOCK_EX));
    EXPECT_OK(pipe(ends));
    pid_t child = fork();
    if (!child) {
        close(ends[1]);
        _exit(read(ends[0], &word, 1) != 0);
    }
    EXPECT_OK(close(file));
    file = open(path("of", rank), O_RDWR);
    if (!flock(file, LOCK_EX | LOCK_NB)) {
        fprintf(stderr, "the lock of the child is gone\n");
        exit(1);
    }
    EXPECT_OK(close(ends[1]));
    EXPECT_SAME(waitpid(child, NULL, 0), child);
    EXPECT_OK(flock(file, LOCK_EX | LOCK_NB));
    EXPECT_OK(close(file));
    EXPECT_OK(close(ends[0]));
}

/* --- bad-address: calls fail whose paths or bytes are nowhere */

#define EXPECT_FAULT(call)                                                                         \
    do {                                                                                           \
        errno = 0;                                                                                 \
        EXPECT_SAME(call, -1);                                                                     \
        EXPECT_SAME(errno, EFAULT);                                                                \
    } while (0)

static void bad_address_act(int step)
{
    /* Not a constant, of which the compiler knows that it is no address. */
    char *volatile nowhere = (char *)8;
    struct iovec pieces[2] = {{nowhere, 4}, {&step, sizeof step}};
    EXPECT_FAULT(write(row_file, nowhere, 10));
    EXPECT_FAULT(pwritev(row_file, pieces, 2, 0));
    EXPECT_FAULT(writev(row_file, (struct iovec *)nowhere, 1));
    EXPECT_FAULT(open(nowhere, O_RDONLY));
    EXPECT_FAULT(rename(path("of", rank), nowhere));
    EXPECT_FAULT(fcntl(row_file, F_SETLK, nowhere));
    EXPECT_SAME(write(row_file, &step, sizeof step), sizeof step);
}

static const struct row rows[] = {
    {"bad-address", file_begin, bad_address_act, NULL, file_end},
    {"lock-closed", lock_closed_begin, lock_closed_act, lock_closed_look, file_end},
    {"lock-child", NULL, lock_child_act, NULL, NULL},
    {"set-append", set_append_begin, set_append_act, NULL, file_end},
    {"no-append", no_append_begin, no_append_act, no_append_look, file_end},
    {"copy-memory", copy_memory_begin, copy_memory_act, copy_memory_look, file_end},
    {"size-limit", size_limit_begin, size_limit_act, size_limit_look, file_end},
};

int main(int argc, char **argv) { return run_rows(sizeof rows / sizeof *rows, rows, argc, argv); }
