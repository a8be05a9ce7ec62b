/* Rows of effects beyond the C library's file calls: mappings, rings, asynchronous calls, copies
 * inside the kernel, children, random devices. See rows.h. */
#include "rows.h"

#include <aio.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <syslog.h>

#define NEXT ((rank + 1) % size)

/* Path of this program. */
static char program[1200];

/* Whether the system lacks a call, or forbids it; a program then works without the call. */
static int is_absent(long result) { return result < 0 && (errno == ENOSYS || errno == EPERM || errno == EOPNOTSUPP); }

/* Counts comparisons that cannot be made without an absent call, so that the total stays the same.
 */
static void leave_out(int comparisons)
{
    while (comparisons--)
        expect(1, "");
}

/* A file for each row, and another one for rows that copy. */
static int files[ROWS_MAX], sources[ROWS_MAX];
#define row_file files[tally - tallies]
#define copy_source sources[tally - tallies]

static void file_begin(void)
{
    row_file = open(path("of", rank), O_RDWR | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(row_file);
    EXPECT_OK(ftruncate(row_file, BLOCK));
}

static void file_end(void) { EXPECT_OK(close(row_file)); }

/* Checks the file of the next rank, which must hold the block of this step. */
static void block_look(int step)
{
    uint32_t block[BLOCK / 4];
    int file = open(path("of", NEXT), O_RDONLY);
    EXPECT_OK(file);
    expect_block(block, pread(file, block, sizeof block, 0), BLOCK, NEXT, step);
    close(file);
}

/* --- mmap-shared: sums are added up in a file of each rank, mapped shared and writable */

static uint32_t *sums;

static void mapped_begin(void)
{
    file_begin();
    sums = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, row_file, 0);
    expect(sums != MAP_FAILED, "mmap: %s", strerror(errno));
}

static void mapped_act(int step)
{
    for (int i = 0; i < BLOCK / 4; i++)
        sums[i] += value(rank, step, i);
}

static void mapped_look(int step)
{
    int wrong = 0;
    for (int i = 0; i < BLOCK / 4; i++) {
        uint32_t want = 0;
        for (int s = 0; s <= step; s++)
            want += value(rank, s, i);
        wrong += sums[i] != want;
    }
    expect(!wrong, "%d sums are wrong in step %d", wrong, step);
}

/* --- mmap-private: a private mapping, new in each step, reads what another rank has written */

static void private_act(int step)
{
    uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(row_file, block, BLOCK, 0), BLOCK);
}

static void private_look(int step)
{
    int file = open(path("of", NEXT), O_RDONLY);
    EXPECT_OK(file);
    uint32_t *block = mmap(NULL, BLOCK, PROT_READ, MAP_PRIVATE, file, 0);
    expect(block != MAP_FAILED, "mmap: %s", strerror(errno));
    expect_block(block, BLOCK, BLOCK, NEXT, step);
    munmap(block, BLOCK);
    close(file);
}

/* --- map-input: files that nobody changes any more stay mapped over all steps: one that the next
 * rank wrote before the first step, privately and shared; and this program, which is older than
 * the job */

static const uint32_t *mapped, *mapped_too;
static const unsigned char *mapped_program;
static long wrong_words;

/* Compares the mapped block and says nothing before the end: a replay that reads another content
 * prints what the first incarnation printed. */
static void compare_mapped(int who, int step)
{
    for (int i = 0; i < BLOCK / 4; i++)
        wrong_words += mapped[i] != value(who, step, i);
}

static void compared_end(void) { expect(!wrong_words, "%ld words were wrong", wrong_words); }

static void put_block(int step)
{
    uint32_t block[BLOCK / 4];
    int file = open(path("of", rank), O_WRONLY | O_CREAT, 0644);
    EXPECT_OK(file);
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(file, block, BLOCK, 0), BLOCK);
    EXPECT_OK(close(file));
}

static void put_first_block(void) { put_block(0); }

static const void *map_file(const char *name, size_t length, int flags)
{
    int file = open(name, O_RDONLY);
    void *found = mmap(NULL, length, PROT_READ, flags, file, 0);
    EXPECT_OK(file);
    expect(found != MAP_FAILED, "mmap: %s", strerror(errno));
    EXPECT_OK(close(file));
    return found;
}

static void input_act(int step)
{
    if (step)
        return;
    mapped = map_file(path("of", NEXT), BLOCK, MAP_PRIVATE);
    mapped_too = map_file(path("of", NEXT), BLOCK, MAP_SHARED);
    mapped_program = map_file(program, BLOCK, MAP_PRIVATE);
}

static void input_look(int step)
{
    (void)step;
    expect_block(mapped, BLOCK, BLOCK, NEXT, 0);
    expect_block(mapped_too, BLOCK, BLOCK, NEXT, 0);
    expect(!memcmp(mapped_program, "\177ELF", 4), "this is no program");
}

/* --- map-held: a file stays mapped, and another rank rewrites the file in each step */

static void held_act(int step)
{
    if (step)
        put_block(step);
    else
        mapped = map_file(path("of", NEXT), BLOCK, MAP_PRIVATE);
}

static void held_look(int step) { compare_mapped(NEXT, step); }

/* --- map-late: as map-held, but the file changes only from step 7 on, some time after the step
 * began: a rank that was killed before may be replaying its looks meanwhile */

#define LATE 7

static void late_act(int step)
{
    if (!step)
        mapped = map_file(path("of", NEXT), BLOCK, MAP_PRIVATE);
    if (step >= LATE) {
        compute(1000);
        put_block(step);
    }
}

static void late_look(int step)
{
    compute(40);
    compare_mapped(NEXT, step < LATE ? 0 : step);
}

/* --- map-stored: rank 0 stores by its mapping into a file that the other ranks have mapped */

static void stored_begin(void)
{
    if (rank)
        return;
    mapped_begin();
    fill(sums, BLOCK, 0, 0);
}

static void stored_act(int step)
{
    if (rank && !step)
        mapped = map_file(path("of", 0), BLOCK, MAP_PRIVATE);
    if (!rank)
        fill(sums, BLOCK, 0, step);
}

static void stored_look(int step)
{
    if (rank)
        compare_mapped(0, step);
}

/* --- map-stored-later: as map-stored, but rank 0 maps the file after the others, and reads before it
 * stores: in memory (/dev/shm) such a store changes no time of the file */

#define STORED_FROM 2

static void later_act(int step)
{
    if (rank && !step)
        mapped = map_file(path("of", 0), BLOCK, MAP_PRIVATE);
    if (rank || step < STORED_FROM)
        return;
    if (step == STORED_FROM) {
        row_file = open(path("of", 0), O_RDWR);
        sums = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, row_file, 0);
        expect(sums != MAP_FAILED && *sums == value(0, 0, 0), "mmap: %s", strerror(errno));
        EXPECT_OK(close(row_file));
    }
    fill(sums, BLOCK, 0, step);
}

static void later_look(int step)
{
    if (rank)
        compare_mapped(0, step < STORED_FROM ? 0 : step);
}

