/* What calls on files take: `FOLDER INPUT`, INPUT being a file that nobody changes. Each rank has a file of its own in FOLDER.
 *
 * Rank 0 prints `KIND SIZE: MICROSECONDS` for each kind of call and size: of the slowest rank, for one call.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Calls of a kind, and bytes that they move at most; fewer bytes where they may be recorded. */
#define CALLS 100000
#define BYTES (128l << 20)
#define BYTES_READ (16l << 20)

static const long sizes[] = {64, 1024, 4096, 65536};
static char own[4096], block[65536];
static int rank;

static void must(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void report(const char *kind, long bytes, long calls, double began)
{
    double took = MPI_Wtime() - began, longest;
    MPI_Reduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (!rank) {
        printf("%s %ld: %.4f\n", kind, bytes, longest / (double)calls * 1e6);
        fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static long calls_of(long bytes, long most) { return most / bytes < CALLS ? most / bytes : CALLS; }

static void by_write(long bytes)
{
    long calls = calls_of(bytes, BYTES);
    int file = open(own, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    must(file >= 0, own);
    double began = MPI_Wtime();
    for (long call = 0; call < calls; call++)
        must(write(file, block, (size_t)bytes) == bytes, "write");
    report("write", bytes, calls, began);
    close(file);
}

static void by_stream(long bytes)
{
    long calls = calls_of(bytes, BYTES);
    FILE *file = fopen(own, "w");
    must(file != NULL, own);
    double began = MPI_Wtime();
    for (long call = 0; call < calls; call++)
        must(fwrite(block, 1, (size_t)bytes, file) == (size_t)bytes, "fwrite");
    must(!fflush(file), "fflush");
    report("fwrite", bytes, calls, began);
    fclose(file);
}

/* In pieces of this size, from the beginning: what the rank has written, or what nobody changes. */
static void by_read(const char *kind, const char *name, long bytes)
{
    int file = open(name, O_RDONLY);
    must(file >= 0, name);
    long calls = 0, most = calls_of(bytes, BYTES_READ);
    double began = MPI_Wtime();
    while (calls < most && read(file, block, (size_t)bytes) == bytes)
        calls++;
    report(kind, bytes, calls, began);
    close(file);
}

static void by_open(void)
{
    double began = MPI_Wtime();
    for (long call = 0; call < CALLS / 10; call++)
        close(open(own, O_RDWR));
    report("open and close", 0, CALLS / 10, began);
}

/* A call that has nothing to do with files. */
static void by_nothing(void)
{
    double began = MPI_Wtime();
    for (long call = 0; call < CALLS; call++)
        syscall(SYS_getppid);
    report("getppid", 0, CALLS, began);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    must(argc == 3, "FOLDER INPUT");
    snprintf(own, sizeof own, "%s/rank-%d", argv[1], rank);
    memset(block, 'x', sizeof block);
    MPI_Barrier(MPI_COMM_WORLD);
    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        by_stream(sizes[s]);
        by_write(sizes[s]);
        by_read("read own", own, sizes[s]);
        by_read("read input", argv[2], sizes[s]);
    }
    by_open();
    by_nothing();
    MPI_Finalize();
    return 0;
}
