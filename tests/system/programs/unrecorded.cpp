// Rank 1 draws a number from a source that may not be recorded, prints it, waits for a while, and
// sends it to rank 0, which prints the received number. If a killed rank 1 draws another number in
// its next incarnation, the job must not end well.
//
//     unrecorded SOURCE ROUNDS [each]
//
// SOURCE is rdtsc, device (std::random_device) or urandom (the file).
//
// With `each` rank 1 draws and prints a number in each round.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mpi.h>
#include <random>
#include <unistd.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

static unsigned draw(const char *source)
{
    if (!strcmp(source, "device"))
        return std::random_device{}();
    if (!strcmp(source, "urandom")) {
        unsigned number = 0;
        FILE *file = fopen("/dev/urandom", "rb");
        if (!file || fread(&number, sizeof number, 1, file) != 1)
            abort();
        fclose(file);
        return number;
    }
#if defined(__x86_64__)
    return static_cast<unsigned>(__rdtsc());
#else
    abort();
#endif
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    unsigned number = 0;
    if (rank == 1) {
        number = draw(argv[1]);
        printf("drew %u\n", number);
        fflush(stdout);
    }
    for (int round = 0; round < atoi(argv[2]); round++) {
        if (rank == 1 && argc > 3) {
            printf("turn %d: %u\n", round, draw(argv[1]));
            fflush(stdout);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        usleep(5000);
    }
    if (rank == 1)
        MPI_Send(&number, 1, MPI_UNSIGNED, 0, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        MPI_Recv(&number, 1, MPI_UNSIGNED, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        printf("heard %u\n", number);
    }
    MPI_Finalize();
}