/* --- sync-failed: results of calls that put files on disk and close them, also of such that fail
 */

static void sync_act(int step)
{
    private_act(step);
    EXPECT_SAME(fsync(row_file), 0);
    EXPECT_SAME(fdatasync(row_file), 0);
    EXPECT_SAME(sync_file_range(row_file, -1, step, 0), -1);
    EXPECT_SAME(errno, EINVAL);
    private_act(step);
}

/* --- io_uring: a write by a ring of the kernel */

static int ring = -1;
static unsigned char *ring_memory;
static struct io_uring_params ring_about;
static struct io_uring_sqe *ring_entries;

static void uring_begin(void)
{
    file_begin();
    ring = (int)syscall(SYS_io_uring_setup, 4, &ring_about);
    if (is_absent(ring)) {
        leave_out(2);
        return;
    }
    EXPECT_OK(ring);
    size_t bytes = ring_about.cq_off.cqes + ring_about.cq_entries * sizeof(struct io_uring_cqe);
    ring_memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    ring_entries = mmap(NULL, ring_about.sq_entries * sizeof *ring_entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    expect(ring_memory != MAP_FAILED && (void *)ring_entries != MAP_FAILED, "mmap: %s", strerror(errno));
}

static void uring_act(int step)
{
    static uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    if (ring < 0) {
        EXPECT_SAME(pwrite(row_file, block, BLOCK, 0), BLOCK);
        leave_out(1);
        return;
    }
#define AT(side, field) ((unsigned *)(ring_memory + ring_about.side##_off.field))
    unsigned tail = *AT(sq, tail), slot = tail & *AT(sq, ring_mask);
    ring_entries[slot] = (struct io_uring_sqe){.opcode = IORING_OP_WRITE, .fd = row_file, .addr = (uintptr_t)block, .len = BLOCK};
    AT(sq, array)[slot] = slot;
    __atomic_store_n(AT(sq, tail), tail + 1, __ATOMIC_RELEASE);
    EXPECT_SAME(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0), 1);
    unsigned head = *AT(cq, head);
    struct io_uring_cqe *done = (struct io_uring_cqe *)(ring_memory + ring_about.cq_off.cqes) + (head & *AT(cq, ring_mask));
    EXPECT_SAME(done->res, BLOCK);
    __atomic_store_n(AT(cq, head), head + 1, __ATOMIC_RELEASE);
}

/* --- aio-linux: io_submit, without a library */

static aio_context_t aio_queue;
static int has_aio;

static void linux_aio_begin(void)
{
    file_begin();
    has_aio = !is_absent(syscall(SYS_io_setup, 4, &aio_queue));
}

static void linux_aio_act(int step)
{
    static uint32_t block[BLOCK / 4];
    struct io_event event;
    struct iocb one = {.aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = (uint32_t)row_file, .aio_buf = (uintptr_t)block, .aio_nbytes = BLOCK};
    struct iocb *list[1] = {&one};
    fill(block, BLOCK, rank, step);
    if (!has_aio) {
        EXPECT_SAME(pwrite(row_file, block, BLOCK, 0), BLOCK);
        leave_out(2);
        return;
    }
    EXPECT_SAME(syscall(SYS_io_submit, aio_queue, 1, list), 1);
    EXPECT_SAME(syscall(SYS_io_getevents, aio_queue, 1, 1, &event, NULL), 1);
    EXPECT_SAME(event.res, BLOCK);
}

/* --- aio-posix: aio_write, which the C library performs in a thread of its own */

static void posix_aio_act(int step)
{
    static uint32_t block[BLOCK / 4];
    struct aiocb one = {.aio_fildes = row_file, .aio_buf = block, .aio_nbytes = BLOCK};
    const struct aiocb *list[1] = {&one};
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(aio_write(&one), 0);
    while (aio_error(&one) == EINPROGRESS)
        aio_suspend(list, 1, NULL);
    EXPECT_SAME(aio_return(&one), BLOCK);
}

/* --- sendfile, copy-range, splice: the kernel copies from one file into another */

static void copy_begin(void)
{
    file_begin();
    copy_source = open(path("from", rank), O_RDWR | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(copy_source);
}

static void copy_fill(int step)
{
    uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(copy_source, block, BLOCK, 0), BLOCK);
    EXPECT_SAME(lseek(row_file, 0, SEEK_SET), 0);
}

static void sendfile_act(int step)
{
    off_t from = 0;
    copy_fill(step);
    EXPECT_SAME(sendfile(row_file, copy_source, &from, BLOCK), BLOCK);
}

static void range_act(int step)
{
    off_t from = 0, to = 0;
    copy_fill(step);
    EXPECT_SAME(copy_file_range(copy_source, &from, row_file, &to, BLOCK, 0), BLOCK);
}

static void splice_act(int step)
{
    off_t from = 0;
    int ends[2];
    copy_fill(step);
    EXPECT_SAME(pipe(ends), 0);
    EXPECT_SAME(splice(copy_source, &from, ends[1], NULL, BLOCK, 0), BLOCK);
    EXPECT_SAME(splice(ends[0], NULL, row_file, NULL, BLOCK, 0), BLOCK);
    close(ends[0]);
    close(ends[1]);
}

static void copy_end(void)
{
    EXPECT_OK(close(copy_source));
    file_end();
}

/* --- children: programs that a rank starts append to a file of the rank, and read it */

static void children_act(int step)
{
    char command[1200];
    int lines = -1;
    snprintf(command, sizeof command, "echo %d >> '%s'", step, path("of", rank));
    EXPECT_SAME(system(command), 0);
    snprintf(command, sizeof command, "wc -l < '%s'", path("of", rank));
    FILE *child = popen(command, "r");
    expect(child != NULL, "popen: %s", strerror(errno));
    EXPECT_SAME(fscanf(child, "%d", &lines), 1);
    EXPECT_SAME(pclose(child), 0);
    EXPECT_SAME(lines, step + 1);
    snprintf(command, sizeof command, "cat >> '%s'", path("piped", rank));
    child = popen(command, "w");
    fprintf(child, "%d\n", step);
    EXPECT_SAME(pclose(child), 0);
}

/* --- static-child, bare-child: programs without the interposer append to a file of the rank */

static char appender[1200];

static void wait_for(pid_t child)
{
    int status = -1;
    expect(child > 0, "no child: %s", strerror(errno));
    EXPECT_SAME(waitpid(child, &status, 0), child);
    EXPECT_SAME(status, 0);
}

static void static_child_act(int step)
{
    char line[16];
    const char *file = path("of", rank);
    char *words[] = {appender, (char *)file, line, NULL};
    snprintf(line, sizeof line, "%d", step);
    pid_t child = vfork();
    if (child == 0) {
        execve(appender, words, environ);
        _exit(127);
    }
    wait_for(child);
}

static void bare_child_act(int step)
{
    char command[1200];
    char *words[] = {"sh", "-c", command, NULL}, *none[] = {NULL};
    pid_t child = -1;
    snprintf(command, sizeof command, "echo %d >> '%s'", step, path("of", rank));
    EXPECT_SAME(posix_spawn(&child, "/bin/sh", NULL, NULL, words, none), 0);
    wait_for(child);
}

