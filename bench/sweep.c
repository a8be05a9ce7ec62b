/* Times of MPI operations at every power of two of bytes.
 *
 *     sweep FAMILY [BYTES_MAX]
 *
 * FAMILY  two-sided    rank 0 and rank 1: messages back and forth, windows of messages one way and both ways
 *         pairs        the first half of the ranks sends windows of messages to the second half
 *         self         rank 0 sends to itself
 *         one-sided    rank 0 works on memory of its own and on that of rank 1
 *         collectives  all ranks
 *
 * Each rank uses one buffer again and again, which stays in the caches of the processor (`warm`), or, where a case says `cold`, goes on
 * through 128 MiB of memory, so that no message has the address or the cache lines of the one before.
 *
 * What leaves: on rank 0 a line `CASE<tab>BYTES<tab>MICROSECONDS` for each case and size: the time of one operation (of a round trip, half),
 * of a window the time of one of its messages. It is the median of some batches; a batch takes some milliseconds. What has arrived is compared
 * with what was sent once for each case and size, before it is timed: a difference ends the program with exit code 1.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1l << 20)
#define BYTES_MAX (4 * MIB)
/* Memory of cold buffers, and the least distance between two of them. */
#define COLD_BYTES (128 * MIB)
#define COLD_STEP 4096l
/* Messages of a window. */
#define WINDOW 64
/* No batch is longer than this before the number of operations is settled, and no size has more batches. */
#define BATCH_SECONDS 0.004
#define BATCHES 5
#define TIMES_MAX 100000l
#define TAG 7

static int rank, ranks;
static long bytes;
static char *outgoing, *incoming;
/* Bytes from one buffer to the next, and memory that they go through; both 0: one buffer. */
static long step, area;
static MPI_Request requests[2 * WINDOW];

struct operation {
    const char *name;
    /* Executes the operation so many times; called by all ranks. */
    void (*run)(long times);
    long bytes_min, bytes_max;
    int is_cold;
    /* The operations of one of those `times`, by which the time is divided. */
    double divisor;
};

