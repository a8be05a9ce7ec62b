/* One kind of call for each name: `calls NAME FOLDER VALUE`. The driver calls.py runs the program
 * without MPI, under the interposer alone, and compares two incarnations with the same or with
 * another VALUE. `done` on standard output says that the calls were made. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/fs.h>
#include <linux/netlink.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <syslog.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static const char *folder;
static long value;

static void need(int is_right, const char *what)
{
    if (is_right)
        return;
    fprintf(stderr, "wrong: %s: %s\n", what, strerror(errno));
    _exit(3);
}

#define NEED(call) need((call) >= 0, #call)

static const char *path(const char *name)
{
    static char text[4][512];
    static int next;
    char *one = text[next++ % 4];
    snprintf(one, sizeof text[0], "%s/%s", folder, name);
    return one;
}

static int new_file(const char *name) { return open(path(name), O_RDWR | O_CREAT, 0644); }

/* --- channels */

static struct sockaddr_in discard = {.sin_family = AF_INET};

static int datagrams(void)
{
    int made = socket(AF_INET, SOCK_DGRAM, 0);
    discard.sin_port = htons(9);
    discard.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    NEED(made);
    return made;
}

static struct msghdr message(void)
{
    static char word[4] = "word";
    static struct iovec piece = {word, sizeof word};
    return (struct msghdr){&discard, sizeof discard, &piece, 1, NULL, 0, 0};
}

static void by_sendmsg(void)
{
    int from = datagrams();
    struct msghdr one = message();
    NEED(sendmsg(from, &one, 0));
}

static void by_sendmmsg(void)
{
    int from = datagrams();
    struct mmsghdr two[2] = {{message(), 0}, {message(), 0}};
    need(sendmmsg(from, two, 2, 0) == 2, "sendmmsg");
}

static void by_sendto(void)
{
    int from = datagrams();
    NEED(sendto(from, "word", 4, 0, (void *)&discard, sizeof discard));
}

static void by_bind(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int to = datagrams();
    NEED(bind(to, (void *)&any, sizeof any));
}

static void by_raw_connect(void)
{
    int from = datagrams();
    NEED(syscall(SYS_connect, from, &discard, sizeof discard));
}

static void by_own_code(void)
{
    long result, from = datagrams();
    register long none __asm__("r10") = 0;
    register void *address __asm__("r8") = &discard;
    register long length __asm__("r9") = sizeof discard;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"((long)SYS_sendto), "D"(from), "S"("word"), "d"(4L), "r"(none), "r"(address), "r"(length)
                     : "rcx", "r11", "memory");
    need(result == 4, "sendto");
}

static void by_raw_shmat(void)
{
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    long found = syscall(SYS_shmat, id, NULL, 0);
    shmctl(id, IPC_RMID, NULL);
    need(found != -1, "shmat");
}

static void by_raw_semget(void)
{
    int id = (int)syscall(SYS_semget, IPC_PRIVATE, 1, 0600);
    NEED(id);
    semctl(id, 0, IPC_RMID);
}

/* Objects of the system by a number that may have come from another process. */
static void by_shmget(void) { shmctl(shmget(IPC_PRIVATE, 4096, 0600), IPC_RMID, NULL); }
static void by_semop(void)
{
    struct sembuf one = {0, 1, 0};
    semop(-1, &one, 1);
}
static void by_semctl(void) { semctl(-1, 0, GETVAL); }
static void by_msgsnd(void)
{
    struct {
        long kind;
        char text;
    } letter = {1, 'x'};
    msgsnd(-1, &letter, 1, 0);
}
static void by_msgrcv(void)
{
    long letter[2];
    msgrcv(-1, letter, 8, 0, IPC_NOWAIT);
}
static void by_raw_msgctl(void) { syscall(SYS_msgctl, -1, IPC_RMID, NULL); }
static void by_mq_unlink(void) { syscall(SYS_mq_unlink, "lb-no-such-queue"); }
static void by_keyctl(void) { syscall(SYS_keyctl, 0, -3, 0); }

/* Calls that name another process: the parent. */
static void by_question(void) { NEED(kill(getppid(), 0)); }
static void by_limits(void)
{
    struct rlimit limit;
    NEED(prlimit(getppid(), RLIMIT_CORE, NULL, &limit));
}
static void by_priority(void)
{
    errno = 0;
    getpriority(PRIO_PROCESS, (id_t)getppid());
    need(!errno, "getpriority");
}
static void by_processors(void)
{
    cpu_set_t set;
    NEED(sched_getaffinity(getppid(), sizeof set, &set));
}

/* Limits, priority and processors of the process itself and of its threads. */
static void of_itself(void)
{
    cpu_set_t set;
    struct rlimit limit;
    pid_t own = getpid(), thread = (pid_t)syscall(SYS_gettid);
    NEED(sched_getaffinity(0, sizeof set, &set));
    NEED(sched_setaffinity(thread, sizeof set, &set));
    NEED(prlimit(own, RLIMIT_CORE, NULL, &limit));
    NEED(prlimit(0, RLIMIT_CORE, NULL, &limit));
    NEED(setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, (id_t)own)));
    NEED(kill(own, 0));
}

static void by_notice(void) { NEED(fcntl(open(folder, O_RDONLY), F_NOTIFY, DN_CREATE)); }

/* A program that cannot be observed, by its descriptor. */
static void by_fexecve(void)
{
    char *words[] = {"true", NULL}, *none[] = {NULL};
    puts("done");
    fflush(stdout);
    fexecve(open("/bin/true", O_RDONLY | O_CLOEXEC), words, none);
    need(0, "fexecve");
}

