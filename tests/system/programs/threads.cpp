// Programs with threads, whose ranks may be killed. The beginning thread is the one that runs main.
//
//     threads KIND ROUNDS
//
// | KIND | threads | MPI is called by |
// |---|---|---|
// | team | OpenMP computes results that do not depend on timing | the beginning thread |
// | order | OpenMP adds numbers in the order in which threads arrive | the beginning thread |
// | clock | another thread reads the clock all the time, without any use | the beginning thread |
// | random | another thread draws random numbers all the time, without any use | the beginning thread |
// | second | two threads at the same time, once both have called MPI | both threads |
// | other | one thread, which does not begin the program | that thread |

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mpi.h>
#include <omp.h>
#include <pthread.h>
#include <unistd.h>
#include <vector>

static int rank, size, rounds;
static std::atomic<bool> is_over, has_called;

static double compute_by_team(int round)
{
    std::vector<double> values(20000);
#pragma omp parallel for schedule(static)
    for (int at = 0; at < 20000; at++)
        values[at] = std::sin(at * 0.001 + round) * (rank + 1);
    double sum = 0;
    for (double value : values)
        sum += value;
    return sum;
}

static double compute_by_order(int round)
{
    double sum = 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (int at = 0; at < 64; at++) {
        timespec pause = {0, (long) (omp_get_wtime() * 1e9) % 7 * 3000};
        nanosleep(&pause, nullptr);
#pragma omp critical
        sum = sum * 1.000001 + at * (round + 1);
    }
    return sum;
}

static void go_round(bool is_team)
{
    for (int round = 0; round < rounds; round++) {
        double own = is_team ? compute_by_team(round) : compute_by_order(round), sum;
        if (!is_team && rank == 1) {
            printf("own %d %.17g\n", round, own);
            fflush(stdout);
        }
        MPI_Allreduce(&own, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 1) {
            printf("sum %d %.17g\n", round, sum);
            fflush(stdout);
        }
        usleep(5000);
    }
}

static void *read_clock(void *)
{
    timespec time;
    while (!is_over) {
        clock_gettime(CLOCK_MONOTONIC, &time);
        usleep(1000);
    }
    return nullptr;
}

static void *draw_numbers(void *)
{
    unsigned number;
    while (!is_over) {
        if (getentropy(&number, sizeof number))
            abort();
        usleep(1000);
    }
    return nullptr;
}

// Exchanges messages with the same thread of the other ranks.
static void *talk(void *communicator)
{
    for (int round = 0; round < rounds; round++) {
        int number = round, right = (rank + 1) % size, left = (rank + size - 1) % size;
        MPI_Sendrecv_replace(&number, 1, MPI_INT, right, 0, left, 0, *(MPI_Comm *) communicator, MPI_STATUS_IGNORE);
        has_called = true;
        usleep(1000);
    }
    return nullptr;
}

static void *be_program(void *)
{
    int provided;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm world = MPI_COMM_WORLD;
    talk(&world);
    MPI_Finalize();
    return nullptr;
}

int main(int, char **argv)
{
    const char *kind = argv[1];
    rounds = atoi(argv[2]);
    pthread_t thread;
    if (!strcmp(kind, "other")) {
        pthread_create(&thread, nullptr, be_program, nullptr);
        return pthread_join(thread, nullptr);
    }
    int provided;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (!strcmp(kind, "second")) {
        MPI_Comm others, world = MPI_COMM_WORLD;
        MPI_Comm_dup(world, &others);
        pthread_create(&thread, nullptr, talk, &others);
        while (!has_called)
            usleep(100);
        if (rank == 1)
            puts("both call");
        fflush(stdout);
        talk(&world);
        pthread_join(thread, nullptr);
    } else if (!strcmp(kind, "clock") || !strcmp(kind, "random")) {
        pthread_create(&thread, nullptr, !strcmp(kind, "clock") ? read_clock : draw_numbers, nullptr);
        go_round(true);
        is_over = true;
        pthread_join(thread, nullptr);
    } else {
        go_round(!strcmp(kind, "team"));
    }
    MPI_Finalize();
    if (rank == 0)
        printf("over\n");
}
