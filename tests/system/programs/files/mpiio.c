/* Rows of MPI's own file calls: individual, collective, with views, by shared pointer,
 * non-blocking. See rows.h; within.h can stop a rank inside a write.
 *
 * The name of a row may end with a colon and a value of `romio_cb_write`: automatic, enable,
 * disable. */
#include "rows.h"
#include "within.h"

#define PIECE 1024

/* Hints for collective buffering, from the end of the row's name. */
static MPI_Info hints(void)
{
    MPI_Info info = MPI_INFO_NULL;
    const char *word = strchr(row_name, ':');
    if (word) {
        MPI_Info_create(&info);
        MPI_Info_set(info, "romio_cb_write", word + 1);
        MPI_Info_set(info, "romio_cb_read", word + 1);
    }
    return info;
}

/* Checks the error code of a file call; an error counts as a failed comparison. */
#define EXPECT_MPI(call) EXPECT_SAME(call, MPI_SUCCESS)

static MPI_File open_all(const char *name)
{
    MPI_File file;
    MPI_Info info = hints();
    EXPECT_MPI(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_CREATE | MPI_MODE_RDWR, info, &file));
    if (info != MPI_INFO_NULL)
        MPI_Info_free(&info);
    return file;
}

/* One file for each row, open from the first step to the last. */
static MPI_File files[ROWS_MAX];
#define FILE_OF_ROW files[tally - tallies]

static void file_begin(void) { FILE_OF_ROW = open_all(path("of", 0)); }
static void file_end(void) { EXPECT_MPI(MPI_File_close(&FILE_OF_ROW)); }

static void expect_piece(const uint32_t *piece, int who, int step)
{
    int wrong = 0;
    for (int i = 0; i < PIECE; i++)
        wrong += piece[i] != value(who, step, i);
    expect(!wrong, "%d of %d words are not those of rank %d in step %d", wrong, PIECE, who, step);
}

/* Checks a piece by plain calls: what MPI has written is visible to all ranks once MPI has
 * returned. */
static void look_at(int file, long place, int who, int step)
{
    uint32_t piece[PIECE];
    EXPECT_SAME(pread(file, piece, sizeof piece, place * (off_t)sizeof piece), sizeof piece);
    expect_piece(piece, who, step);
}

/* --- write-at-all: a growing array is written whole, so that its bytes change their writer, and
 * also the rank that collects them */

static uint32_t all_pieces[64 * PIECE];

/* Fills the part of this rank, and returns its place in the file. */
static MPI_Offset fill_all(int step)
{
    for (int p = 0; p <= step; p++)
        fill(all_pieces + p * PIECE, PIECE * sizeof *all_pieces, rank * 64 + p, step);
    return (MPI_Offset)rank * (step + 1) * (MPI_Offset)(PIECE * sizeof *all_pieces);
}