static void by_terminal(void)
{
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    NEED(terminal);
}

static void by_device_lock(void)
{
    int device = open("/dev/full", O_RDONLY);
    NEED(flock(device, LOCK_EX | LOCK_NB));
}

/* The kernel takes an address of the family 0 for one of the socket's family. */
static void by_unspecified(void)
{
    int from = datagrams();
    struct sockaddr_in to = discard;
    to.sin_family = AF_UNSPEC;
    NEED(sendto(from, "word", 4, 0, (void *)&to, sizeof to));
}

/* Another thread looks at a file that has changed since the record began. */
static void *look(void *file)
{
    struct stat about;
    return (void *)(long)fstat((int)(long)file, &about);
}
static void *look_at_lock(void *file)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return (void *)(long)fcntl((int)(long)file, F_OFD_GETLK, &whole);
}
static void *look_at_attribute(void *file)
{
    char room[8];
    return (void *)(long)(fgetxattr((int)(long)file, "user.calls", room, sizeof room) > 8);
}
static void in_thread(void *(*work)(void *))
{
    pthread_t other;
    void *result;
    int file = new_file("of");
    need(pthread_create(&other, NULL, work, (void *)(long)file) == 0, "pthread_create");
    pthread_join(other, &result);
    need(!result, "a look in another thread");
}
static void *look_at_times(void *file)
{
    struct statx about;
    (void)file;
    return (void *)(long)statx(AT_FDCWD, "/tmp", 0, STATX_MTIME, &about);
}
/* What a failed connection to a local socket says. */
static int connection_error(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int file = socket(AF_UNIX, SOCK_STREAM, 0);
    NEED(file);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path("of"));
    int error = connect(file, (struct sockaddr *)&address, sizeof address) ? errno : 0;
    close(file);
    return error;
}
static void *connect_in_thread(void *file)
{
    (void)file;
    return (void *)(long)(connection_error() != ECONNREFUSED);
}
static void by_connect_in_thread(void) { in_thread(connect_in_thread); }
static void by_connection_that_fails(void)
{
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int file = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    NEED(connect(file, (struct sockaddr *)&kernel, sizeof kernel));
    need(getpeername(file, (struct sockaddr *)&kernel, &(socklen_t){sizeof kernel}) == 0, "getpeername");
    printf("error %d\n", connection_error());
    close(file);
}
static void by_times(void) { in_thread(look_at_times); }
static void by_look(void) { in_thread(look); }
static void by_look_at_lock(void) { in_thread(look_at_lock); }
static void by_look_at_attribute(void) { in_thread(look_at_attribute); }

static void by_syslog(void)
{
    openlog("calls", LOG_PERROR, LOG_USER);
    syslog(LOG_DEBUG, "%d %.2f %s %d %d %d %.1f", 1, 2.5, "three", 4, 5, 6, 7.5);
}

static void log_by_list(const char *form, ...)
{
    va_list list;
    va_start(list, form);
    vsyslog(LOG_DEBUG, form, list);
    va_end(list);
}

static void by_vsyslog(void)
{
    openlog("calls", LOG_PERROR, LOG_USER);
    log_by_list("%d %.2f %s %d %d %d %.1f", 1, 2.5, "three", 4, 5, 6, 7.5);
}

/* Calls that communicate with no process outside: pairs of sockets, pipes, a child, the kernel. */
static void within(void)
{
    int pair[2], ends[2];
    char room[8] = "";
    struct iovec piece = {"word", 4};
    struct msghdr one = {.msg_iov = &piece, .msg_iovlen = 1};
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    struct ifaddrs *interfaces;
    struct addrinfo *found;
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    need(sendmsg(pair[0], &one, 0) == 4 && recv(pair[1], room, 4, 0) == 4, "socketpair");
    NEED(pipe(ends));
    pid_t child = fork();
    if (!child)
        _exit(write(ends[1], "word", 4) != 4 || send(pair[0], "word", 4, 0) != 4);
    need(read(ends[0], room, 4) == 4 && recv(pair[1], room, 4, 0) == 4, "child");
    NEED(waitpid(child, NULL, 0));
    int netlink = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    NEED(bind(netlink, (void *)&kernel, sizeof kernel));
    NEED(getifaddrs(&interfaces));
    need(getaddrinfo("localhost", NULL, NULL, &found) == 0, "getaddrinfo");
}

/* Calls of the MPI library on sockets of its own (calls_library.c). */
void communicate(void);

/* The same calls of a library of the program's own, whose name begins like one of MPI's. */
static void by_own_library(void)
{
    void *library = dlopen("libmpihelper.so", RTLD_NOW);
    need(library != NULL, "dlopen");
    ((void (*)(void))dlsym(library, "communicate"))();
}

/* Threads that the C library makes without a call of pthread_create. */
static int write_word(void *file) { return write((int)(long)file, "word", 4) != 4; }

static void by_thrd_create(void)
{
    thrd_t other;
    int result;
    need(thrd_create(&other, write_word, (void *)(long)new_file("of")) == thrd_success, "thrd_create");
    need(thrd_join(other, &result) == thrd_success && !result, "a write in another thread");
}

static sem_t is_written;

static void write_in_timer(union sigval file)
{
    need(!write_word(file.sival_ptr), "write");
    sem_post(&is_written);
}

