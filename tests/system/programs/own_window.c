/* Small operations of rank 0 on its own part of a window, each completed by a flush: `TIMES`.
 *
 * Prints the mean time of each kind, and the number of sleeps of the rank. A program in C, because
 * the provider takes the slower calls of an interpreter for a program that computes between polls. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#define NUMBERS 16

static long times, ones[NUMBERS], got[NUMBERS];
static MPI_Win window;

static long sleeps(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_nvcsw;
}

static void measure(const char *kind, int numbers, int is_put)
{
    double began = MPI_Wtime();
    for (long i = 0; i < times; i++) {
        if (is_put)
            MPI_Put(ones, numbers, MPI_LONG, 0, 0, numbers, MPI_LONG, window);
        else
            MPI_Accumulate(ones, numbers, MPI_LONG, 0, 0, numbers, MPI_LONG, MPI_SUM, window);
        MPI_Win_flush(0, window);
    }
    double took = MPI_Wtime() - began;
    printf("%s %d B, us: %.2f\n", kind, 8 * numbers, took / (double)times * 1e6);
}

int main(int argc, char **argv)
{
    int rank, wrong = 0;
    long *part;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    times = argc > 1 ? atol(argv[1]) : 0;
    MPI_Win_allocate(NUMBERS * sizeof *part, sizeof *part, MPI_INFO_NULL, MPI_COMM_WORLD, &part, &window);
    for (int i = 0; i < NUMBERS; i++)
        part[i] = 0, ones[i] = 1;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, window);
    if (!rank) {
        long before = sleeps();
        measure("Put", 1, 1);
        measure("Accumulate", 4, 0);
        measure("Accumulate", 8, 0);
        measure("Accumulate", 16, 0);
        printf("sleeps: %ld\n", sleeps() - before);
        MPI_Get(got, NUMBERS, MPI_LONG, 0, 0, NUMBERS, MPI_LONG, window);
        MPI_Win_flush(0, window);
        for (int i = 0; i < NUMBERS; i++)
            wrong += got[i] != (i == 0) + times * ((i < 4) + (i < 8) + 1);
        printf("wrong numbers: %d\n", wrong);
        fflush(stdout);
    }
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