/* --- vfork-child: between vfork and exec, a child appends to a file of the rank */

static void vfork_child_act(int step)
{
    char line[16];
    const char *name = path("of", rank);
    size_t length = (size_t)snprintf(line, sizeof line, "%d\n", step);
    pid_t child = vfork();
    if (child == 0) {
        int file = open(name, O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (write(file, line, length) == (ssize_t)length)
            execl("/bin/true", "true", (char *)NULL);
        _exit(127);
    }
    wait_for(child);
}

/* --- spawn-open: posix_spawn makes a file in each step, for a program that does not use it */

static void spawn_open_act(int step)
{
    char *words[] = {"true", NULL};
    posix_spawn_file_actions_t actions;
    pid_t child = -1;
    posix_spawn_file_actions_init(&actions);
    EXPECT_SAME(posix_spawn_file_actions_addopen(&actions, 1, path("of", rank + size * step), O_WRONLY | O_CREAT | O_EXCL, 0644), 0);
    EXPECT_SAME(posix_spawn(&child, "/bin/true", &actions, NULL, words, environ), 0);
    wait_for(child);
    posix_spawn_file_actions_destroy(&actions);
}

static void spawn_open_look(int step) { EXPECT_SAME(access(path("of", NEXT + size * step), F_OK), 0); }

/* --- child-position: a child moves the position in a file that the rank reads, and that is older
 * than the job */


static void position_begin(void)
{
    row_file = open(program, O_RDONLY);
    EXPECT_OK(row_file);
}

static void position_act(int step)
{
    uint32_t word = 0, wanted = 1;
    EXPECT_SAME(pread(row_file, &wanted, sizeof wanted, (2 * step + 1) * (off_t)sizeof word), sizeof wanted);
    pid_t child = fork();
    if (child == 0)
        _exit(lseek(row_file, sizeof word, SEEK_CUR) < 0);
    wait_for(child);
    EXPECT_SAME(read(row_file, &word, sizeof word), sizeof word);
    EXPECT_SAME(word, wanted);
}

/* --- passed: a child opens the file of another rank, and its descriptor arrives over a socket */

union descriptor_message {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
};

static void pass(int socket, int descriptor)
{
    char byte = 0;
    union descriptor_message control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memcpy(CMSG_DATA(&control.head), &descriptor, sizeof descriptor);
    _exit(sendmsg(socket, &message, 0) != 1);
}

static int receive(int socket)
{
    char byte = 0;
    int descriptor = -1;
    union descriptor_message control;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    EXPECT_SAME(recvmsg(socket, &message, 0), 1);
    memcpy(&descriptor, CMSG_DATA(&control.head), sizeof descriptor);
    return descriptor;
}

static void passed_look(int step)
{
    uint32_t block[BLOCK / 4];
    int ends[2];
    EXPECT_SAME(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    pid_t child = fork();
    if (child == 0)
        pass(ends[1], open(path("of", NEXT), O_RDONLY));
    int file = receive(ends[0]);
    wait_for(child);
    expect_block(block, pread(file, block, sizeof block, 0), BLOCK, NEXT, step);
    close(file);
    close(ends[0]);
    close(ends[1]);
}

/* Checks that each line has the number of its step. */
static void lines_look(const char *name, int step)
{
    FILE *file = fopen(name, "r");
    int line, count = 0, wrong = 0;
    expect(file != NULL, "fopen: %s", strerror(errno));
    if (!file)
        return;
    while (fscanf(file, "%d", &line) == 1)
        wrong += line != count++;
    EXPECT_SAME(count, step + 1);
    EXPECT_SAME(wrong, 0);
    fclose(file);
}

static void child_look(int step) { lines_look(path("of", NEXT), step); }

static void children_look(int step)
{
    lines_look(path("of", NEXT), step);
    lines_look(path("piped", NEXT), step);
}

/* --- thread: another thread of the rank writes the file, and is joined */

static void *write_in_thread(void *block) { return (void *)(intptr_t)pwrite(row_file, block, BLOCK, 0); }

static void thread_act(int step)
{
    static uint32_t block[BLOCK / 4];
    pthread_t other;
    void *wrote = NULL;
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pthread_create(&other, NULL, write_in_thread, block), 0);
    EXPECT_SAME(pthread_join(other, &wrote), 0);
    EXPECT_SAME((intptr_t)wrote, BLOCK);
}

/* --- handler: a signal handler writes the file, wherever it interrupts the rank */

static uint32_t handler_block[BLOCK / 4];
static int handler_file;
static volatile sig_atomic_t handler_wrote;

static void on_alarm(int signal)
{
    (void)signal;
    handler_wrote = pwrite(handler_file, handler_block, BLOCK, 0) == BLOCK;
}

static void handler_begin(void)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART}, now;
    file_begin();
    handler_file = row_file;
    EXPECT_OK(sigaction(SIGALRM, &action, NULL));
    EXPECT_OK(sigaction(SIGALRM, NULL, &now));
    expect(now.sa_handler == on_alarm, "another handler");
}

static void alarms_come(int every_us)
{
    struct itimerval often = {{0, every_us}, {0, every_us}};
    EXPECT_OK(setitimer(ITIMER_REAL, &often, NULL));
}

static void handler_act(int step)
{
    fill(handler_block, BLOCK, rank, step);
    handler_wrote = 0;
    alarms_come(2000);
    while (!handler_wrote)
        compute(1);
    alarms_come(0);
}

/* --- longjmp: a handler is left by siglongjmp, and the calls that follow no longer belong to it */

static sigjmp_buf before_handler;

static void on_jump(int signal)
{
    (void)signal;
    siglongjmp(before_handler, 1);
}

static void jump_begin(void)
{
    struct sigaction action = {.sa_handler = on_jump};
    file_begin();
    EXPECT_OK(sigaction(SIGUSR2, &action, NULL));
}

static void jump_act(int step)
{
    uint32_t block[BLOCK / 4];
    if (!sigsetjmp(before_handler, 1))
        raise(SIGUSR2);
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(row_file, block, BLOCK, 0), BLOCK);
}

/* --- longjmp-clock: the handler interrupts reads of a clock, as a timeout does. no-room: the rank
 * has no room for its record. Each rank writes at the position of its file. */

static void sequence_act(int step)
{
    /* Not on the stack: a handler counts as left once the stack pointer is above its frame. */
    static uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(write(row_file, block, BLOCK), BLOCK);
}

static void sequence_look(int step)
{
    uint32_t block[BLOCK / 4];
    struct stat about;
    int file = open(path("of", NEXT), O_RDONLY);
    EXPECT_OK(file);
    EXPECT_OK(fstat(file, &about));
    EXPECT_SAME(about.st_size, (step + 1) * BLOCK);
    expect_block(block, pread(file, block, sizeof block, step * BLOCK), BLOCK, NEXT, step);
    close(file);
}