static void by_timer_thread(void)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = write_in_timer};
    struct itimerspec soon = {.it_value = {0, 1000000}};
    timer_t timer;
    event.sigev_value.sival_ptr = (void *)(long)new_file("of");
    NEED(sem_init(&is_written, 0, 0));
    NEED(timer_create(CLOCK_MONOTONIC, &event, &timer));
    NEED(timer_settime(timer, 0, &soon, NULL));
    NEED(sem_wait(&is_written));
}

static void by_chroot(void) { NEED(chroot(folder)); }

static void not_here(int signal)
{
    (void)signal;
    puts("not here");
    exit(0);
}

/* Number 20 is getpid(2) for 32-bit programs. */
static void by_32_bit_call(void)
{
    long result = 20;
    /* A kernel without 32-bit programs ends the process. */
    signal(SIGSEGV, not_here);
    __asm__ volatile("int $0x80" : "+a"(result) : : "r8", "r9", "r10", "r11", "memory");
    need((int)result == -ENOSYS, "int $0x80");
}

static void by_x32_call(void) { need(syscall(0x40000000 | SYS_getpid) == -1 && errno == ENOSYS, "x32"); }

/* --- changes of files, by VALUE */

/* Writes of other bytes with the same length, at the same place. */
static struct iovec bytes_by_value(void)
{
    static char text[32];
    return (struct iovec){text, (size_t)snprintf(text, sizeof text, "value %-13ld\n", value)};
}

static int begun_file(int flags)
{
    int file = open(path("of"), O_RDWR | O_CREAT | flags, 0644);
    need(write(file, "head", 4) == 4, "write");
    return file;
}

static void by_write(void)
{
    struct iovec piece = bytes_by_value();
    need(write(begun_file(0), piece.iov_base, piece.iov_len) == 20, "write");
}

static void by_writev(void)
{
    struct iovec piece = bytes_by_value();
    struct iovec two[2] = {{piece.iov_base, 8}, {(char *)piece.iov_base + 8, piece.iov_len - 8}};
    need(writev(begun_file(0), two, 2) == 20, "writev");
}

static void by_pwrite(void)
{
    struct iovec piece = bytes_by_value();
    need(pwrite(begun_file(0), piece.iov_base, piece.iov_len, 7) == 20, "pwrite");
}

static void by_append(void)
{
    struct iovec piece = bytes_by_value();
    need(write(begun_file(O_APPEND), piece.iov_base, piece.iov_len) == 20, "write");
}

static void by_truncate(void)
{
    close(new_file("of"));
    NEED(truncate(path("of"), value));
}

static void by_ftruncate(void) { NEED(ftruncate(new_file("of"), value)); }

static void by_chmod(void)
{
    close(new_file("of"));
    NEED(chmod(path("of"), (mode_t)(0600 + value % 8)));
}

static void by_fchmod(void) { NEED(fchmod(new_file("of"), (mode_t)(0600 + value % 8))); }

static void by_symlink(void)
{
    char target[32];
    snprintf(target, sizeof target, "target-%ld", value);
    NEED(symlink(target, path("link")));
}

static void by_utimens(void)
{
    struct timespec times[2] = {{value, 0}, {value, 0}};
    close(new_file("of"));
    NEED(utimensat(AT_FDCWD, path("of"), times, 0));
}

static void by_unlinkat(void)
{
    mkdir(path("folder"), 0755);
    unlinkat(AT_FDCWD, path("folder"), value % 2 ? 0 : AT_REMOVEDIR);
}

static void by_directory(void)
{
    mkdir(path("one"), 0755);
    mkdir(path("two"), 0755);
    int one = open(path("one"), O_RDONLY), two = open(path("two"), O_RDONLY);
    NEED(mkdirat(value % 2 ? one : two, "inside", 0755));
}

static void by_attribute(void)
{
    char text[32];
    int length = snprintf(text, sizeof text, "%ld", value);
    int file = new_file("of");
    if (fsetxattr(file, "user.calls", text, (size_t)length, 0) && errno == EOPNOTSUPP)
        puts("not here");
}

/* The program ends without its last write, if VALUE is even. */
static void by_early_end(void)
{
    int file = new_file("of");
    if (value % 2 == 0)
        _exit(0);
    need(write(file, "word", 4) == 4, "write");
}

/* Another program reads from a pipe what the kernel copies there. */
static void by_copy_out(void)
{
    int ends[2], file = open(path("source"), O_RDONLY);
    off_t from = 3;
    NEED(pipe(ends));
    pid_t child = fork();
    if (!child) {
        close(ends[1]);
        dup2(ends[0], 0);
        execlp("cat", "cat", NULL);
        _exit(1);
    }
    close(ends[0]);
    need(sendfile(ends[1], file, &from, 100) == 100 && from == 103, "sendfile");
    need(sendfile(ends[1], file, NULL, 1000) == 1000, "sendfile");
    need(lseek(file, 0, SEEK_CUR) == 1000, "lseek");
    close(ends[1]);
    NEED(waitpid(child, NULL, 0));
}

static void by_directory_ioctl(void)
{
    int flags, directory = open(folder, O_RDONLY);
    ioctl(directory, FS_IOC_GETFLAGS, &flags);
}

static void *close_it(void *file) { return (void *)(long)close((int)(long)file); }

static void by_close_in_thread(void)
{
    pthread_t other;
    int file = new_file("of");
    need(pthread_create(&other, NULL, close_it, (void *)(long)file) == 0, "pthread_create");
    pthread_join(other, NULL);
}

