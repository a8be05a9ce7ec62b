/* Rows of Fortran's runtime: the statements are in kernels.f90, the steps in rows.h. */
#include "rows.h"

#define NEXT ((rank + 1) % size)

int sequential(const char *, int, int, int);
int appended(const char *, int, int, int);
int direct(const char *, int, int, int);
int streamed(const char *, int, int, int);
int scratch(const char *, int, int, int);

static int number_of(int who, int step) { return (who * 10007 + step * 7919 + 12345) % 65521; }

#define ACT(kernel)                                                                                \
    static void kernel##_act(int step)                                                             \
    {                                                                                              \
        const char *name = path("of", rank);                                                       \
        EXPECT_SAME(kernel(name, (int)strlen(name), rank, step), 0);                               \
    }
ACT(sequential)
ACT(appended)
ACT(direct)
ACT(streamed)
ACT(scratch)

/* Checks the lines of the next rank. */
static void lines_look(int step)
{
    FILE *file = fopen(path("of", NEXT), "r");
    int when, number, count = 0, wrong = 0;
    expect(file != NULL, "fopen: %s", strerror(errno));
    if (!file)
        return;
    while (fscanf(file, "%d %d", &when, &number) == 2) {
        wrong += when != count || number != number_of(NEXT, count);
        count++;
    }
    EXPECT_SAME(count, step + 1);
    EXPECT_SAME(wrong, 0);
    fclose(file);
}

static void records_look(int step)
{
    int64_t sums[64 * 4 + 1];
    FILE *file = fopen(path("of", NEXT), "r");
    expect(file != NULL, "fopen: %s", strerror(errno));
    EXPECT_SAME(fread(sums, 1, sizeof sums, file), 4 * 512);
    fclose(file);
    for (int record = 1; record <= 4; record++) {
        int64_t want = 0;
        for (int s = 0; s <= step; s++)
            want += number_of(NEXT, s) * record;
        EXPECT_SAME(sums[(record - 1) * 64 + 63], want);
    }
}

static void numbers_look(int step)
{
    int32_t numbers[4096];
    FILE *file = fopen(path("of", NEXT), "r");
    expect(file != NULL, "fopen: %s", strerror(errno));
    EXPECT_SAME(fread(numbers, 1, sizeof numbers, file), 4 * (step + 1));
    fclose(file);
    for (int s = 0; s <= step; s++)
        EXPECT_SAME(numbers[s], number_of(NEXT, s));
}

static const struct row rows[] = {
    {"fortran-sequential", NULL, sequential_act, lines_look, NULL},
    {"fortran-append", NULL, appended_act, lines_look, NULL},
    {"fortran-direct", NULL, direct_act, records_look, NULL},
    {"fortran-stream", NULL, streamed_act, numbers_look, NULL},
    {"fortran-scratch", NULL, scratch_act, NULL, NULL},
};

int main(int argc, char **argv) { return run_rows(sizeof rows / sizeof *rows, rows, argc, argv); }