static void fail(const char *what, const char *name)
{
    fprintf(stderr, "sweep: %s: %s, %ld bytes, rank %d\n", name, what, bytes, rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static char *buffer(char *memory, long number)
{
    return area ? memory + number * step % area : memory;
}

/* --- two-sided */

static void back_and_forth(long times)
{
    int other = 1 - rank;
    for (long at = 0; at < times && rank < 2; at++) {
        if (rank == 0)
            MPI_Send(buffer(outgoing, at), (int)bytes, MPI_BYTE, other, TAG, MPI_COMM_WORLD);
        MPI_Recv(buffer(incoming, at), (int)bytes, MPI_BYTE, other, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1)
            MPI_Send(buffer(outgoing, at), (int)bytes, MPI_BYTE, other, TAG, MPI_COMM_WORLD);
    }
}

/* A window is complete when its receiver has said so. */
static void windows_to(int to, int from, long times)
{
    for (long at = 0; at < times; at++) {
        int count = 0;
        for (long number = at * WINDOW; from >= 0 && number < (at + 1) * WINDOW; number++)
            MPI_Irecv(buffer(incoming, number), (int)bytes, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &requests[count++]);
        for (long number = at * WINDOW; to >= 0 && number < (at + 1) * WINDOW; number++)
            MPI_Isend(buffer(outgoing, number), (int)bytes, MPI_BYTE, to, TAG, MPI_COMM_WORLD, &requests[count++]);
        MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
        int other = to >= 0 ? to : from;
        if (from >= 0)
            MPI_Send(NULL, 0, MPI_BYTE, other, TAG + 1, MPI_COMM_WORLD);
        if (to >= 0)
            MPI_Recv(NULL, 0, MPI_BYTE, other, TAG + 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void one_way(long times)
{
    if (rank < 2)
        windows_to(rank == 0 ? 1 : -1, rank == 0 ? -1 : 0, times);
}

static void both_ways(long times)
{
    if (rank < 2)
        windows_to(1 - rank, 1 - rank, times);
}

static void pairs(long times)
{
    int half = ranks / 2;
    windows_to(rank < half ? rank + half : -1, rank < half ? -1 : rank - half, times);
}

static void to_oneself(long times)
{
    for (long at = 0; at < times && rank == 0; at++) {
        MPI_Irecv(incoming, (int)bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &requests[0]);
        MPI_Send(outgoing, (int)bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
    }
}

static const struct operation two_sided[] = {
    {"back and forth", back_and_forth, 1, BYTES_MAX, 0, 2},
    {"back and forth, cold", back_and_forth, 1, BYTES_MAX, 1, 2},
    {"one way", one_way, 1, BYTES_MAX, 0, WINDOW},
    {"one way, cold", one_way, 1, BYTES_MAX, 1, WINDOW},
    {"both ways", both_ways, 1, BYTES_MAX, 0, 2 * WINDOW},
    {NULL},
};
static const struct operation by_pairs[] = {{"pairs", pairs, 1, BYTES_MAX, 0, WINDOW}, {NULL}};
static const struct operation self[] = {{"to oneself", to_oneself, 1, BYTES_MAX, 0, 1}, {NULL}};

/* --- one-sided: rank 0 works, and rank 1 waits in MPI_Barrier, or takes part in fences */

static MPI_Win window;
static int target;
static enum { FLUSH, LOCK, FENCE } way;
static enum { PUT, GET, ACCUMULATE, FETCH_AND_OP, COMPARE_AND_SWAP } kind;

static void begin(void)
{
    if (way == LOCK)
        MPI_Win_lock(MPI_LOCK_SHARED, target, 0, window);
}

static void end(void)
{
    if (way == FLUSH)
        MPI_Win_flush(target, window);
    else if (way == LOCK)
        MPI_Win_unlock(target, window);
}

static void operate(void)
{
    static const int64_t one = 1, none = 0;
    int count = (int)bytes, words = (int)(bytes / 8);
    switch (kind) {
    case PUT:
        MPI_Put(outgoing, count, MPI_BYTE, target, 0, count, MPI_BYTE, window);
        break;
    case GET:
        MPI_Get(incoming, count, MPI_BYTE, target, 0, count, MPI_BYTE, window);
        break;
    case ACCUMULATE:
        MPI_Accumulate(outgoing, words, MPI_INT64_T, target, 0, words, MPI_INT64_T, MPI_SUM, window);
        break;
    case FETCH_AND_OP:
        MPI_Fetch_and_op(&one, incoming, MPI_INT64_T, target, 0, MPI_SUM, window);
        break;
    case COMPARE_AND_SWAP:
        MPI_Compare_and_swap(&one, &none, incoming, MPI_INT64_T, target, 0, window);
        break;
    }
}

static void one_sided(long times)
{
    for (long at = 0; at < times; at++) {
        if (way == FENCE)
            MPI_Win_fence(0, window);
        if (rank == 0) {
            begin();
            operate();
            end();
        }
    }
    if (way == FENCE)
        MPI_Win_fence(0, window);
}

/* --- collectives */

static void allreduce(long times)
{
    for (long at = 0; at < times; at++)
        MPI_Allreduce(outgoing, incoming, (int)(bytes / 4), MPI_INT32_T, MPI_SUM, MPI_COMM_WORLD);
}

static void alltoall(long times)
{
    for (long at = 0; at < times; at++)
        MPI_Alltoall(outgoing, (int)bytes, MPI_BYTE, incoming, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

/* The root changes: a root that only sends would be ahead of the others by many broadcasts. */
static void broadcast(long times)
{
    for (long at = 0; at < times; at++)
        MPI_Bcast(incoming, (int)bytes, MPI_BYTE, (int)(at % ranks), MPI_COMM_WORLD);
}

static void barrier(long times)
{
    for (long at = 0; at < times; at++)
        MPI_Barrier(MPI_COMM_WORLD);
}

static const struct operation collectives[] = {
    {"Allreduce", allreduce, 4, BYTES_MAX, 0, 1},
    {"Alltoall", alltoall, 1, BYTES_MAX, 0, 1},
    {"Bcast", broadcast, 1, BYTES_MAX, 0, 1},
    {"Barrier", barrier, 1, 1, 0, 1},
    {NULL},
};

/* --- what has arrived */

static void fill(char *memory, int from, long length)
{
    for (long at = 0; at < length; at++)
        memory[at] = (char)(at * 131 + from * 17 + bytes);
}

static int is_of(const char *memory, int from, long length)
{
    for (long at = 0; at < length; at++)
        if (memory[at] != (char)(at * 131 + from * 17 + bytes))
            return 0;
    return 1;
}

/* The rank from which this one receives in an operation, or -1. */
static int source_of(const struct operation *it)
{
    if (it->run == back_and_forth || it->run == both_ways)
        return rank < 2 ? 1 - rank : -1;
    if (it->run == one_way)
        return rank == 1 ? 0 : -1;
    if (it->run == pairs)
        return rank < ranks / 2 ? -1 : rank - ranks / 2;
    return it->run == to_oneself && rank == 0 ? 0 : -1;
}

static void compare(const struct operation *it)
{
    int from = source_of(it);
    memset(incoming, 0x55, (size_t)(it->run == alltoall ? bytes * ranks : bytes));
    fill(outgoing, rank, it->run == alltoall ? bytes * ranks : bytes);
    if (it->run == broadcast && rank == 0)
        fill(incoming, 0, bytes);
    it->run(1);
    int is_right = from < 0 || is_of(incoming, from, bytes);
    if (it->run == broadcast)
        is_right = is_of(incoming, 0, bytes);
    for (int of = 0; it->run == alltoall && of < ranks; of++)
        for (long at = 0, first = rank * bytes; at < bytes; at++)
            is_right &= incoming[of * bytes + at] == (char)((first + at) * 131 + of * 17 + bytes);
    for (long at = 0; it->run == allreduce && at < bytes / 4; at++) {
        uint32_t sum = 0, word;
        for (int of = 0; of < ranks; of++) {
            char part[4];
            for (int byte = 0; byte < 4; byte++)
                part[byte] = (char)((at * 4 + byte) * 131 + of * 17 + bytes);
            memcpy(&word, part, 4);
            sum += word;
        }
        memcpy(&word, incoming + at * 4, 4);
        is_right &= word == sum;
    }
    if (!is_right)
        fail("something else has arrived than was sent", it->name);
}

/* Around what a rank itself reads and writes in its part of the window. */
static void own_memory(int is_end)
{
    if (way == FLUSH)
        MPI_Win_sync(window);
    else if (way == LOCK && is_end)
        MPI_Win_unlock(rank, window);
    else if (way == LOCK)
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
}

static void compare_one_sided(const char *name, char *memory)
{
    fill(outgoing, 5, bytes);
    own_memory(0);
    for (long at = 0; at < bytes; at++)
        memory[at] = incoming[at] = 0;
    if (kind == GET)
        fill(memory, 5, bytes);
    own_memory(1);
    MPI_Barrier(MPI_COMM_WORLD);
    one_sided(1);
    MPI_Barrier(MPI_COMM_WORLD);
    own_memory(0);
    int is_target = rank == target, is_right = 1;
    int64_t word;
    memcpy(&word, memory, 8);
    if ((kind == PUT || kind == ACCUMULATE) && is_target)
        is_right = is_of(memory, 5, bytes);
    else if (kind == GET && rank == 0)
        is_right = is_of(incoming, 5, bytes);
    else if ((kind == FETCH_AND_OP || kind == COMPARE_AND_SWAP) && is_target)
        is_right = word == 1;
    own_memory(1);
    if (!is_right)
        fail("something else is there than was put", name);
}

/* --- times */

static double batch(const struct operation *it, long times)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    it->run(times);
    return MPI_Wtime() - began;
}

/* How often the operation fits a batch, as rank 0 finds it. */
static long times_of(const struct operation *it)
{
    long times = 1;
    for (;;) {
        double seconds = batch(it, times);
        long more = seconds > 0 ? (long)(times * BATCH_SECONDS / seconds) : TIMES_MAX;
        int is_settled = seconds >= BATCH_SECONDS / 2 || times == TIMES_MAX;
        if (!is_settled)
            times = more > 16 * times ? 16 * times : more > times ? more : times + 1;
        if (times > TIMES_MAX)
            times = TIMES_MAX;
        long said[2] = {times, is_settled};
        MPI_Bcast(said, 2, MPI_LONG, 0, MPI_COMM_WORLD);
        times = said[0];
        if (said[1])
            return times;
    }
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static void measure(const struct operation *it)
{
    double seconds[BATCHES];
    step = it->is_cold ? (bytes > COLD_STEP ? bytes : COLD_STEP) : 0;
    area = it->is_cold ? COLD_BYTES / step * step : 0;
    long times = times_of(it);
    for (int at = 0; at < BATCHES; at++)
        seconds[at] = batch(it, times);
    step = area = 0;
    qsort(seconds, BATCHES, sizeof *seconds, by_size);
    if (rank == 0) {
        printf("%s\t%ld\t%.4f\n", it->name, bytes, seconds[BATCHES / 2] / (double)times / it->divisor * 1e6);
        fflush(stdout);
    }
}

static void measure_all(const struct operation *all, long most)
{
    for (const struct operation *it = all; it->name != NULL; it++)
        for (bytes = it->bytes_min; bytes <= it->bytes_max && bytes <= most; bytes *= 2) {
            compare(it);
            measure(it);
        }
}

static void measure_one_sided(long most)
{
    static const char *kinds[] = {"put", "get", "accumulate", "fetch and op", "compare and swap"};
    static const char *ways[] = {"flush", "lock", "fence"};
    for (int own = 0; own < 2; own++)
        for (way = FLUSH; way <= FENCE; way++)
            for (kind = PUT; kind <= COMPARE_AND_SWAP; kind++) {
                char name[80], *memory;
                snprintf(name, sizeof name, "%s, %s%s", kinds[kind], ways[way], own ? ", own rank" : "");
                target = own ? 0 : 1;
                MPI_Win_allocate(most < 8 ? 8 : most, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
                long last = kind >= FETCH_AND_OP ? 8 : most;
                struct operation it = {name, one_sided, kind >= ACCUMULATE ? 8 : 1, last, 0, 1};
                for (bytes = it.bytes_min; bytes <= it.bytes_max; bytes *= 2) {
                    if (way == FLUSH)
                        MPI_Win_lock_all(0, window);
                    compare_one_sided(name, memory);
                    measure(&it);
                    MPI_Barrier(MPI_COMM_WORLD);
                    if (way == FLUSH)
                        MPI_Win_unlock_all(window);
                }
                MPI_Win_free(&window);
            }
}

static char *memory_of(long length)
{
    char *memory = aligned_alloc(4096, (size_t)length);
    if (memory == NULL)
        fail("no memory", "start");
    memset(memory, 1, (size_t)length);
    return memory;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const char *family = argc > 1 ? argv[1] : "";
    long most = argc > 2 ? atol(argv[2]) : BYTES_MAX;
    int is_cold = !strcmp(family, "two-sided"), is_all = !strcmp(family, "collectives");
    int is_known = is_cold || is_all || !strcmp(family, "pairs") || !strcmp(family, "self") || !strcmp(family, "one-sided");
    if (!is_known || most < 1 || most > BYTES_MAX || (ranks < 2 && strcmp(family, "self"))) {
        if (rank == 0)
            fprintf(stderr, "sweep FAMILY [BYTES_MAX]; see the head of sweep.c\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    long length = is_cold ? COLD_BYTES : is_all ? most * ranks : most;
    outgoing = memory_of(length < 4096 ? 4096 : length);
    incoming = memory_of(length < 4096 ? 4096 : length);
    if (is_cold)
        measure_all(two_sided, most);
    else if (is_all)
        measure_all(collectives, most);
    else if (!strcmp(family, "pairs"))
        measure_all(by_pairs, most);
    else if (!strcmp(family, "self"))
        measure_all(self, most);
    else
        measure_one_sided(most);
    MPI_Finalize();
    return 0;
}