/* --- programs that answer: by a pipe, by both of two pipes, by their exit codes */

static char *answer_of(const char *form)
{
    static char answer[64];
    char command[128];
    snprintf(command, sizeof command, form, value);
    FILE *child = popen(command, "r");
    need(child && fgets(answer, sizeof answer, child), "popen");
    while (fgetc(child) != EOF)
        ;
    need(pclose(child) == 0, "pclose");
    return answer;
}
static void by_answer(void) { printf("%lu letters\n", (unsigned long)strlen(answer_of("echo answer %ld"))); }
static void by_longer_answer(void) { answer_of("echo; test %ld = 1 || echo"); }
static void by_clock_of_child(void) { printf("%d\n", strlen(answer_of("date +%%N; : %ld")) == 10); }
static void by_exit_code(void)
{
    char command[128];
    snprintf(command, sizeof command, "exit %ld", value);
    need(system(command) > 0, "system");
}
/* How much waits in a pipe depends on when the program asks. */
static void by_waiting_bytes(void)
{
    int ends[2], waiting = 0;
    NEED(pipe(ends));
    NEED(write(ends[1], "bytes", value == 1 ? 3 : 5));
    NEED(ioctl(ends[0], FIONREAD, &waiting));
    printf("%d bytes\n", waiting);
}
/* Memory that cannot be read or written gives an error, as without the interposer. */
static void by_bad_memory(void)
{
    void *volatile nothing = (void *)8;
    int ends[2];
    NEED(pipe(ends));
    need(poll(nothing, 1, 0) == -1 && errno == EFAULT, "poll");
    need(select(ends[0] + 1, nothing, NULL, NULL, &(struct timeval){0}) == -1 && errno == EFAULT, "select");
    need(poll(NULL, 1u << 31, 0) == -1 && errno == EINVAL, "poll of too many");
    if (fork() == 0)
        _exit(0);
    need(wait(nothing) == -1 && errno == EFAULT, "wait");
}
static void by_bad_lock(void)
{
    int file = new_file("of"), bare = open(path("of"), O_PATH);
    struct flock asked = {.l_type = F_UNLCK};
    for (long address = 0; address < 16; address += 8)
        need(fcntl(file, F_SETLK, address) == -1 && errno == EFAULT, "a lock of bad memory");
    need(fcntl(file, F_GETLK, &asked) == -1 && errno == EINVAL, "a question for no lock");
    asked.l_type = F_RDLCK;
    need(fcntl(bare, F_GETLK, &asked) == -1 && errno == EBADF, "a question to a bare descriptor");
    NEED(lseek(file, 1, SEEK_SET));
    asked = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_start = INT64_MAX};
    need(fcntl(file, F_SETLK, &asked) == -1 && errno == EOVERFLOW, "a place beyond the last one");
    need(fcntl(file, F_GETLK, &asked) == -1 && errno == EOVERFLOW, "a question beyond the last place");
}
/* Buffers that are partly there, or of impossible lengths. */
static void by_bad_buffers(void)
{
    const size_t page = 4096;
    char word[8] = "bytes", *memory = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct iovec two[2] = {{word, 1}, {word, SIZE_MAX}}, many[1025];
    int file = new_file("of"), ends[2];
    need(memory != MAP_FAILED, "mmap");
    NEED(pipe(ends));
    NEED(munmap(memory + page, page));
    NEED(mprotect(memory + 3 * page, page, PROT_READ));
    for (int at = 0; at < 1025; at++)
        many[at] = (struct iovec){word, 0};
    need(write(file, memory, 2 * page) == (ssize_t)page, "the first of two pages");
    need(write(file, memory + 10, 3 * page) == (ssize_t)page - 10, "the first of three pages");
    need(write(file, memory + page, 1) == -1 && errno == EFAULT, "no page");
    need(readv(file, two, 2) == -1 && errno == EINVAL, "readv of too much");
    need(writev(file, two, 2) == -1 && errno == EINVAL, "writev of too much");
    need(readv(ends[0], two, 2) == -1 && errno == EINVAL, "readv of a pipe");
    need(readv(file, many, 1025) == -1 && errno == EINVAL, "readv of too many");
    two[1] = (struct iovec){memory + page, 1};
    need(writev(file, two, 2) == 1, "the first of two buffers");
    need(lseek(file, 0, SEEK_END) == (off_t)(2 * page - 10 + 1), "the size");
    need(syscall(SYS_uname, NULL) == -1 && errno == EFAULT, "uname to nowhere");
    need(syscall(SYS_uname, memory + 3 * page) == -1 && errno == EFAULT, "uname to a constant");
    need(syscall(SYS_getrandom, NULL, 4, 0) == -1 && errno == EFAULT, "getrandom");
    need(syscall(SYS_clone3, NULL, 88) == -1 && errno == EFAULT, "clone3");
}
/* A wait whose mask cannot be changed. */
static void by_constant_mask(void)
{
    static const sigset_t all = {{-1UL, -1UL}};
    NEED(ppoll(NULL, 0, &(struct timespec){0}, &all));
    NEED(pselect(0, NULL, NULL, NULL, &(struct timespec){0}, &all));
}
/* Two files change their names while both are open. */
static void by_swapped_names(void)
{
    int one = new_file("of"), other = new_file("other");
    NEED(renameat2(AT_FDCWD, path("of"), AT_FDCWD, path("other"), RENAME_EXCHANGE));
    NEED(write(one, "one", 3));
    NEED(write(other, "other", 5));
    need(value != 1 || raise(SIGKILL) == 0, "the end");
    NEED(write(one, "two", 3));
    struct stat about;
    need(stat(path("other"), &about) == 0 && about.st_size == 6, "the size");
}
/* Calls that fail close nothing. */
static void by_failing_closes(void)
{
    int file = new_file("of"), other = new_file("other");
    need(flock(file, LOCK_EX) == 0, "flock");
    need(syscall(SYS_dup3, other, file, 0x999) == -1 && errno == EINVAL, "dup3");
    need(syscall(SYS_close_range, file, file, 8) == -1 && errno == EINVAL, "close_range");
    need(syscall(SYS_close_range, file, 0, 0) == -1 && errno == EINVAL, "close_range of no range");
    NEED(write(file, "one", 3));
    need(flock(open(path("of"), O_RDWR), LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK, "the lock is there");
}
/* A file without a name is closed by another one that takes its descriptor, and by a range. */
static void by_replaced_descriptors(void)
{
    FILE *unnamed = tmpfile();
    int file = new_file("of"), other = fileno(tmpfile());
    need(unnamed != NULL && fputs("word", unnamed) > 0 && fflush(unnamed) == 0, "tmpfile");
    need(syscall(SYS_close_range, file, file, 8) == -1 && errno == EINVAL, "close_range");
    need(freopen("/dev/null", "w", unnamed) != NULL, "freopen");
    NEED(write(other, "word", 4));
    need(syscall(SYS_close_range, other, other, 0) == 0, "close_range");
    need(value != 1 || raise(SIGKILL) == 0, "the end");
    NEED(write(file, "one", 3));
    need(lseek(file, 0, SEEK_END) == 3 && fputs("word", unnamed) > 0 && fflush(unnamed) == 0, "the files");
    need(write(other, "word", 4) == -1 && errno == EBADF, "a closed descriptor");
}
/* A directory is listed with a small buffer while its names are removed. */
static void by_listing(void)
{
    char names[200], name[300];
    int directory = open(folder, O_RDONLY | O_DIRECTORY), listed = 0;
    for (int number = 0; number < 40; number++) {
        snprintf(name, sizeof name, "n%d", number);
        NEED(close(new_file(name)));
    }
    for (long length; (length = syscall(SYS_getdents64, directory, names, sizeof names)) > 0;) {
        for (long at = 0; at < length; at += *(unsigned short *)(names + at + 16))
            if (names[at + 19] == 'n')
                listed += unlinkat(directory, names + at + 19, 0) == 0;
        need(value != 1 || listed < 15 || raise(SIGKILL) == 0, "the end");
    }
    need(listed == 40, "all names");
}
/* All descriptors that the process may have are in use. */
static void by_all_descriptors(void)
{
    int file = new_file("of");
    struct rlimit limit = {64, 64};
    NEED(setrlimit(RLIMIT_NOFILE, &limit));
    while (dup(file) >= 0)
        ;
    need(errno == EMFILE, "too many");
    NEED(write(file, "one", 3));
    need(value != 1 || raise(SIGKILL) == 0, "the end");
    NEED(write(file, "two", 3));
    need(lseek(file, 0, SEEK_END) == 6, "the size");
}
static void by_recvmsg(void)
{
    char room[8];
    struct iovec piece = {room, sizeof room};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    int ends[2];
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    NEED(write(ends[1], "bytes", 5));
    NEED(recv(ends[0], room, 2, MSG_DONTWAIT));
    NEED(recvmsg(ends[0], &message, 0));
}
static void by_waitid(void)
{
    siginfo_t about;
    pid_t child = fork();
    if (child == 0)
        _exit((int)value);
    NEED(waitid(P_PID, (id_t)child, &about, WEXITED));
    need(about.si_pid == child, "the child that has ended");
}
/* Which of two programs answers first depends on VALUE, and what they answer does not. */
static void by_two_pipes(void)
{
    int one[2], two[2], ended = 0;
    NEED(pipe(one));
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, two));
    for (int at = 0; at < 2; at++)
        if (fork() == 0) {
            usleep(at == value % 2 ? 300 * 1000 : 0);
            NEED(write(at ? two[1] : one[1], at ? "second" : "first", at ? 6 : 5));
            _exit(0);
        }
    close(one[1]);
    close(two[1]);
    while (ended < 2) {
        struct pollfd asked[] = {{one[0], POLLIN, 0}, {two[0], POLLIN, 0}};
        char found[16];
        if (ended)
            asked[0].fd = one[0] < 0 ? -1 : one[0];
        NEED(poll(asked, 2, -1));
        for (int at = 0; at < 2; at++) {
            int *file = at ? two : one;
            long got = asked[at].revents ? read(*file, found, sizeof found) : -1;
            if (got > 0)
                printf("%.*s\n", (int)got, found);
            if (got == 0) {
                close(*file);
                *file = -1;
                ended++;
            }
        }
    }
    NEED(wait(NULL));
    NEED(wait(NULL));
}