static void clock_jump_begin(void)
{
    struct sigaction action = {.sa_handler = on_jump};
    file_begin();
    EXPECT_OK(sigaction(SIGALRM, &action, NULL));
}

static void clock_jump_act(int step)
{
    const struct itimerval once = {{0, 0}, {0, 2000}};
    struct timespec now;
    /* A signal may also arrive between two reads; that each of 16 does is out of the question. */
    for (volatile int timeouts = 0; timeouts < 16; timeouts++)
        if (!sigsetjmp(before_handler, 1)) {
            EXPECT_OK(setitimer(ITIMER_REAL, &once, NULL));
            for (;;)
                clock_gettime(CLOCK_MONOTONIC, &now);
        }
    sequence_act(step);
}

/* --- static-main: the process begins as a static program, which changes a file */

static void static_main_act(int step) { (void)step; }

static void static_main_look(int step)
{
    struct stat about;
    (void)step;
    EXPECT_OK(stat(path("of", NEXT), &about));
    EXPECT_SAME(about.st_size, strlen("begun\n"));
}

/* --- directory: the rank, and programs that it starts, run in the working directory that it has
 * set */

static void directory_begin(void)
{
    EXPECT_OK(mkdir(path("of", rank), 0755));
    EXPECT_OK(chdir(path("of", rank)));
}

static void directory_act(int step)
{
    char here[600] = "", there[600] = "";
    (void)step;
    expect(getcwd(here, sizeof here) != NULL, "getcwd: %s", strerror(errno));
    expect(!strcmp(here, path("of", rank)), "in %s", here);
    FILE *child = popen("pwd", "r");
    expect(child && fscanf(child, "%599s", there) == 1, "no answer");
    EXPECT_SAME(pclose(child), 0);
    expect(!strcmp(there, here), "a child is in %s", there);
}

/* --- thread-read: another thread reads a file that the first one has opened, and that is older
 * than the job */

static uint32_t read_word;

static void *read_in_thread(void *step)
{
    return (void *)(intptr_t)pread(row_file, &read_word, sizeof read_word, 4 * (off_t)(intptr_t)step);
}

static void thread_read_act(int step)
{
    uint32_t wanted = 0;
    pthread_t other;
    void *got = NULL;
    int again = open(program, O_RDONLY);
    EXPECT_SAME(pread(again, &wanted, sizeof wanted, 4 * (off_t)step), sizeof wanted);
    EXPECT_SAME(pthread_create(&other, NULL, read_in_thread, (void *)(intptr_t)step), 0);
    EXPECT_SAME(pthread_join(other, &got), 0);
    EXPECT_SAME((intptr_t)got, sizeof wanted);
    EXPECT_SAME(read_word, wanted);
    close(again);
}

/* --- threads-read: two threads use that file all the time, also while images are taken: one waits
 * between its calls, the other one computes, and opens an installed file itself */

static atomic_int readers_end, wrong_reads;
static pthread_t readers[2];
static int readers_file;
static off_t installed_size;

static void read_once(int file, off_t size)
{
    static const char elf[] = {0x7f, 'E', 'L', 'F'};
    char found[4] = {0};
    struct stat about = {0};
    if (pread(file, found, sizeof found, 0) != sizeof found || memcmp(found, elf, sizeof elf))
        wrong_reads++;
    if (fstat(file, &about) || about.st_size != size)
        wrong_reads++;
}

static void *read_and_wait(void *size)
{
    while (!readers_end) {
        read_once(readers_file, (off_t)(intptr_t)size);
        usleep(1000);
    }
    return NULL;
}

static void *read_and_compute(void *size)
{
    while (!readers_end) {
        int own = open("/usr/bin/env", O_RDONLY);
        read_once(own, installed_size);
        read_once(readers_file, (off_t)(intptr_t)size);
        close(own);
        for (volatile int count = 0; count < 300000; count++)
            ;
        usleep(1000);
    }
    return NULL;
}

static void readers_begin(void)
{
    struct stat about;
    EXPECT_OK(stat("/usr/bin/env", &about));
    installed_size = about.st_size;
    EXPECT_OK(readers_file = open(program, O_RDONLY));
    EXPECT_OK(fstat(readers_file, &about));
    void *size = (void *)(intptr_t)about.st_size;
    EXPECT_SAME(pthread_create(&readers[0], NULL, read_and_wait, size), 0);
    EXPECT_SAME(pthread_create(&readers[1], NULL, read_and_compute, size), 0);
}

static void readers_act(int step)
{
    (void)step;
    EXPECT_SAME(wrong_reads, 0);
}

static void readers_finish(void)
{
    readers_end = 1;
    for (int at = 0; at < 2; at++)
        EXPECT_SAME(pthread_join(readers[at], NULL), 0);
    EXPECT_SAME(wrong_reads, 0);
    EXPECT_OK(close(readers_file));
}

/* --- thread-map: another thread maps that file, which is read after others may have changed it */

static void *map_in_thread(void *unused)
{
    (void)unused;
    return mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, row_file, 0);
}

static void thread_map_act(int step)
{
    pthread_t other;
    void *found = NULL;
    (void)step;
    EXPECT_SAME(pthread_create(&other, NULL, map_in_thread, NULL), 0);
    EXPECT_SAME(pthread_join(other, &found), 0);
    EXPECT_SAME(memcmp(found, "\177ELF", 4), 0);
    munmap(found, 4096);
}

/* --- grandchild: a child of a child appends to a file of the rank */

static void grandchild_act(int step)
{
    char command[1200];
    snprintf(command, sizeof command, "(echo %d >> '%s'; true); true", step, path("of", rank));
    EXPECT_SAME(system(command), 0);
}

/* --- child-look: a child looks for a file that another rank makes later */

static void child_look_act(int step)
{
    char command[1200];
    snprintf(command, sizeof command, "test -e '%s'", path("flag", NEXT + size * step));
    EXPECT_SAME(system(command), 256);
}

static void flag_look(int step) { close(open(path("flag", rank + size * step), O_CREAT | O_WRONLY, 0644)); }

/* --- thread-way: a thread changes the rank's file by a name below /proc. thread-space: it asks how
 * full the file system is. own-name: the rank writes to a file of the kernel. file-handle: it asks
 * for a handle of its file. other-process: it asks whether another process runs. */

static void *change_by_way(void *name) { return (void *)(intptr_t)chmod(name, 0600); }

static void thread_way_act(int step)
{
    char name[64];
    pthread_t other;
    void *result = NULL;
    (void)step;
    snprintf(name, sizeof name, "/proc/self/fd/%d", row_file);
    EXPECT_SAME(pthread_create(&other, NULL, change_by_way, name), 0);
    EXPECT_SAME(pthread_join(other, &result), 0);
    EXPECT_SAME((intptr_t)result, 0);
}

static void *ask_for_space(void *name)
{
    struct statfs about;
    return (void *)(intptr_t)statfs(name, &about);
}

static void thread_space_act(int step)
{
    pthread_t other;
    void *result = NULL;
    (void)step;
    EXPECT_SAME(pthread_create(&other, NULL, ask_for_space, (void *)path("of", rank)), 0);
    EXPECT_SAME(pthread_join(other, &result), 0);
    EXPECT_SAME((intptr_t)result, 0);
}

