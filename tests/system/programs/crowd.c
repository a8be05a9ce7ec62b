/* Many ranks: in each round a sum over all of them, and messages to neighbours at two distances. `crowd ROUNDS`
 *
 * Rank 0 prints `round N: SUM` in each round, and each rank prints what it has received in the end. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define NUMBERS 256

static int rank, size;
static long seen;

/* Sends numbers to the rank at this distance and takes those of the rank at the same distance on the other side. */
static void exchange(int distance, long round)
{
    static long out[NUMBERS], in[NUMBERS];
    int to = (rank + distance) % size, from = (rank - distance % size + size) % size;
    for (int place = 0; place < NUMBERS; place++)
        out[place] = seen + place * round + rank;
    MPI_Sendrecv(out, NUMBERS, MPI_LONG, to, 0, in, NUMBERS, MPI_LONG, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    for (int place = 0; place < NUMBERS; place++)
        seen = (seen * 31 + in[place]) % 1000003;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    long rounds = argc > 1 ? atol(argv[1]) : 20;
    for (long round = 0; round < rounds; round++) {
        long sum = 0;
        exchange(1, round);
        exchange(1 << round % 8, round);
        MPI_Allreduce(&seen, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        seen = (seen + sum) % 1000003;
        if (!rank) {
            printf("round %ld: %ld\n", round, sum);
            fflush(stdout);
        }
    }
    printf("rank %d: %ld\n", rank, seen);
    MPI_Finalize();
    return 0;
}