/* --- calls that succeed, and whose repetition would find something else */

/* Prints what a second incarnation must print as well, although the driver has changed the files. */
static void by_steady_results(void)
{
    char room[64] = "";
    struct statx here;
    int file = open(path("old"), O_RDONLY), folder_file = open(folder, O_RDONLY | O_DIRECTORY);
    NEED(file);
    printf("close-on-exec %d\n", fcntl(file, F_GETFD));
    memset(room, 0, sizeof room);
    long got = read(file, room, sizeof room);
    printf("read %ld, %lu letters\n", got, (unsigned long)strlen(room));
    printf("folder: read %d, ", read(folder_file, room, 1) < 0 ? errno : 0);
    printf("write %d\n", write(folder_file, room, 1) < 0 ? errno : 0);
    NEED(chdir(folder));
    NEED(statx(AT_FDCWD, "", AT_EMPTY_PATH, STATX_NLINK, &here));
    printf("links %u, advice %d\n", here.stx_nlink, posix_fadvise(file, 0, 0, 99));
    int both = open(path("both"), O_RDWR | O_CREAT, 0644);
    NEED(write(both, "0123456789", 10));
    NEED(lseek(both, 0, SEEK_SET));
    NEED(sendfile(both, both, NULL, 3));
    printf("position %ld\n", (long)lseek(both, 0, SEEK_CUR));
    NEED(read(both, room, 2));
    printf("next %.2s\n", room);
}
static void copy_memory(void)
{
    int memory = memfd_create("calls", 0), to = open(path("of"), O_CREAT | O_WRONLY, 0644);
    NEED(write(memory, &value, sizeof value));
    NEED(lseek(memory, 0, SEEK_SET));
    NEED(sendfile(to, memory, NULL, sizeof value));
}
static void by_device(void)
{
    char byte;
    int file = open(path("way"), O_RDONLY);
    NEED(file);
    NEED(read(file, &byte, 1));
}
static void by_link(void) { NEED(open(path("way"), O_PATH | O_NOFOLLOW)); }