static void own_name_act(int step)
{
    char name[16];
    int file = open("/proc/self/comm", O_WRONLY);
    int length = snprintf(name, sizeof name, "step%d", step);
    EXPECT_OK(file);
    EXPECT_SAME(write(file, name, length), length);
    close(file);
}

static void file_handle_act(int step)
{
    union {
        struct file_handle handle;
        char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
    } about = {.handle.handle_bytes = MAX_HANDLE_SZ};
    int mount = 0;
    (void)step;
    name_to_handle_at(AT_FDCWD, path("of", rank), &about.handle, &mount, 0);
}

static void other_process_act(int step)
{
    (void)step;
    expect(getpgid(getppid()) > 0, "no group: %s", strerror(errno));
}

/* --- child-link, thread-link: a child or a thread follows a symbolic link that another rank changes;
 * what the link leads to is older than the job */

static const char *const link_targets[] = {"/bin/true", "/bin/false"};

static void link_act(int step)
{
    const char *fresh = path("new", rank);
    EXPECT_SAME(symlink(link_targets[step % 2], fresh), 0);
    EXPECT_SAME(rename(fresh, path("link", rank)), 0);
}

static void child_link_look(int step) { EXPECT_SAME(system(path("link", NEXT)), step % 2 ? 256 : 0); }

static void *open_in_thread(void *name) { return (void *)(intptr_t)open(name, O_RDONLY); }

static void thread_link_look(int step)
{
    pthread_t other;
    void *file = NULL;
    struct stat found, wanted;
    EXPECT_SAME(pthread_create(&other, NULL, open_in_thread, (void *)(intptr_t)path("link", NEXT)), 0);
    EXPECT_SAME(pthread_join(other, &file), 0);
    EXPECT_SAME(fstat((int)(intptr_t)file, &found), 0);
    EXPECT_SAME(stat(link_targets[step % 2], &wanted), 0);
    EXPECT_SAME(found.st_ino, wanted.st_ino);
    close((int)(intptr_t)file);
}

/* --- spawn-directory: a program begins in a directory to which a link leads that another rank changes */

static const char *const directory_targets[] = {"/", "/usr"};

static void directory_link_act(int step)
{
    const char *fresh = path("new", rank);
    EXPECT_SAME(symlink(directory_targets[step % 2], fresh), 0);
    EXPECT_SAME(rename(fresh, path("link", rank)), 0);
}

static void spawn_directory_look(int step)
{
    char *words[] = {"test", "-d", "share", NULL};
    posix_spawn_file_actions_t actions;
    pid_t child = -1;
    int status = 0;
    posix_spawn_file_actions_init(&actions);
    EXPECT_SAME(posix_spawn_file_actions_addchdir_np(&actions, path("link", NEXT)), 0);
    EXPECT_SAME(posix_spawn(&child, "/usr/bin/test", &actions, NULL, words, environ), 0);
    EXPECT_SAME(waitpid(child, &status, 0), child);
    EXPECT_SAME(status, step % 2 ? 0 : 256);
    posix_spawn_file_actions_destroy(&actions);
}

/* --- child-times: a child asks for the times of a directory in which the ranks make files */

static void child_times_act(int step)
{
    int file = open(path("of", rank + size * step), O_WRONLY | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(file);
    close(file);
}

static void child_times_look(int step)
{
    char command[PATH_MAX + 16];
    (void)step;
    snprintf(command, sizeof command, "test -d %s", folder);
    EXPECT_SAME(system(command), 0);
}

/* --- child-exists: a child opens a file that a rank makes, and reads nothing of it */

static void child_exists_look(int step)
{
    char command[PATH_MAX + 16];
    snprintf(command, sizeof command, ": < %s", path("of", NEXT + size * step));
    EXPECT_SAME(system(command), 0);
}

/* --- child-process: a child asks the kernel about another process */

static void child_process_act(int step)
{
    (void)step;
    EXPECT_SAME(system("read -r name < /proc/1/comm"), 0);
}

/* --- refused-connect: a connection fails because a file, which is then removed, is no local socket */

static void refused_connect_act(int step)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int file = open(path("of", rank + size * step), O_WRONLY | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(file);
    close(file);
    file = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_OK(file);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path("of", rank + size * step));
    EXPECT_SAME(connect(file, (struct sockaddr *)&address, sizeof address), -1);
    EXPECT_SAME(errno, ECONNREFUSED);
    EXPECT_SAME(unlink(path("of", rank + size * step)), 0);
    EXPECT_SAME(connect(file, (struct sockaddr *)&address, sizeof address), -1);
    EXPECT_SAME(errno, ENOENT);
    close(file);
}

/* --- wiped: memory that is empty in children, and the slack of the timers, also after an image */

static char *wiped;

static void wiped_begin(void)
{
    wiped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    expect(wiped != MAP_FAILED, "no memory: %s", strerror(errno));
    EXPECT_SAME(madvise(wiped, 4096, MADV_WIPEONFORK), 0);
    wiped[0] = 7;
    EXPECT_SAME(prctl(PR_SET_TIMERSLACK, 77000), 0);
}

static void wiped_act(int step)
{
    int status = -1;
    pid_t child = fork();
    (void)step;
    if (child == 0)
        _exit(wiped[0]);
    EXPECT_SAME(waitpid(child, &status, 0), child);
    EXPECT_SAME(status, 0);
    EXPECT_SAME(wiped[0], 7);
    EXPECT_SAME(prctl(PR_GET_TIMERSLACK), 77000);
}

/* --- child-directory: a child looks at a directory that another rank has made */

static void child_directory_act(int step) { EXPECT_SAME(mkdir(path("made", rank + size * step), 0755), 0); }

static void child_directory_look(int step)
{
    char command[1200];
    snprintf(command, sizeof command, "test -d '%s'", path("made", NEXT + size * step));
    EXPECT_SAME(system(command), 0);
}

/* --- socket: a datagram for the next rank */

static int row_socket, ports[64], datagrams;

static void socket_begin(void)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof own;
    row_socket = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    EXPECT_OK(bind(row_socket, (struct sockaddr *)&own, sizeof own));
    EXPECT_OK(getsockname(row_socket, (struct sockaddr *)&own, &length));
    ports[rank] = own.sin_port;
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_INT, ports, 1, MPI_INT, MPI_COMM_WORLD);
}

static void socket_act(int step)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_port = (in_port_t)ports[NEXT]};
    EXPECT_SAME(sendto(row_socket, &step, sizeof step, 0, (struct sockaddr *)&to, sizeof to), sizeof step);
}

static void socket_look(int step)
{
    int number;
    while (recv(row_socket, &number, sizeof number, 0) > 0)
        datagrams++;
    EXPECT_SAME(datagrams, step + 1);
}

/* --- sendmsg, raw-connect, syslog: channels that are used otherwise than by connect, listen and
 * sendto; nobody listens */

