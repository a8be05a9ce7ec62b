// Rank 1 draws a number from a source that may not be recorded, prints it, waits for a while, and
// sends it to rank 0, which prints the received number. If a killed rank 1 draws another number in
// its next incarnation, the job must not end well.
//
//     unrecorded SOURCE ROUNDS [each | first]
//
// SOURCE is rdtsc, rdrand, device (std::random_device), urandom (the file), getentropy or arc4random.
//
// With `each` rank 1 draws and prints a number in each round. With `first` rank 1 sends its number
// before all rounds, and does not print it.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mpi.h>
#include <random>
#include <unistd.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#if defined(__x86_64__)
__attribute__((target("rdrnd"))) static unsigned draw_from_processor()
{
    unsigned number = 0;
    // The instruction may find no random number at the moment.
    while (!_rdrand32_step(&number)) {
    }
    return number;
}
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
    if (!strcmp(source, "getentropy")) {
        unsigned number = 0;
        if (getentropy(&number, sizeof number))
            abort();
        return number;
    }
#if __GLIBC_PREREQ(2, 36)
    if (!strcmp(source, "arc4random")) {
        unsigned number = 0;
        arc4random_buf(&number, sizeof number);
        return number ^ arc4random() ^ arc4random_uniform(1u << 30);
    }
#endif
#if defined(__x86_64__)
    if (!strcmp(source, "rdrand"))
        return draw_from_processor();
    return static_cast<unsigned>(__rdtsc());
#else
    abort();
#endif
}

// Rank 1 sends its number to rank 0, which prints it.
static void send_number(int rank, unsigned number)
{
    if (rank == 1)
        MPI_Send(&number, 1, MPI_UNSIGNED, 0, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        MPI_Recv(&number, 1, MPI_UNSIGNED, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        printf("heard %u\n", number);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    bool draws_each = argc > 3 && !strcmp(argv[3], "each"), sends_first = argc > 3 && !draws_each;
    unsigned number = rank == 1 ? draw(argv[1]) : 0;
    if (sends_first)
        send_number(rank, number);
    else if (rank == 1) {
        printf("drew %u\n", number);
        fflush(stdout);
    }
    for (int round = 0; round < atoi(argv[2]); round++) {
        if (rank == 1 && draws_each) {
            printf("turn %d: %u\n", round, draw(argv[1]));
            fflush(stdout);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        usleep(5000);
    }
    if (!sends_first)
        send_number(rank, number);
    MPI_Finalize();
}