/* --- names in the actions of posix_spawn, of which one is exchanged before the program starts */

static void exchange_link(const char *target)
{
    NEED(unlink(path("way")));
    NEED(symlink(target, path("way")));
}

static void spawned(posix_spawn_file_actions_t *actions)
{
    char *words[] = {"true", NULL};
    pid_t child;
    int status = -1;
    need(posix_spawn(&child, "/bin/true", actions, NULL, words, environ) == 0, "posix_spawn");
    NEED(waitpid(child, &status, 0));
    need(status == 0, "the end of a program");
    posix_spawn_file_actions_destroy(actions);
}

static void by_exchanged_directory(void)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    need(posix_spawn_file_actions_addchdir_np(&actions, path("way")) == 0, "addchdir_np");
    exchange_link("/usr");
    spawned(&actions);
}

static void by_exchanged_file(void)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    need(posix_spawn_file_actions_addopen(&actions, 0, path("way"), O_RDONLY, 0) == 0, "addopen");
    exchange_link("/etc/hostname");
    spawned(&actions);
}

static void by_entered_directory(void)
{
    posix_spawn_file_actions_t actions;
    char *words[] = {"true", NULL};
    int root = open("/", O_RDONLY | O_DIRECTORY);
    pid_t child;
    posix_spawn_file_actions_init(&actions);
    need(posix_spawn_file_actions_addfchdir_np(&actions, root) == 0, "addfchdir_np");
    need(posix_spawn(&child, "bin/true", &actions, NULL, words, environ) == 0, "posix_spawn");
    NEED(waitpid(child, NULL, 0));
    posix_spawn_file_actions_destroy(&actions);
}

static void by_steady_directory(void)
{
    for (int at = 0; at < 40; at++) {
        posix_spawn_file_actions_t actions, left;
        posix_spawn_file_actions_init(&left);
        need(posix_spawn_file_actions_addchdir_np(&left, path("way")) == 0, "addchdir_np");
        posix_spawn_file_actions_init(&actions);
        need(posix_spawn_file_actions_addchdir_np(&actions, path("way")) == 0, "addchdir_np");
        spawned(&actions);
    }
}

/* --- locks that another process holds */

static volatile sig_atomic_t alarms;
static sigjmp_buf before;
static int jumps;

static void on_alarm(int signal)
{
    (void)signal;
    alarms++;
    /* A system call of the handler, while the call that it interrupts has not returned. */
    getppid();
    if (jumps)
        siglongjmp(before, 1);
}

static void alarm_soon(int flags)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = flags};
    struct itimerval soon = {{0, 0}, {0, 200000}};
    NEED(sigaction(SIGALRM, &action, NULL));
    NEED(setitimer(ITIMER_REAL, &soon, NULL));
}

static int wait_for_flock(int file) { return flock(file, LOCK_EX); }

static int wait_for_range(int file)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(file, F_SETLKW, &whole);
}

static void interrupted(int (*wait_for)(int))
{
    int file = open(path("locked"), O_RDWR);
    alarm_soon(0);
    need(wait_for(file) == -1 && errno == EINTR && alarms == 1, "a lock that is interrupted");
}

static void by_flock(void) { interrupted(wait_for_flock); }
static void by_fcntl(void) { interrupted(wait_for_range); }

/* The driver releases the lock after the signal, whose handler restarts calls. */
static void by_restarted_lock(void)
{
    int file = open(path("locked"), O_RDWR);
    alarm_soon(SA_RESTART);
    need(wait_for_flock(file) == 0 && alarms == 1, "a lock that is waited for");
}

/* A handler leaves the wait for a lock; the writes that follow are recorded. */
static void by_left_lock(void)
{
    int file = open(path("locked"), O_RDWR), other = new_file("of");
    jumps = 1;
    if (!sigsetjmp(before, 1)) {
        alarm_soon(0);
        wait_for_flock(file);
        need(0, "a lock that is left");
    }
    for (int time = 0; time < 1000; time++)
        need(pwrite(other, "word", 4, 0) == 4, "pwrite");
}

