/* Ping-pong of two ranks that log what they send, as the paper on sender-based logging does it: beside the transport, by a copy into a store.
 *
 * Usage: payload_log STORE COPY [BYTES_MAX [FOLDER [PROFILE]]]
 *
 * STORE  none    nothing is logged
 *        dummy   each message is copied over the one before: the cost of the copy alone
 *        heap    anonymous memory, 256 MiB at a time; the oldest is given back beyond 1 GiB
 *        file    a file in FOLDER, seen through a window of 256 MiB that moves; it begins again beyond 4 GiB
 *        shared  64 MiB of shared memory, used again and again, as logs are between checkpoints
 * COPY   pack    the whole message is copied, then sent
 *        pieces  each 64 KiB of it is copied and sent, at most four at a time
 *        thread  another thread copies the message while it is sent; the call ends when both have
 *        hybrid  for each size the fastest of the three, measured at the start; with PROFILE, measured as often as the result, and rank 0
 *                writes into that file which it takes
 *        profile for each size what the file PROFILE says, which another run has written
 *
 * Rank 0 prints `BYTES MICROSECONDS COPY` for each power of two up to BYTES_MAX (default 8 MiB): one way, the best of three trials. Both
 * ranks log. Each received message is checked, and so is what the store holds of the last one.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PIECE (64l << 10)
#define PIECES_MAX 4
#define WINDOW (256l << 20)
#define HEAP_WINDOWS 4
#define FILE_BYTES (4l << 30)
#define SHARED_BYTES (64l << 20)
/* Messages of fewer bytes are copied by the caller: to wake a thread takes longer. */
#define THREAD_BYTES_MIN 4096
#define TRIALS 3
#define TRIAL_SECONDS 0.02

static int rank;

