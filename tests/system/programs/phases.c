/* Goes through the phases of an MPI program slowly enough for somebody to kill a rank within one.
 *
 *     phases PAUSE_MS ROUNDS BYTES [MIB]
 *
 * | phase | what happens | line of output at its begin |
 * |---|---|---|
 * | contacts | each rank exchanges a number with each other rank for the first time | begins |
 * | memory | rank 1 writes to MIB mebibytes of new memory | has met all |
 * | rounds | 8 messages of BYTES bytes at once go round a ring, and change a little each time | round 0 |
 * | MPI_Finalize | | finalizes |
 * | the end | | ends |
 *
 * Each rank waits PAUSE_MS milliseconds after the first and the last but one of these lines. Lines
 * have the bytes that the rank has, as a digest. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOGETHER 8

static int rank, size;

static void say(const char *what, uint64_t digest)
{
    printf("rank %d %s: %016llx\n", rank, what, (unsigned long long)digest);
    fflush(stdout);
}

static uint64_t digest_of(const uint64_t *words, long count)
{
    uint64_t digest = 14695981039346656037u;
    for (long at = 0; at < count; at++)
        digest = (digest ^ words[at]) * 1099511628211u;
    return digest;
}

static uint64_t meet_all(int pause_ms)
{
    uint64_t met = 0;
    for (int far = 1; far < size; far++) {
        int number = 1000 * far + rank, right = (rank + far) % size, left = (rank + size - far) % size;
        MPI_Sendrecv_replace(&number, 1, MPI_INT, right, 0, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        met = met * 1000003 + number;
        usleep(pause_ms * 100);
    }
    return met;
}

static uint64_t fill(long mebibytes)
{
    uint64_t sum = 0;
    for (long at = 0; at < mebibytes; at++) {
        char *piece = malloc(1 << 20);
        if (!piece)
            MPI_Abort(MPI_COMM_WORLD, 4);
        memset(piece, at + 1, 1 << 20);
        sum += (unsigned char)piece[at];
        usleep(1000);
    }
    return sum;
}

int main(int count, char **words)
{
    if (count < 4)
        return 2;
    int pause_ms = atoi(words[1]), rounds = atoi(words[2]);
    long length = atol(words[3]) / sizeof(uint64_t), mebibytes = count > 4 ? atol(words[4]) : 0;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    say("begins", 0);
    usleep(pause_ms * 1000);
    say("has met all", meet_all(pause_ms));
    if (rank == 1 && mebibytes)
        say("has filled memory", fill(mebibytes));
    long all = TOGETHER * length;
    uint64_t *numbers = malloc(all * sizeof *numbers), *others = malloc(all * sizeof *others);
    for (long at = 0; at < all; at++)
        numbers[at] = at * 2654435761u + rank;
    for (int round = 0; round < rounds; round++) {
        int right = (rank + 1) % size, left = (rank + size - 1) % size;
        MPI_Request requests[2 * TOGETHER];
        for (int at = 0; at < TOGETHER; at++) {
            MPI_Irecv(others + at * length, length, MPI_UINT64_T, left, at, MPI_COMM_WORLD, requests + at);
            MPI_Isend(numbers + at * length, length, MPI_UINT64_T, right, at, MPI_COMM_WORLD, requests + TOGETHER + at);
        }
        MPI_Waitall(2 * TOGETHER, requests, MPI_STATUSES_IGNORE);
        uint64_t *before = numbers;
        numbers = others, others = before;
        /* Little is computed, so that most of the time is that of the messages. */
        for (long at = round % 64; at < all; at += 64)
            numbers[at] = numbers[at] * 6364136223846793005u + round + rank;
        if (round % 10 == 0) {
            char what[32];
            snprintf(what, sizeof what, "round %d", round);
            say(what, digest_of(numbers, all));
        }
    }
    say("finalizes", digest_of(numbers, all));
    usleep(pause_ms * 1000);
    MPI_Finalize();
    say("ends", 0);
    return 0;
}