/* Two processes wait for each other's range. Each is interrupted, and keeps its range until the other
 * one is interrupted, too. */
static void by_deadlock(void)
{
    int file = new_file("locked");
    struct flock own = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = value, .l_len = 1}, other = own;
    char mark[8];
    other.l_start = 3 - value;
    NEED(fcntl(file, F_SETLKW, &own));
    snprintf(mark, sizeof mark, "has.%ld", value);
    close(new_file(mark));
    snprintf(mark, sizeof mark, "has.%ld", 3 - value);
    while (access(path(mark), F_OK))
        usleep(1000);
    alarm_soon(0);
    need(fcntl(file, F_SETLKW, &other) == -1 && errno == EINTR, "a range for which two wait");
    sleep(1);
}

/* The bytes from 0 to 99 that another process finds locked, as a line of `-`, `r` and `w`; nothing is
 * asked in the second incarnation. */
static void need_locks(const char *expected)
{
    int status;
    pid_t child;
    if (value != 1)
        return;
    child = fork();
    if (!child) {
        char found[101] = {0};
        int file = open(path("of"), O_RDWR);
        for (int at = 0; at < 100; at++) {
            struct flock one = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
            if (fcntl(file, F_GETLK, &one))
                _exit(2);
            found[at] = one.l_type == F_UNLCK ? '-' : one.l_type == F_RDLCK ? 'r' : 'w';
        }
        for (int at = 0; at < 100; at++)
            if (found[at] != (at < (int)strlen(expected) ? expected[at] : '-')) {
                fprintf(stderr, "locked: %s, expected: %s\n", found, expected);
                _exit(1);
            }
        _exit(0);
    }
    need(waitpid(child, &status, 0) == child && status == 0, "the locks that another process finds");
}

static int range(int file, int command, int kind, int whence, off_t start, off_t length)
{
    struct flock range = {.l_type = kind, .l_whence = whence, .l_start = start, .l_len = length};
    return fcntl(file, command, &range);
}

/* Ranges are locked and unlocked by several descriptors of one file, as POSIX has it: they belong to
 * the process, and end when any of its descriptors of the file is closed. */
static void by_range_locks(void)
{
    int file = new_file("of"), other, reader, writer;
    struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_start = -5, .l_len = 5};
    need(ftruncate(file, 40) == 0, "ftruncate");
    for (int at = 0; at < 20; at++)
        NEED(range(file, F_SETLK, F_WRLCK, SEEK_SET, at * 4, 2));
    for (int at = 0; at < 8; at++)
        NEED(range(file, F_SETLK, F_UNLCK, SEEK_SET, at * 4, 2));
    NEED(other = open(path("of"), O_RDWR));
    NEED(range(other, F_SETLK, F_WRLCK, SEEK_SET, 70, 8));
    need_locks("--------------------------------ww--ww--ww--ww--ww--ww--ww--ww--ww--wwwwwwwwww");
    NEED(range(other, F_SETLK, F_UNLCK, SEEK_END, 0, 0));
    need_locks("--------------------------------ww--ww");
    NEED(lseek(other, 38, SEEK_SET));
    NEED(range(other, F_SETLK, F_WRLCK, SEEK_CUR, -1, 2));
    need_locks("--------------------------------ww--www");
    NEED(fcntl(other, F_GETLK, &asked));
    need(asked.l_type == F_UNLCK && asked.l_whence == SEEK_CUR && asked.l_start == -5, "own locks are not reported");
    NEED(close(other));
    need_locks("");
    NEED(close(file));

    NEED(reader = open(path("of"), O_RDONLY));
    NEED(writer = open(path("of"), O_WRONLY));
    NEED(range(reader, F_SETLK, F_RDLCK, SEEK_SET, 0, 10));
    need(range(reader, F_SETLK, F_WRLCK, SEEK_SET, 0, 10) == -1 && errno == EBADF, "a write lock of a reader");
    need(range(writer, F_SETLK, F_RDLCK, SEEK_SET, 0, 10) == -1 && errno == EBADF, "a read lock of a writer");
    need_locks("rrrrrrrrrr");
    NEED(range(writer, F_SETLK, F_WRLCK, SEEK_SET, 4, 2));
    NEED(file = open(path("of"), O_RDWR));
    NEED(range(file, F_SETLK, F_WRLCK, SEEK_SET, 8, 4));
    need_locks("rrrrwwrrwwww");
    for (int unused = 20; unused < 4096; unused++)
        need(close(unused) == -1 && errno == EBADF, "a descriptor that is not open");
    need(syscall(SYS_close_range, 20, ~0U, 0) == 0, "close_range");
    need_locks("rrrrwwrrwwww");
    NEED(range(reader, F_SETLK, F_UNLCK, SEEK_SET, 1, 10));
    need_locks("r----------w");
    NEED(close(writer));
    need_locks("");
    NEED(close(reader));
    NEED(close(file));
}