static void must(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* --- stores: each returns where a message of this length goes */

static char *window;
static long used;

static char *mapped(int flags, int file, long at)
{
    char *memory = mmap(NULL, WINDOW, PROT_READ | PROT_WRITE, flags, file, at);
    must(memory != MAP_FAILED, "mmap");
    return memory;
}

static char *dummy_room(long bytes)
{
    (void)bytes;
    if (!window)
        window = mapped(MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return window;
}

static char *heap_room(long bytes)
{
    static char *windows[HEAP_WINDOWS];
    static long count;
    if (!window || used + bytes > WINDOW) {
        char **oldest = &windows[count++ % HEAP_WINDOWS];
        if (*oldest)
            munmap(*oldest, WINDOW);
        window = *oldest = mapped(MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        used = 0;
    }
    used += bytes;
    return window + used - bytes;
}

static int file = -1;

static char *file_room(long bytes)
{
    static long at;
    if (!window || used + bytes > WINDOW) {
        if (window) {
            munmap(window, WINDOW);
            at += WINDOW;
        }
        if (at >= FILE_BYTES) {
            must(!ftruncate(file, 0), "ftruncate");
            at = 0;
        }
        must(!ftruncate(file, at + WINDOW), "ftruncate");
        window = mapped(MAP_SHARED, file, at);
        used = 0;
    }
    used += bytes;
    return window + used - bytes;
}

static char *shared_room(long bytes)
{
    if (!window) {
        int memory = memfd_create("payload-log", MFD_CLOEXEC);
        must(memory >= 0 && !ftruncate(memory, WINDOW), "memfd_create");
        window = mapped(MAP_SHARED, memory, 0);
        close(memory);
        /* What logs use between checkpoints was used before. */
        memset(window, 1, SHARED_BYTES);
    }
    if (used + bytes > SHARED_BYTES)
        used = 0;
    used += bytes;
    return window + used - bytes;
}

static char *(*room)(long);
static char *last_copy;

/* --- copies */

static void sent(const char *message, long bytes)
{
    MPI_Send(message, (int)bytes, MPI_BYTE, !rank, 0, MPI_COMM_WORLD);
}

static void send_alone(const char *message, long bytes) { sent(message, bytes); }

static void send_packed(const char *message, long bytes)
{
    last_copy = room(bytes);
    memcpy(last_copy, message, (size_t)bytes);
    sent(message, bytes);
}

static void send_pieces(const char *message, long bytes)
{
    MPI_Request requests[PIECES_MAX];
    int count = 0;
    last_copy = room(bytes);
    for (long at = 0; at < bytes; at += PIECE) {
        long piece = bytes - at < PIECE ? bytes - at : PIECE;
        int slot = count;
        if (count == PIECES_MAX)
            MPI_Waitany(PIECES_MAX, requests, &slot, MPI_STATUS_IGNORE);
        else
            count++;
        memcpy(last_copy + at, message + at, (size_t)piece);
        MPI_Isend(message + at, (int)piece, MPI_BYTE, !rank, 0, MPI_COMM_WORLD, &requests[slot]);
    }
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
}

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const char *from;
    char *to;
    long bytes;
} task = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, NULL, 0};

static void *copy_forever(void *nothing)
{
    pthread_mutex_lock(&task.lock);
    for (;;) {
        while (!task.from)
            pthread_cond_wait(&task.changed, &task.lock);
        pthread_mutex_unlock(&task.lock);
        memcpy(task.to, task.from, (size_t)task.bytes);
        pthread_mutex_lock(&task.lock);
        task.from = NULL;
        pthread_cond_broadcast(&task.changed);
    }
    return nothing;
}

static void send_beside_thread(const char *message, long bytes)
{
    static pthread_t thread;
    if (bytes < THREAD_BYTES_MIN) {
        send_packed(message, bytes);
        return;
    }
    if (!thread)
        must(!pthread_create(&thread, NULL, copy_forever, NULL), "pthread_create");
    last_copy = room(bytes);
    pthread_mutex_lock(&task.lock);
    task.from = message;
    task.to = last_copy;
    task.bytes = bytes;
    pthread_cond_broadcast(&task.changed);
    pthread_mutex_unlock(&task.lock);
    sent(message, bytes);
    pthread_mutex_lock(&task.lock);
    while (task.from)
        pthread_cond_wait(&task.changed, &task.lock);
    pthread_mutex_unlock(&task.lock);
}

typedef void (*way)(const char *, long);

static const struct {
    const char *name;
    way send;
} ways[] = {{"pack", send_packed}, {"pieces", send_pieces}, {"thread", send_beside_thread}};

/* --- ping-pong */

static void receive(char *message, long bytes, int in_pieces)
{
    long each = in_pieces ? PIECE : bytes;
    for (long at = 0; at < bytes; at += each) {
        long piece = bytes - at < each ? bytes - at : each;
        MPI_Recv(message + at, (int)piece, MPI_BYTE, !rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

/* Microseconds one way. */
static double exchange(way send, char *out, char *in, long bytes, long times)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (long turn = 0; turn < times; turn++) {
        out[0] = out[bytes - 1] = (char)turn;
        if (!rank)
            send(out, bytes);
        receive(in, bytes, send == send_pieces);
        if (rank)
            send(out, bytes);
        if (in[0] != (char)turn || in[bytes - 1] != (char)turn) {
            fprintf(stderr, "another message than number %ld has arrived\n", turn);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    double took = (MPI_Wtime() - began) / (double)times / 2 * 1e6;
    if (send != send_alone && memcmp(last_copy, out, (size_t)bytes)) {
        fprintf(stderr, "the store holds another message than the last one\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Bcast(&took, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return took;
}

static double best_of(way send, char *out, char *in, long bytes, int trials)
{
    double best = exchange(send, out, in, bytes, 3);
    long times = (long)(TRIAL_SECONDS / (best / 1e6) / 2) + 3;
    best = 1e30;
    for (int trial = 0; trial < trials; trial++) {
        double took = exchange(send, out, in, bytes, times);
        best = took < best ? took : best;
    }
    return best;
}

static int fastest(char *out, char *in, long bytes, int trials)
{
    double took[3];
    int found = 0;
    for (int number = 0; number < 3; number++) {
        took[number] = best_of(ways[number].send, out, in, bytes, trials);
        found = took[number] < took[found] ? number : found;
    }
    return found;
}

/* The number of a copy method; -1: there is none of this name. */
static int numbered(const char *name)
{
    for (int number = 0; number < 3; number++)
        if (!strcmp(name, ways[number].name))
            return number;
    return -1;
}

/* Of a profile, which has lines `BYTES COPY` by size: the copy method of the largest size that is not above this one. */
static int profiled(const char *profile, long bytes)
{
    char copy[16];
    long size;
    int found = -1;
    FILE *lines = fopen(profile, "r");
    must(lines != NULL, profile);
    while (fscanf(lines, "%ld %15s", &size, copy) == 2)
        found = size <= bytes ? numbered(copy) : found;
    fclose(lines);
    if (found < 0) {
        fprintf(stderr, "%s names no copy method for messages of %ld bytes\n", profile, bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return found;
}

static void choose_store(const char *store, const char *folder)
{
    if (!strcmp(store, "file")) {
        char name[4096];
        snprintf(name, sizeof name, "%s/payload-log-%d-XXXXXX", folder, rank);
        file = mkstemp(name);
        must(file >= 0 && !unlink(name), name);
        room = file_room;
    }
    room = !strcmp(store, "dummy") ? dummy_room : !strcmp(store, "heap") ? heap_room : !strcmp(store, "shared") ? shared_room : room;
}

int main(int argc, char **argv)
{
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const char *store = argc > 2 ? argv[1] : "", *copy = argc > 2 ? argv[2] : "";
    long most = argc > 3 ? atol(argv[3]) : 8l << 20;
    const char *profile = argc > 5 ? argv[5] : NULL;
    int is_logged = strcmp(store, "none") != 0, is_hybrid = !strcmp(copy, "hybrid"), is_read = !strcmp(copy, "profile");
    int chosen = numbered(copy);
    choose_store(store, argc > 4 ? argv[4] : "/var/tmp");
    int is_known = room && (chosen >= 0 || is_hybrid || (is_read && profile));
    if ((is_logged && !is_known) || most < 1 || most > WINDOW) {
        fprintf(stderr, "usage: payload_log none|dummy|heap|file|shared pack|pieces|thread|hybrid|profile [BYTES_MAX [FOLDER [PROFILE]]]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    FILE *written = !rank && is_hybrid && profile ? fopen(profile, "w") : NULL;
    must(written || rank || !is_hybrid || !profile, "the profile");
    char *out = malloc((size_t)most), *in = malloc((size_t)most);
    must(out && in, "malloc");
    memset(out, rank, (size_t)most);
    memset(in, rank, (size_t)most);
    for (long bytes = 1; bytes <= most; bytes *= 2) {
        if (is_logged && is_hybrid)
            chosen = fastest(out, in, bytes, profile ? TRIALS : 1);
        if (is_logged && is_read)
            chosen = profiled(profile, bytes);
        if (written)
            fprintf(written, "%ld %s\n", bytes, ways[chosen].name);
        double took = best_of(is_logged ? ways[chosen].send : send_alone, out, in, bytes, TRIALS);
        if (!rank)
            printf("%ld %.3f %s\n", bytes, took, is_logged ? ways[chosen].name : "none");
    }
    must(!written || !fclose(written), "the profile");
    MPI_Finalize();
    return 0;
}