static void at_all_act(int step)
{
    MPI_Offset at = fill_all(step);
    EXPECT_MPI(MPI_File_write_at_all(FILE_OF_ROW, at, all_pieces, (step + 1) * PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
}

static void at_all_look(int step)
{
    int file = open(path("of", 0), O_RDONLY);
    EXPECT_OK(file);
    for (int p = 0; p < size * (step + 1); p++)
        look_at(file, p, p / (step + 1) * 64 + p % (step + 1), step);
    close(file);
}

/* --- write-at: pieces change their owner, and each is written every fourth step */

#define PIECES 16

static int owner_of(int piece, int step) { return (piece + step / 4) % size; }

static void at_act(int step)
{
    uint32_t piece[PIECE];
    for (int p = step % 4; p < PIECES; p += 4)
        if (owner_of(p, step) == rank) {
            fill(piece, sizeof piece, rank, step);
            EXPECT_MPI(MPI_File_write_at(FILE_OF_ROW, p * (MPI_Offset)sizeof piece, piece, PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
        }
}

static void at_look(int step)
{
    uint32_t piece[PIECE];
    for (int p = 0; p < PIECES; p++) {
        int last = step - (step - p % 4 + 4) % 4;
        if (last < 0)
            continue;
        EXPECT_MPI(MPI_File_read_at(FILE_OF_ROW, p * (MPI_Offset)sizeof piece, piece, PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
        expect_piece(piece, owner_of(p, last), last);
    }
}

/* --- write-view: words of all ranks alternate in a file, by a view of each rank (collective, or by
 * data sieving of each rank) */

static void view_begin(void)
{
    MPI_Datatype every;
    file_begin();
    MPI_Type_vector(PIECE, 1, size, MPI_UINT32_T, &every);
    MPI_Type_commit(&every);
    EXPECT_MPI(MPI_File_set_view(FILE_OF_ROW, rank * (MPI_Offset)sizeof(uint32_t), MPI_UINT32_T, every, "native", MPI_INFO_NULL));
    MPI_Type_free(&every);
}

static void view_act(int step)
{
    uint32_t piece[PIECE];
    fill(piece, sizeof piece, rank, step);
    EXPECT_MPI(MPI_File_write_at_all(FILE_OF_ROW, 0, piece, PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
}

static void view_look(int step)
{
    static uint32_t all[PIECE * 64];
    int file = open(path("of", 0), O_RDONLY), wrong = 0;
    EXPECT_OK(file);
    /* The last word of the last rank ends the file. */
    long bytes = (long)sizeof(uint32_t) * PIECE * size;
    EXPECT_SAME(pread(file, all, sizeof all, 0), bytes);
    for (int i = 0; i < PIECE * size; i++)
        wrong += all[i] != value(i % size, step, i / size);
    expect(!wrong, "%d words are wrong in step %d", wrong, step);
    close(file);
}

/* --- write-shared, write-ordered: records at the pointer that all ranks share */

#define RECORD 256

static void record_of(char *record, int who, int step)
{
    memset(record, '.', RECORD);
    snprintf(record, RECORD, "%d %d %u", who, step, value(who, step, 0));
}

static void shared_act(int step)
{
    char record[RECORD];
    record_of(record, rank, step);
    EXPECT_MPI(MPI_File_write_shared(FILE_OF_ROW, record, RECORD, MPI_CHAR, MPI_STATUS_IGNORE));
}

static void ordered_act(int step)
{
    char record[RECORD];
    record_of(record, rank, step);
    EXPECT_MPI(MPI_File_write_ordered(FILE_OF_ROW, record, RECORD, MPI_CHAR, MPI_STATUS_IGNORE));
}

static void look_at_records(int step, int is_ordered)
{
    static char text[RECORD * 64 * 64];
    char record[RECORD];
    int file = open(path("of", 0), O_RDONLY), once = 0;
    EXPECT_OK(file);
    ssize_t got = read(file, text, sizeof text);
    close(file);
    EXPECT_SAME(got, (step + 1) * size * RECORD);
    for (int s = 0; s <= step; s++)
        for (int who = 0; who < size; who++) {
            int times = 0;
            record_of(record, who, s);
            for (ssize_t number = (ssize_t)s * size; number < (ssize_t)(s + 1) * size && (number + 1) * RECORD <= got; number++)
                times += !memcmp(text + number * RECORD, record, RECORD) && (!is_ordered || number == s * size + who);
            once += times == 1;
        }
    EXPECT_SAME(once, (step + 1) * size);
}

static void shared_look(int step) { look_at_records(step, 0); }
static void ordered_look(int step) { look_at_records(step, 1); }

/* --- iwrite-at: two writes are in progress while the rank computes and communicates */

static void iwrite_act(int step)
{
    static uint32_t pieces[2][PIECE];
    MPI_Request requests[2];
    int all = 0;
    for (int p = 0; p < 2; p++) {
        MPI_Offset at = (((MPI_Offset)step * 2 + p) * size + rank) * (MPI_Offset)sizeof pieces[p];
        fill(pieces[p], sizeof pieces[p], rank, step * 2 + p);
        EXPECT_MPI(MPI_File_iwrite_at(FILE_OF_ROW, at, pieces[p], PIECE, MPI_UINT32_T, requests + p));
    }
    compute(1);
    MPI_Allreduce(&step, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_MPI(MPI_Waitall(2, requests, MPI_STATUSES_IGNORE));
}

static void iwrite_look(int step)
{
    int file = open(path("of", 0), O_RDONLY);
    EXPECT_OK(file);
    for (int s = 0; s <= 2 * step + 1; s++)
        for (int who = 0; who < size; who++)
            look_at(file, (long)s * size + who, who, s);
    close(file);
}

/* --- iwrite-at-all, iwrite-shared: a write is in progress while the rank computes and communicates;
 * the bytes are those of write-at-all and write-shared */

static void finish_later(int step, MPI_Request request)
{
    int all = 0;
    compute(1);
    MPI_Allreduce(&step, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_MPI(MPI_Wait(&request, MPI_STATUS_IGNORE));
}

static void iwrite_at_all_act(int step)
{
    MPI_Request request;
    MPI_Offset at = fill_all(step);
    EXPECT_MPI(MPI_File_iwrite_at_all(FILE_OF_ROW, at, all_pieces, (step + 1) * PIECE, MPI_UINT32_T, &request));
    finish_later(step, request);
}

static void iwrite_shared_act(int step)
{
    char record[RECORD];
    MPI_Request request;
    record_of(record, rank, step);
    EXPECT_MPI(MPI_File_iwrite_shared(FILE_OF_ROW, record, RECORD, MPI_CHAR, &request));
    finish_later(step, request);
}

/* --- write-split: a collective write in two halves, after all earlier bytes, into a file that is
 * opened in each step */

static void split_act(int step)
{
    uint32_t piece[PIECE];
    MPI_File file = open_all(path("of", 0));
    MPI_Offset at = ((MPI_Offset)step * size + rank) * (MPI_Offset)sizeof piece;
    fill(piece, sizeof piece, rank, step);
    EXPECT_MPI(MPI_File_write_at_all_begin(file, at, piece, PIECE, MPI_UINT32_T));
    EXPECT_MPI(MPI_File_write_at_all_end(file, piece, MPI_STATUS_IGNORE));
    EXPECT_MPI(MPI_File_close(&file));
}

static void split_look(int step)
{
    int file = open(path("of", 0), O_RDONLY);
    EXPECT_OK(file);
    for (int s = 0; s <= step; s++)
        for (int who = 0; who < size; who++)
            look_at(file, (long)s * size + who, who, s);
    close(file);
}

/* --- set-size: the file is truncated, grows by collective writes, and is read collectively */

static void set_size_act(int step)
{
    uint32_t piece[PIECE];
    MPI_Offset bytes = 0, at = ((MPI_Offset)(step % 3) * size + rank) * (MPI_Offset)sizeof piece;
    if (step % 3 == 0)
        EXPECT_MPI(MPI_File_set_size(FILE_OF_ROW, 0));
    fill(piece, sizeof piece, rank, step);
    EXPECT_MPI(MPI_File_write_at_all(FILE_OF_ROW, at, piece, PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
    EXPECT_MPI(MPI_File_sync(FILE_OF_ROW));
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_MPI(MPI_File_get_size(FILE_OF_ROW, &bytes));
    EXPECT_SAME(bytes, (step % 3 + 1) * size * (long)sizeof piece);
    EXPECT_MPI(MPI_File_read_at_all(FILE_OF_ROW, at, piece, PIECE, MPI_UINT32_T, MPI_STATUS_IGNORE));
    expect_piece(piece, rank, step);
    /* No rank truncates the file while others still read. */
    MPI_Barrier(MPI_COMM_WORLD);
}

static const struct row rows[] = {
    {"write-at-all", file_begin, at_all_act, at_all_look, file_end},
    {"write-at-all:automatic", file_begin, at_all_act, at_all_look, file_end},
    {"write-at-all:enable", file_begin, at_all_act, at_all_look, file_end},
    {"write-at-all:disable", file_begin, at_all_act, at_all_look, file_end},
    {"write-at", file_begin, at_act, at_look, file_end},
    {"write-view", view_begin, view_act, view_look, file_end},
    {"write-view:enable", view_begin, view_act, view_look, file_end},
    {"write-view:disable", view_begin, view_act, view_look, file_end},
    {"write-shared", file_begin, shared_act, shared_look, file_end},
    {"write-ordered", file_begin, ordered_act, ordered_look, file_end},
    {"iwrite-at", file_begin, iwrite_act, iwrite_look, file_end},
    {"iwrite-at-all", file_begin, iwrite_at_all_act, at_all_look, file_end},
    {"iwrite-at-all:enable", file_begin, iwrite_at_all_act, at_all_look, file_end},
    {"iwrite-at-all:disable", file_begin, iwrite_at_all_act, at_all_look, file_end},
    {"iwrite-shared", file_begin, iwrite_shared_act, shared_look, file_end},
    {"write-split", NULL, split_act, split_look, NULL},
    {"set-size", file_begin, set_size_act, NULL, file_end},
};

int main(int argc, char **argv) { return run_rows(sizeof rows / sizeof *rows, rows, argc, argv); }
