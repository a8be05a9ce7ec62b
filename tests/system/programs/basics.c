/* Hello, ping-pong, allreduce and one-sided operations, each checked: the counterpart of basics.py
 * for a library without mpi4py. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 1 << 20, COUNT = 100000, CELLS = 1000, INCREMENTS = 50 };

static int rank, size;

static void check(int is_right, const char *what)
{
    if (!is_right) {
        fprintf(stderr, "rank %d: %s is wrong\n", rank, what);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static int is_mapped(void)
{
    char line[1024];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "liblandbridge-fi.so") != NULL;
    if (maps)
        fclose(maps);
    return found;
}

static void hello(void)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length, mine = is_mapped(), all = 0;
    MPI_Reduce(&mine, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Get_library_version(version, &length);
    if (rank == 0)
        printf("library: %.17s\nmapped: %d\n", version, all);
}

static void ping_pong(void)
{
    int peer = rank ^ 1;
    unsigned char *out = malloc(LONGEST), *back = malloc(LONGEST);
    for (int bytes = 0; peer < size && bytes <= LONGEST; bytes = bytes ? bytes * 16 : 1) {
        for (int i = 0; i < bytes; i++)
            out[i] = (unsigned char)(i * 7 + rank);
        if (rank < peer) {
            MPI_Send(out, bytes, MPI_BYTE, peer, 5, MPI_COMM_WORLD);
            MPI_Recv(back, bytes, MPI_BYTE, peer, 6, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(back, bytes, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(out, bytes, MPI_BYTE, peer, 6, MPI_COMM_WORLD);
        }
        for (int i = 0; i < bytes; i++)
            check(back[i] == (unsigned char)(i * 7 + peer), "ping-pong");
    }
    free(out);
    free(back);
}

static void allreduce(void)
{
    double *mine = malloc(COUNT * sizeof *mine), *total = malloc(COUNT * sizeof *total);
    for (int i = 0; i < COUNT; i++)
        mine[i] = rank + 1;
    MPI_Allreduce(mine, total, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
        check(total[i] == size * (size + 1) / 2.0, "allreduce");
    free(mine);
    free(total);
}

static void one_sided(void)
{
    long memory[CELLS + 1] = {0}, values[CELLS], one = 1, seen = 0;
    int right = (rank + 1) % size, left = (rank + size - 1) % size;
    MPI_Win window;
    for (int i = 0; i < CELLS; i++)
        values[i] = (long)i * (rank + 1);
    MPI_Win_create(memory, sizeof memory, sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_fence(0, window);
    MPI_Put(values, CELLS, MPI_LONG, right, 0, CELLS, MPI_LONG, window);
    MPI_Win_fence(0, window);
    for (int i = 0; i < CELLS; i++)
        check(memory[i] == (long)i * (left + 1), "put");
    MPI_Win_lock_all(0, window);
    for (int i = 0; i < INCREMENTS; i++)
        MPI_Fetch_and_op(&one, &seen, MPI_LONG, 0, CELLS, MPI_SUM, window);
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
    MPI_Get(&seen, 1, MPI_LONG, 0, CELLS, 1, MPI_LONG, window);
    MPI_Win_unlock(0, window);
    check(seen == (long)INCREMENTS * size, "fetch_and_op");
    MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    hello();
    ping_pong();
    allreduce();
    one_sided();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("done: %d\n", size);
    MPI_Finalize();
    return 0;
}