static struct sockaddr_in nobody(void)
{
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(9), .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

static void sendmsg_act(int step)
{
    struct sockaddr_in to = nobody();
    struct iovec piece = {&step, sizeof step};
    struct msghdr message = {&to, sizeof to, &piece, 1, NULL, 0, 0};
    int from = socket(AF_INET, SOCK_DGRAM, 0);
    EXPECT_SAME(sendmsg(from, &message, 0), sizeof step);
    close(from);
}

static void raw_connect_act(int step)
{
    struct sockaddr_in to = nobody();
    int from = socket(AF_INET, SOCK_DGRAM, 0);
    (void)step;
    EXPECT_SAME(syscall(SYS_connect, from, &to, sizeof to), 0);
    close(from);
}

static void syslog_act(int step) { syslog(LOG_DEBUG, "step %d", step); }

/* --- thread-close: another thread closes a file, and a pipe gets the number of its descriptor */

static void *close_in_thread(void *arg) { return (void *)(intptr_t)close((int)(intptr_t)arg); }

static void thread_close_act(int step)
{
    uint32_t word = value(rank, step, 0), read_back = 0;
    int ends[2], file = open(program, O_RDONLY);
    pthread_t other;
    void *failed = NULL;
    EXPECT_OK(file);
    EXPECT_SAME(pthread_create(&other, NULL, close_in_thread, (void *)(intptr_t)file), 0);
    EXPECT_SAME(pthread_join(other, &failed), 0);
    EXPECT_SAME((intptr_t)failed, 0);
    EXPECT_SAME(pipe(ends), 0);
    EXPECT_SAME(ends[0], file);
    EXPECT_SAME(write(ends[1], &word, sizeof word), sizeof word);
    EXPECT_SAME(read(ends[0], &read_back, sizeof read_back), sizeof read_back);
    EXPECT_SAME(read_back, word);
    close(ends[0]);
    close(ends[1]);
}

/* --- shmat: ranks of the node count in System V shared memory */

static int *counters;

static void shmat_begin(void)
{
    int id = rank ? 0 : shmget(IPC_PRIVATE, BLOCK, 0600);
    MPI_Bcast(&id, 1, MPI_INT, 0, MPI_COMM_WORLD);
    counters = shmat(id, NULL, 0);
    expect(counters != (void *)-1, "shmat: %s", strerror(errno));
    MPI_Barrier(MPI_COMM_WORLD);
    if (!rank)
        shmctl(id, IPC_RMID, NULL);
}

static void shmat_act(int step)
{
    (void)step;
    counters[rank]++;
}

static void shmat_look(int step) { EXPECT_SAME(counters[NEXT], step + 1); }

/* --- signal: the next rank counts signals */

static int pids[64];
static volatile sig_atomic_t signals;

static void on_signal(int signal)
{
    (void)signal;
    signals++;
}

static void signal_begin(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    EXPECT_OK(sigaction(SIGUSR1, &action, NULL));
    pids[rank] = getpid();
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_INT, pids, 1, MPI_INT, MPI_COMM_WORLD);
}

static void signal_act(int step)
{
    (void)step;
    EXPECT_OK(kill(pids[NEXT], SIGUSR1));
}

static void signal_look(int step) { EXPECT_SAME(signals, step + 1); }

/* --- inotify: the rank is notified of a file that it makes itself */

static int watch;

static void inotify_begin(void)
{
    watch = inotify_init1(IN_NONBLOCK);
    EXPECT_OK(mkdir(path("of", rank), 0755));
    EXPECT_OK(inotify_add_watch(watch, path("of", rank), IN_CREATE));
}

static void inotify_act(int step)
{
    char events[4096], name[600];
    snprintf(name, sizeof name, "%s/%d", path("of", rank), step);
    EXPECT_OK(close(open(name, O_CREAT | O_WRONLY, 0644)));
    expect(read(watch, events, sizeof events) > 0, "no event");
}

/* --- constructor: the constructor of a library that is loaded with the program makes a file, which
 * the program continues */

extern int constructor_file;

static void constructor_act(int step)
{
    char line[16];
    size_t length = (size_t)snprintf(line, sizeof line, "%d\n", step);
    EXPECT_SAME(write(constructor_file, line, length), length);
}

static void constructor_look(int step)
{
    FILE *file = fopen(path("of", NEXT), "r");
    int line, count = 0, wrong = 0;
    expect(file != NULL, "fopen: %s", strerror(errno));
    while (file && fscanf(file, "%d", &line) == 1)
        wrong += line != count++ - 1;
    EXPECT_SAME(count, step + 2);
    EXPECT_SAME(wrong, 0);
    fclose(file);
}

/* --- ioctl: the number of bytes that remain in a file */

static void ioctl_act(int step)
{
    int left = 0;
    (void)step;
    EXPECT_OK(ioctl(row_file, FIONREAD, &left));
    EXPECT_SAME(left, BLOCK);
}

/* --- dev-urandom, dev-random, getrandom-raw: each number is first written to a file of the rank,
 * and sent later */

static void tell(int step, uint32_t drawn)
{
    uint32_t stated = 0, all = 0, known = 0;
    int file = open(path("of", rank), O_RDWR | O_CREAT | O_APPEND, 0644);
    EXPECT_OK(file);
    EXPECT_SAME(write(file, &drawn, sizeof drawn), sizeof drawn);
    compute(2);
    MPI_Allreduce(&drawn, &all, 1, MPI_UINT32_T, MPI_SUM, MPI_COMM_WORLD);
    for (int who = 0; who < size; who++) {
        int other = open(path("of", who), O_RDONLY);
        EXPECT_SAME(pread(other, &stated, sizeof stated, step * (off_t)sizeof stated), sizeof stated);
        known += stated;
        close(other);
    }
    EXPECT_SAME(all, known);
    close(file);
}

static void draw_from(const char *device, int step)
{
    uint32_t drawn = 0;
    FILE *file = fopen(device, "r");
    setvbuf(file, NULL, _IONBF, 0);
    EXPECT_SAME(fread(&drawn, 1, sizeof drawn, file), sizeof drawn);
    fclose(file);
    tell(step, drawn);
}

static void urandom_act(int step) { draw_from("/dev/urandom", step); }
static void random_act(int step) { draw_from("/dev/random", step); }

static void getrandom_act(int step)
{
    uint32_t drawn = 0;
    EXPECT_SAME(syscall(SYS_getrandom, &drawn, sizeof drawn, 0), sizeof drawn);
    tell(step, drawn);
}

/* --- removed: a file that each rank has open is replaced by the rank before it */

static void removed_act(int step)
{
    uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(row_file, block, BLOCK, 0), BLOCK);
    if (step == 1) {
        EXPECT_OK(unlink(path("of", NEXT)));
        EXPECT_OK(close(open(path("of", NEXT), O_CREAT | O_WRONLY, 0644)));
    }
}

static void removed_look(int step)
{
    uint32_t block[BLOCK / 4];
    expect_block(block, pread(row_file, block, BLOCK, 0), BLOCK, rank, step);
}

