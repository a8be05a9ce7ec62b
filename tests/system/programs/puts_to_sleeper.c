/* Rank 0 puts into the window of rank 1, which calls no MPI meanwhile: `PIECES BYTES FLUSH SLEEP_MS`.
 *
 * Rank 0 has locked the window before rank 1 begins to sleep, puts PIECES pieces of BYTES bytes out of a
 * buffer of FLUSH pieces, and calls MPI_Win_flush_local when that buffer is full. Lines of output:
 *
 * | line | when |
 * |---|---|
 * | `rank 1 sleeps` | for SLEEP_MS milliseconds |
 * | `rank 0 has put N` | after each flush; `all`: after the window was unlocked |
 * | `rank 1 wakes` | MPI is called again |
 * | `rank 1 found: N right pieces` | all pieces were compared, word by word |
 *
 * No two words of the window are the same. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static long pieces, words, at_once;

static uint64_t word_of(long piece, long at)
{
    return (uint64_t)(piece * words + at + 1) * 6364136223846793005u;
}

static void say(const char *what)
{
    printf("%s\n", what);
    fflush(stdout);
}

static void put_all(MPI_Win window)
{
    uint64_t *buffer = malloc(at_once * words * sizeof *buffer);
    int token = 0;
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 1, 0, window);
    MPI_Send(&token, 1, MPI_INT, 1, 0, MPI_COMM_WORLD);
    for (long piece = 0; piece < pieces; piece++) {
        uint64_t *mine = buffer + piece % at_once * words;
        for (long at = 0; at < words; at++)
            mine[at] = word_of(piece, at);
        MPI_Put(mine, words, MPI_UINT64_T, 1, piece * words, words, MPI_UINT64_T, window);
        if ((piece + 1) % at_once == 0) {
            MPI_Win_flush_local(1, window);
            printf("rank 0 has put %ld\n", piece + 1);
            fflush(stdout);
        }
    }
    MPI_Win_unlock(1, window);
    say("rank 0 has put all");
    free(buffer);
}

static void sleep_beside(int milliseconds)
{
    int token;
    MPI_Recv(&token, 1, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    say("rank 1 sleeps");
    usleep(milliseconds * 1000);
    say("rank 1 wakes");
}

static void compare(const uint64_t *memory)
{
    long right = 0;
    for (long piece = 0; piece < pieces; piece++) {
        int is_right = 1;
        for (long at = 0; at < words; at++)
            is_right &= memory[piece * words + at] == word_of(piece, at);
        right += is_right;
    }
    printf("rank 1 found: %ld right pieces\n", right);
    fflush(stdout);
}

int main(int count, char **arguments)
{
    int rank;
    MPI_Init(NULL, NULL);
    if (count < 5)
        MPI_Abort(MPI_COMM_WORLD, 2);
    pieces = atol(arguments[1]);
    words = atol(arguments[2]) / sizeof(uint64_t);
    at_once = atol(arguments[3]);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    uint64_t *memory;
    MPI_Win window;
    MPI_Aint size = rank == 1 ? pieces * words * sizeof *memory : 0;
    MPI_Win_allocate(size, sizeof *memory, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    for (long at = 0; at < (long)(size / sizeof *memory); at++)
        memory[at] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        put_all(window);
    else if (rank == 1)
        sleep_beside(atoi(arguments[4]));
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 1)
        compare(memory);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
