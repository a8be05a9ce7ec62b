/* Common code of the C programs of this folder: plays a list of rows step by step.
 *
 * A row is one way to use files. In each step every rank first calls `act` of each row, then a
 * barrier orders the acts before the looks, then every rank calls `look` of each row LOOKS times. A
 * look changes nothing, and an act touches nothing that another rank touches in the same step,
 * unless the operating system orders the two. So the values that looks see follow from the step
 * alone.
 *
 * The last rank paces the looks: it sleeps and sends a message to each other rank. The other ranks
 * never sleep, so a rank replays earlier steps quickly, and ranks that look do not wait for a
 * killed one.
 *
 * Output, on standard error, so that a row may redirect standard output: `step N` by rank 0 when
 * the acts of a step begin, and at the end for each rank and row `row NAME rank R: wrong W of T,
 * digest D`. */
#ifndef ROWS_H
#define ROWS_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOOKS 3
#define PAUSE_MS 90
#define BLOCK 4096
#define ROWS_MAX 64

struct row {
    const char *name;
    void (*begin)(void);
    void (*act)(int step);
    void (*look)(int step);
    void (*end)(void);
};

static int rank, size, steps;
static const char *folder;

/* Counts of the row that is being played. */
static struct tally {
    long wrong, total;
    uint64_t digest;
} tallies[ROWS_MAX], *tally;
static const char *row_name;

static void fold(const void *bytes, size_t length)
{
    const unsigned char *at = bytes;
    while (length--)
        tally->digest = (tally->digest ^ *at++) * 1099511628211ull;
}

/* Counts a comparison; prints the first three that fail in each row. */
static void expect(int is_right, const char *form, ...)
{
    char text[256];
    va_list words;
    tally->total++;
    fold(&is_right, sizeof is_right);
    if (is_right)
        return;
    if (tally->wrong++ < 3) {
        va_start(words, form);
        vsnprintf(text, sizeof text, form, words);
        va_end(words);
        fprintf(stderr, "wrong: row %s rank %d: %s\n", row_name, rank, text);
    }
}

#define EXPECT_OK(call) expect((call) >= 0, "%s: %s", #call, strerror(errno))
#define EXPECT_SAME(got, want)                                                                     \
    do {                                                                                           \
        long got_ = (long)(got), want_ = (long)(want);                                             \
        expect(got_ == want_, "%s is %ld, and should be %ld", #got, got_, want_);                  \
    } while (0)

/* Path FOLDER/ROW.WHAT.NUMBER of the row that is being played. The text is valid until the eighth
 * call after this one. */
static const char *path(const char *what, int number)
{
    static char texts[8][512];
    static int next;
    char *text = texts[next++ % 8];
    snprintf(text, sizeof texts[0], "%s/%s.%s.%d", folder, row_name, what, number);
    return text;
}

/* The value that rank `who` writes in a step at a position. */
static uint32_t value(int who, int step, int place)
{
    uint64_t x = (uint64_t)who * 1000003u + (uint64_t)step * 7919u + (uint64_t)place + 1;
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
    return (uint32_t)(x >> 32);
}

__attribute__((unused)) static void fill(uint32_t *block, size_t bytes, int who, int step)
{
    for (size_t i = 0; i < bytes / sizeof *block; i++)
        block[i] = value(who, step, (int)i);
}

/* Compares a block with what rank `who` writes in `step`; `got` is the number of bytes read. */
__attribute__((unused)) static void expect_block(const uint32_t *block, ssize_t got, size_t bytes, int who, int step)
{
    size_t wrong = 0;
    EXPECT_SAME(got, bytes);
    for (size_t i = 0; i < bytes / sizeof *block; i++)
        wrong += got < (ssize_t)bytes || block[i] != value(who, step, (int)i);
    expect(!wrong, "%zu of %zu words are not those of rank %d in step %d", wrong, bytes / 4, who, step);
}

/* Computes for some milliseconds without reading a clock. */
static void compute(int ms)
{
    static volatile uint64_t sink;
    for (long i = 0; i < ms * 400000l; i++)
        sink += (uint64_t)i;
}

static void pace(void)
{
    char word = 0;
    if (rank != size - 1) {
        MPI_Recv(&word, 1, MPI_CHAR, size - 1, 77, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        return;
    }
    struct timespec pause = {0, PAUSE_MS * 1000000l};
    nanosleep(&pause, NULL);
    for (int other = 0; other < size - 1; other++)
        MPI_Send(&word, 1, MPI_CHAR, other, 77, MPI_COMM_WORLD);
}

/* Where the steps and the results are printed. */
static FILE *report;

static void play(const struct row *chosen, int count)
{
    if (!rank)
        fprintf(report, "begun\n");
#define EACH for (int r = 0; r < count; r++, tally++) if (row_name = chosen[r].name, 1)
#define FROM_FIRST tally = tallies
    FROM_FIRST;
    EACH if (chosen[r].begin) chosen[r].begin();
    MPI_Barrier(MPI_COMM_WORLD);
    for (int step = 0; step < steps; step++) {
        if (!rank)
            fprintf(report, "step %d\n", step);
        FROM_FIRST;
        EACH {
            compute(1 + 24 / count);
            chosen[r].act(step);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        for (int turn = 0; turn < LOOKS; turn++) {
            pace();
            FROM_FIRST;
            EACH if (chosen[r].look) chosen[r].look(step);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    FROM_FIRST;
    EACH if (chosen[r].end) chosen[r].end();
}

/* Arguments: `PROGRAM FOLDER STEPS ROW[,ROW...]`. Without arguments, prints the names of the rows.
 */
static int run_rows(int count_all, const struct row *all, int argc, char **argv)
{
    struct row chosen[ROWS_MAX];
    int count = 0;
    if (argc < 4) {
        for (int r = 0; r < count_all; r++)
            puts(all[r].name);
        return 0;
    }
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    report = getenv("ROWS_ON_STDOUT") ? stdout : stderr;
    setvbuf(stdout, NULL, _IOLBF, 0);
    folder = argv[1];
    steps = atoi(argv[2]);
    for (char *name = strtok(argv[3], ","); name; name = strtok(NULL, ","))
        for (int r = 0; r < count_all; r++)
            if (!strcmp(all[r].name, name) && count < ROWS_MAX)
                chosen[count++] = all[r];
    for (int r = 0; r < count; r++)
        tallies[r].digest = 14695981039346656037ull;
    play(chosen, count);
    for (int r = 0; r < count; r++) {
        struct tally *one = tallies + r;
        fprintf(report, "row %s rank %d: wrong %ld of %ld, digest %016llx\n", chosen[r].name, rank, one->wrong, one->total,
                (unsigned long long)one->digest);
    }
    MPI_Finalize();
    return 0;
}
#endif