/* --- replaced: the file that rank 1 only has open is replaced late, until the new file has the
 * inode of the old one, as is possible once no process has the old file open */

static ino_t inode_of(int file)
{
    struct stat about;
    return fstat(file, &about) ? 0 : about.st_ino;
}

static ino_t replaced_inode;

static void replaced_begin(void)
{
    put_first_block();
    row_file = open(path("of", rank), O_RDONLY);
    EXPECT_OK(row_file);
    replaced_inode = inode_of(row_file);
    MPI_Bcast(&replaced_inode, sizeof replaced_inode, MPI_BYTE, 1, MPI_COMM_WORLD);
}

static void replaced_act(int step)
{
    for (int time = 0, is_same = 0; step == 9 && rank == 0 && !is_same && time < 50; time++) {
        int file = open(path("new", NEXT), O_WRONLY | O_CREAT, 0644);
        is_same = inode_of(file) == replaced_inode;
        close(file);
        rename(path("new", NEXT), path("of", NEXT));
    }
}

static void replaced_end(void)
{
    uint32_t block[BLOCK / 4];
    expect_block(block, pread(row_file, block, BLOCK, 0), BLOCK, rank, 0);
    file_end();
}

/* --- memfd, vm-write: ranks write into memory of the next rank, or send a message if they may not
 */

static int memory_file, memory_files[64], memory_pids[64];
static uint32_t *memory, received_word;
static uint64_t word_places[64];

static void share_begin(void)
{
    uint64_t place = (uint64_t)(uintptr_t)&received_word;
    int process = getpid();
    memory_file = memfd_create("odd", 0);
    EXPECT_OK(memory_file);
    EXPECT_OK(ftruncate(memory_file, BLOCK));
    memory = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file, 0);
    expect(memory != MAP_FAILED, "mmap: %s", strerror(errno));
    MPI_Allgather(&process, 1, MPI_INT, memory_pids, 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Allgather(&memory_file, 1, MPI_INT, memory_files, 1, MPI_INT, MPI_COMM_WORLD);
    MPI_Allgather(&place, 1, MPI_UINT64_T, word_places, 1, MPI_UINT64_T, MPI_COMM_WORLD);
}

/* Sends the word by messages: either all ranks call this function, or none. */
static void send_word(uint32_t word)
{
    int before = (rank + size - 1) % size;
    MPI_Sendrecv(&word, 1, MPI_UINT32_T, NEXT, 7, &received_word, 1, MPI_UINT32_T, before, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void memfd_act(int step)
{
    char name[64];
    uint32_t word = value(rank, step, 0);
    snprintf(name, sizeof name, "/proc/%d/fd/%d", memory_pids[NEXT], memory_files[NEXT]);
    int file = open(name, O_RDWR);
    if (is_absent(file)) {
        leave_out(1);
        send_word(word);
        memory[0] = received_word;
        return;
    }
    EXPECT_SAME(pwrite(file, &word, sizeof word, 0), sizeof word);
    close(file);
}

static void memfd_look(int step) { EXPECT_SAME(memory[0], value((rank + size - 1) % size, step, 0)); }

static void vm_write_act(int step)
{
    uint32_t word = value(rank, step, 0);
    struct iovec here = {&word, sizeof word}, there = {(void *)(uintptr_t)word_places[NEXT], sizeof word};
    ssize_t wrote = process_vm_writev(memory_pids[NEXT], &here, 1, &there, 1, 0);
    if (is_absent(wrote)) {
        leave_out(1);
        send_word(word);
        return;
    }
    EXPECT_SAME(wrote, sizeof word);
}

static void vm_write_look(int step) { EXPECT_SAME(received_word, value((rank + size - 1) % size, step, 0)); }

/* --- deadline: the rank waits until a time of its clock for another thread, which comes long before
 * that time: after 6 ms, on a busy machine later */

enum { DEADLINE_MS = 400 };

static sem_t deadline_semaphore;
static pthread_mutex_t deadline_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t deadline_condition;
static int deadline_has_come;

static void deadline_begin(void)
{
    pthread_condattr_t monotonic;
    EXPECT_SAME(sem_init(&deadline_semaphore, 0, 0), 0);
    pthread_condattr_init(&monotonic);
    EXPECT_SAME(pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC), 0);
    EXPECT_SAME(pthread_cond_init(&deadline_condition, &monotonic), 0);
}

static void *come_in_thread(void *arg)
{
    usleep(3000);
    sem_post(&deadline_semaphore);
    usleep(3000);
    pthread_mutex_lock(&deadline_lock);
    deadline_has_come = 1;
    pthread_cond_signal(&deadline_condition);
    pthread_mutex_unlock(&deadline_lock);
    return arg;
}

static struct timespec deadline_in(clockid_t clock, long ms)
{
    struct timespec time;
    EXPECT_SAME(clock_gettime(clock, &time), 0);
    time.tv_nsec += ms * 1000000;
    time.tv_sec += time.tv_nsec / 1000000000;
    time.tv_nsec %= 1000000000;
    return time;
}

static void wait_by_timer(void)
{
    struct itimerspec when = {.it_value = deadline_in(CLOCK_MONOTONIC, DEADLINE_MS)};
    int timer = timerfd_create(CLOCK_MONOTONIC, 0);
    uint64_t times = 0;
    EXPECT_SAME(timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL), 0);
    EXPECT_SAME(read(timer, &times, sizeof times), sizeof times);
    EXPECT_SAME(times, 1);
    close(timer);
}

static void deadline_act(int step)
{
    pthread_t other;
    deadline_has_come = 0;
    struct timespec late = deadline_in(CLOCK_REALTIME, 5000), soon = deadline_in(CLOCK_MONOTONIC, DEADLINE_MS);
    struct timespec later = deadline_in(CLOCK_MONOTONIC, 5000);
    EXPECT_SAME(pthread_create(&other, NULL, come_in_thread, NULL), 0);
    EXPECT_SAME(sem_timedwait(&deadline_semaphore, &late), 0);
    if (step % 3 == 0)
        EXPECT_SAME(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &soon, NULL), 0);
    if (step % 3 == 1)
        wait_by_timer();
    pthread_mutex_lock(&deadline_lock);
    if (step % 3 == 2)
        while (!deadline_has_come && pthread_cond_timedwait(&deadline_condition, &deadline_lock, &later) == 0)
            ;
    EXPECT_SAME(deadline_has_come, 1);
    pthread_mutex_unlock(&deadline_lock);
    EXPECT_SAME(pthread_join(other, NULL), 0);
}

/* --- fork-shared: a child that executes no program writes memory that it shares with the rank */

static uint32_t *shared_words;

static void fork_shared_begin(void)
{
    shared_words = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    expect(shared_words != MAP_FAILED, "mmap: %s", strerror(errno));
}

static void fork_shared_act(int step)
{
    struct timespec now;
    EXPECT_SAME(clock_gettime(CLOCK_MONOTONIC, &now), 0);
    pid_t child = fork();
    if (child == 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        shared_words[step] = step + 1;
        _exit(0);
    }
    wait_for(child);
    for (int earlier = 0; earlier <= step; earlier++)
        EXPECT_SAME(shared_words[earlier], earlier + 1);
}