/* Locks of the process and those of an open file are apart from each other. */
static void by_mixed_locks(void)
{
    int file = new_file("of"), other;
    NEED(setrlimit(RLIMIT_NOFILE, &(struct rlimit){200, 4096}));
    NEED(range(file, F_SETLK, F_WRLCK, SEEK_SET, 0, 10));
    need(range(file, F_OFD_SETLK, F_WRLCK, SEEK_SET, 0, 10) == -1 && errno == EAGAIN, "a lock against an own one");
    NEED(range(file, F_OFD_SETLK, F_WRLCK, SEEK_SET, 20, 10));
    need(range(file, F_SETLK, F_WRLCK, SEEK_SET, 25, 10) == -1 && errno == EAGAIN, "the reverse");
    NEED(range(file, F_SETLK, F_UNLCK, SEEK_SET, 20, 10));
    need_locks("wwwwwwwwww----------wwwwwwwwww");
    for (int number = 20; number < 200; number++)
        need(dup2(0, number) == number, "dup2");
    need_locks("wwwwwwwwww----------wwwwwwwwww");
    for (int number = 20; number < 200; number++)
        need(close(number) == 0, "close");
    NEED(close(open(path("of"), O_RDONLY)));
    need_locks("--------------------wwwwwwwwww");
    NEED(other = open(path("of"), O_RDWR));
    NEED(range(other, F_OFD_SETLK, F_WRLCK, SEEK_SET, 0, 10));
    NEED(range(file, F_OFD_SETLK, F_UNLCK, SEEK_SET, 0, 0));
    need(range(file, F_SETLK, F_WRLCK, SEEK_SET, 0, 5) == -1 && errno == EAGAIN, "a lock of another open file");
    need_locks("wwwwwwwwww");
    NEED(close(other));
    need_locks("");
    NEED(close(file));
}

static void by_blocked_lock(void) { wait_for_flock(open(path("locked"), O_RDWR)); }

static const struct {
    const char *name;
    void (*make)(void);
} calls[] = {
    {"sendmsg", by_sendmsg},
    {"sendmmsg", by_sendmmsg},
    {"sendto", by_sendto},
    {"bind", by_bind},
    {"raw connect", by_raw_connect},
    {"own code", by_own_code},
    {"raw shmat", by_raw_shmat},
    {"raw semget", by_raw_semget},
    {"shmget", by_shmget},
    {"semop", by_semop},
    {"semctl", by_semctl},
    {"msgsnd", by_msgsnd},
    {"msgrcv", by_msgrcv},
    {"raw msgctl", by_raw_msgctl},
    {"mq_unlink", by_mq_unlink},
    {"keyctl", by_keyctl},
    {"kill of 0", by_question},
    {"prlimit", by_limits},
    {"getpriority", by_priority},
    {"sched_getaffinity", by_processors},
    {"itself", of_itself},
    {"notice", by_notice},
    {"fexecve", by_fexecve},
    {"terminal", by_terminal},
    {"device lock", by_device_lock},
    {"unspecified", by_unspecified},
    {"look", by_look},
    {"look at times", by_times},
    {"connect in thread", by_connect_in_thread},
    {"connection that fails", by_connection_that_fails},
    {"answer of a child", by_answer},
    {"longer answer of a child", by_longer_answer},
    {"clock of a child", by_clock_of_child},
    {"exit code of a child", by_exit_code},
    {"waitid", by_waitid},
    {"recvmsg", by_recvmsg},
    {"bad memory", by_bad_memory},
    {"bad lock", by_bad_lock},
    {"bad buffers", by_bad_buffers},
    {"constant mask", by_constant_mask},
    {"swapped names", by_swapped_names},
    {"all descriptors", by_all_descriptors},
    {"failing closes", by_failing_closes},
    {"replaced descriptors", by_replaced_descriptors},
    {"listing", by_listing},
    {"mixed locks", by_mixed_locks},
    {"waiting bytes", by_waiting_bytes},
    {"two pipes", by_two_pipes},
    {"steady results", by_steady_results},
    {"memory copy", copy_memory},
    {"device by a link", by_device},
    {"link itself", by_link},
    {"exchanged directory", by_exchanged_directory},
    {"exchanged file", by_exchanged_file},
    {"entered directory", by_entered_directory},
    {"steady directory", by_steady_directory},
    {"look at lock", by_look_at_lock},
    {"look at attribute", by_look_at_attribute},
    {"own library", by_own_library},
    {"syslog", by_syslog},
    {"vsyslog", by_vsyslog},
    {"within", within},
    {"library", communicate},
    {"thrd_create", by_thrd_create},
    {"timer thread", by_timer_thread},
    {"chroot", by_chroot},
    {"32-bit call", by_32_bit_call},
    {"x32 call", by_x32_call},
    {"write", by_write},
    {"writev", by_writev},
    {"pwrite", by_pwrite},
    {"append", by_append},
    {"truncate", by_truncate},
    {"ftruncate", by_ftruncate},
    {"chmod", by_chmod},
    {"fchmod", by_fchmod},
    {"symlink", by_symlink},
    {"utimens", by_utimens},
    {"unlinkat", by_unlinkat},
    {"directory", by_directory},
    {"attribute", by_attribute},
    {"early end", by_early_end},
    {"copy out", by_copy_out},
    {"directory ioctl", by_directory_ioctl},
    {"close in thread", by_close_in_thread},
    {"flock", by_flock},
    {"fcntl", by_fcntl},
    {"restarted lock", by_restarted_lock},
    {"left lock", by_left_lock},
    {"deadlock", by_deadlock},
    {"range locks", by_range_locks},
    {"blocked lock", by_blocked_lock},
};

int main(int argc, char **argv)
{
    need(argc == 4, "calls NAME FOLDER VALUE");
    folder = argv[2];
    value = atol(argv[3]);
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++)
        if (!strcmp(calls[at].name, argv[1])) {
            calls[at].make();
            puts("done");
            return 0;
        }
    need(0, argv[1]);
}