/* --- thread-lock, thread-copy: another thread takes a lock, or copies from a file of the first
 * thread and moves its position */

static void *lock_in_thread(void *arg)
{
    (void)arg;
    return (void *)(intptr_t)(flock(row_file, LOCK_EX) || flock(row_file, LOCK_UN));
}

static void thread_lock_act(int step)
{
    pthread_t other;
    void *failed = NULL;
    (void)step;
    EXPECT_SAME(pthread_create(&other, NULL, lock_in_thread, NULL), 0);
    EXPECT_SAME(pthread_join(other, &failed), 0);
    EXPECT_SAME((intptr_t)failed, 0);
}

static void *copy_in_thread(void *pipe_end)
{
    return (void *)(intptr_t)sendfile((int)(intptr_t)pipe_end, row_file, NULL, sizeof(uint32_t));
}

static void thread_copy_act(int step)
{
    uint32_t word = 0, wanted = 1;
    int ends[2];
    pthread_t other;
    void *copied = NULL;
    EXPECT_SAME(pread(row_file, &wanted, sizeof wanted, step * (off_t)sizeof wanted), sizeof wanted);
    EXPECT_SAME(pipe(ends), 0);
    EXPECT_SAME(pthread_create(&other, NULL, copy_in_thread, (void *)(intptr_t)ends[1]), 0);
    EXPECT_SAME(pthread_join(other, &copied), 0);
    EXPECT_SAME((intptr_t)copied, sizeof word);
    EXPECT_SAME(read(ends[0], &word, sizeof word), sizeof word);
    EXPECT_SAME(word, wanted);
    close(ends[0]);
    close(ends[1]);
}

static const struct row rows[] = {
    {"removed", file_begin, removed_act, removed_look, file_end},
    {"replaced", replaced_begin, replaced_act, NULL, replaced_end},
    {"deadline", deadline_begin, deadline_act, NULL, NULL},
    {"fork-shared", fork_shared_begin, fork_shared_act, NULL, NULL},
    {"memfd", share_begin, memfd_act, memfd_look, NULL},
    {"vm-write", share_begin, vm_write_act, vm_write_look, NULL},
    {"thread-lock", file_begin, thread_lock_act, NULL, file_end},
    {"thread-copy", position_begin, thread_copy_act, NULL, file_end},
    {"mmap-shared", mapped_begin, mapped_act, mapped_look, NULL},
    {"mmap-private", file_begin, private_act, private_look, file_end},
    {"map-input", put_first_block, input_act, input_look, NULL},
    {"map-held", put_first_block, held_act, held_look, compared_end},
    {"map-late.so", put_first_block, late_act, late_look, compared_end},
    {"map-late", put_first_block, late_act, late_look, compared_end},
    {"map-stored", stored_begin, stored_act, stored_look, compared_end},
    {"map-stored-later", put_first_block, later_act, later_look, compared_end},
    {"sync-failed", file_begin, sync_act, NULL, file_end},
    {"io_uring", uring_begin, uring_act, block_look, file_end},
    {"aio-linux", linux_aio_begin, linux_aio_act, block_look, file_end},
    {"aio-posix", file_begin, posix_aio_act, block_look, file_end},
    {"sendfile", copy_begin, sendfile_act, block_look, copy_end},
    {"copy-range", copy_begin, range_act, block_look, copy_end},
    {"splice", copy_begin, splice_act, block_look, copy_end},
    {"children", NULL, children_act, children_look, NULL},
    {"static-child", NULL, static_child_act, child_look, NULL},
    {"bare-child", NULL, bare_child_act, child_look, NULL},
    {"vfork-child", NULL, vfork_child_act, child_look, NULL},
    {"spawn-open", NULL, spawn_open_act, spawn_open_look, NULL},
    {"child-position", position_begin, position_act, NULL, file_end},
    {"passed", file_begin, private_act, passed_look, file_end},
    {"longjmp", jump_begin, jump_act, block_look, file_end},
    {"longjmp-clock", clock_jump_begin, clock_jump_act, sequence_look, file_end},
    {"no-room", file_begin, sequence_act, sequence_look, file_end},
    {"static-main", NULL, static_main_act, static_main_look, NULL},
    {"directory", directory_begin, directory_act, NULL, NULL},
    {"thread-read", position_begin, thread_read_act, NULL, file_end},
    {"threads-read", readers_begin, readers_act, NULL, readers_finish},
    {"thread-map", position_begin, thread_map_act, NULL, file_end},
    {"grandchild", NULL, grandchild_act, child_look, NULL},
    {"child-look", NULL, child_look_act, flag_look, NULL},
    {"thread-way", file_begin, thread_way_act, NULL, file_end},
    {"thread-space", file_begin, thread_space_act, NULL, file_end},
    {"own-name", NULL, own_name_act, NULL, NULL},
    {"file-handle", file_begin, file_handle_act, NULL, file_end},
    {"other-process", NULL, other_process_act, NULL, NULL},
    {"child-link", NULL, link_act, child_link_look, NULL},
    {"thread-link", NULL, link_act, thread_link_look, NULL},
    {"child-directory", NULL, child_directory_act, child_directory_look, NULL},
    {"spawn-directory", NULL, directory_link_act, spawn_directory_look, NULL},
    {"child-times", NULL, child_times_act, child_times_look, NULL},
    {"child-exists", NULL, child_times_act, child_exists_look, NULL},
    {"child-process", NULL, child_process_act, NULL, NULL},
    {"refused-connect", NULL, refused_connect_act, NULL, NULL},
    {"wiped", wiped_begin, wiped_act, NULL, NULL},
    {"socket", socket_begin, socket_act, socket_look, NULL},
    {"sendmsg", NULL, sendmsg_act, NULL, NULL},
    {"raw-connect", NULL, raw_connect_act, NULL, NULL},
    {"syslog", NULL, syslog_act, NULL, NULL},
    {"thread-close", NULL, thread_close_act, NULL, NULL},
    {"shmat", shmat_begin, shmat_act, shmat_look, NULL},
    {"signal", signal_begin, signal_act, signal_look, NULL},
    {"inotify", inotify_begin, inotify_act, NULL, NULL},
    {"constructor", NULL, constructor_act, constructor_look, NULL},
    {"ioctl", file_begin, ioctl_act, NULL, file_end},
    {"handler", handler_begin, handler_act, block_look, file_end},
    {"thread", file_begin, thread_act, block_look, file_end},
    {"dev-urandom", NULL, urandom_act, NULL, NULL},
    {"dev-random", NULL, random_act, NULL, NULL},
    {"getrandom-raw", NULL, getrandom_act, NULL, NULL},
};

int main(int argc, char **argv)
{
    snprintf(program, sizeof program, "%s", argv[0]);
    snprintf(appender, sizeof appender, "%s-appender", argv[0]);
    return run_rows(sizeof rows / sizeof *rows, rows, argc, argv);
}
