/* Rows of the C library's own file calls: a rank and other ranks read what the rank writes. See
 * rows.h. */
#include "rows.h"

#include <pthread.h>

#include <dirent.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define LINE 32
#define NEXT ((rank + 1) % size)

/* Reads a file whole, at most `room` bytes; -1 if it cannot be opened. */
static ssize_t slurp(const char *name, void *into, size_t room)
{
    int file = open(name, O_RDONLY);
    if (file < 0)
        return -1;
    size_t got = 0;
    ssize_t more;
    while (got < room && (more = read(file, (char *)into + got, room - got)) > 0)
        got += (size_t)more;
    close(file);
    return (ssize_t)got;
}

/* Writes the line of a rank in a step, of LINE bytes. */
static void line_of(char *line, int who, int step)
{
    char text[64];
    snprintf(text, sizeof text, "%3d %5d %010u..........\n", who, step, value(who, step, 0));
    memcpy(line, text, LINE - 1);
    line[LINE - 1] = '\n';
}

/* Checks that a file holds one line of rank `who` for each step up to this one. */
static void expect_lines(const char *name, int who, int step)
{
    static char text[1 << 16];
    char line[LINE];
    ssize_t got = slurp(name, text, sizeof text);
    int wrong = 0;
    EXPECT_SAME(got, (step + 1) * LINE);
    for (int s = 0; s <= step && got >= (s + 1) * LINE; s++) {
        line_of(line, who, s);
        wrong += memcmp(line, text + s * LINE, LINE) != 0;
    }
    expect(!wrong, "%d lines of rank %d up to step %d differ", wrong, who, step);
}

/* --- rewrite: rank 0 writes the same bytes of a file in each step, and all ranks read them */

static void rewrite_act(int step)
{
    uint32_t block[BLOCK / 4];
    if (rank)
        return;
    int file = open(path("of", 0), O_WRONLY | O_CREAT, 0644);
    EXPECT_OK(file);
    fill(block, BLOCK, 0, step);
    EXPECT_SAME(write(file, block, BLOCK / 2), BLOCK / 2);
    EXPECT_SAME(pwrite(file, (char *)block + BLOCK / 2, BLOCK / 2, BLOCK / 2), BLOCK / 2);
    EXPECT_SAME(lseek(file, 0, SEEK_CUR), BLOCK / 2);
    EXPECT_OK(close(file));
}

static void rewrite_look(int step)
{
    uint32_t block[BLOCK / 4 + 1];
    expect_block(block, slurp(path("of", 0), block, sizeof block), BLOCK, 0, step);
}

/* --- rename: rank 0 writes a new file that replaces the old one by a rename */

static void rename_act(int step)
{
    uint32_t block[BLOCK / 4];
    if (rank)
        return;
    int file = open(path("new", 0), O_WRONLY | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(file);
    fill(block, BLOCK, 0, step);
    EXPECT_SAME(write(file, block, BLOCK), BLOCK);
    EXPECT_OK(fsync(file));
    EXPECT_OK(close(file));
    EXPECT_OK(rename(path("new", 0), path("of", 0)));
}

/* --- renames: as rename, by each rank some times a step, without an entry in the record between the write and the removal */

#define RENAMES 20

static void renames_act(int step)
{
    uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    for (int time = 0; time < RENAMES; time++) {
        int file = open(path("new", rank), O_WRONLY | O_CREAT | O_TRUNC, 0644);
        EXPECT_OK(file);
        EXPECT_SAME(write(file, block, BLOCK), BLOCK);
        EXPECT_OK(sync_file_range(file, 0, 0, 0)); /* not recorded, as fsync, and quick */
        EXPECT_OK(close(file));
        if (step || time)
            EXPECT_OK(unlink(path("of", rank)));
        EXPECT_OK(rename(path("new", rank), path("of", rank)));
    }
}

static void renames_look(int step)
{
    uint32_t block[BLOCK / 4];
    int next = (rank + 1) % size, file = open(path("of", next), O_RDONLY);
    EXPECT_OK(file);
    expect_block(block, read(file, block, sizeof block), BLOCK, next, step);
    close(file);
}

/* --- trunc: O_TRUNC in each step, another length each time; each rank has a file of its own */

static size_t trunc_bytes(int step) { return 256 * (1 + (size_t)step * 7 % 11); }

static void trunc_act(int step)
{
    uint32_t block[BLOCK / 4];
    int file = open(path("of", rank), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(file);
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(write(file, block, trunc_bytes(step)), trunc_bytes(step));
    EXPECT_OK(close(file));
}

static void trunc_look(int step)
{
    uint32_t block[BLOCK / 4 + 1];
    struct stat about;
    EXPECT_OK(stat(path("of", NEXT), &about));
    EXPECT_SAME(about.st_size, trunc_bytes(step));
    expect_block(block, slurp(path("of", NEXT), block, sizeof block), trunc_bytes(step), NEXT, step);
}

/* --- truncate: files are cut and extended by name and by descriptor */

static int truncate_file;

static void truncate_begin(void)
{
    truncate_file = open(path("of", rank), O_RDWR | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(truncate_file);
}

static void truncate_act(int step)
{
    uint32_t block[BLOCK / 4];
    fill(block, BLOCK, rank, step);
    EXPECT_SAME(pwrite(truncate_file, block, BLOCK, 0), BLOCK);
    EXPECT_OK(step % 2 ? ftruncate(truncate_file, (off_t)trunc_bytes(step)) : truncate(path("of", rank), (off_t)trunc_bytes(step)));
    EXPECT_OK(posix_fallocate(truncate_file, 0, 64));
}

static void truncate_end(void) { EXPECT_OK(close(truncate_file)); }

/* --- append: a log of each rank, which stays open, by O_APPEND */

static int append_file;

static void append_begin(void)
{
    append_file = open(path("of", rank), O_WRONLY | O_CREAT | O_APPEND, 0644);
    EXPECT_OK(append_file);
}

static void append_act(int step)
{
    char line[LINE];
    line_of(line, rank, step);
    EXPECT_SAME(write(append_file, line, LINE), LINE);
    EXPECT_SAME(lseek(append_file, 0, SEEK_CUR), (step + 1) * LINE);
}

static void append_look(int step)
{
    expect_lines(path("of", rank), rank, step);
    expect_lines(path("of", NEXT), NEXT, step);
}

static void append_end(void) { EXPECT_OK(close(append_file)); }

/* --- append-shared: one log of all ranks, opened for each line; the order within a step is random
 */

static void shared_act(int step)
{
    char line[LINE];
    int file = open(path("of", 0), O_WRONLY | O_CREAT | O_APPEND, 0644);
    EXPECT_OK(file);
    line_of(line, rank, step);
    EXPECT_SAME(write(file, line, LINE), LINE);
    EXPECT_OK(close(file));
}

static void shared_look(int step)
{
    static char text[1 << 17];
    char line[LINE];
    ssize_t got = slurp(path("of", 0), text, sizeof text);
    int once = 0;
    EXPECT_SAME(got, (step + 1) * size * LINE);
    for (int s = 0; s <= step; s++)
        for (int who = 0; who < size; who++) {
            int times = 0;
            line_of(line, who, s);
            for (ssize_t at = (ssize_t)s * size * LINE; at < (ssize_t)(s + 1) * size * LINE && at + LINE <= got; at += LINE)
                times += !memcmp(line, text + at, LINE);
            once += times == 1;
        }
    EXPECT_SAME(once, (step + 1) * size);
}

/* --- scratch: out of core: each rank reads a file of its own, adds, and writes it */

static int scratch_file;

static void scratch_begin(void)
{
    uint32_t block[BLOCK / 4] = {0};
    scratch_file = open(path("of", rank), O_RDWR | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(scratch_file);
    for (int part = 0; part < 4; part++)
        EXPECT_SAME(write(scratch_file, block, BLOCK), BLOCK);
}

static void scratch_act(int step)
{
    uint32_t block[BLOCK / 4];
    for (int part = 0; part < 4; part++) {
        EXPECT_SAME(pread(scratch_file, block, BLOCK, part * BLOCK), BLOCK);
        for (int i = 0; i < BLOCK / 4; i++)
            block[i] += value(rank, step, part);
        EXPECT_SAME(pwrite(scratch_file, block, BLOCK, part * BLOCK), BLOCK);
    }
}

static void scratch_look(int step)
{
    uint32_t block[BLOCK / 4];
    for (int part = 0; part < 4; part++) {
        uint32_t want = 0;
        int wrong = 0;
        for (int s = 0; s <= step; s++)
            want += value(rank, s, part);
        EXPECT_SAME(pread(scratch_file, block, BLOCK, part * BLOCK), BLOCK);
        for (int i = 0; i < BLOCK / 4; i++)
            wrong += block[i] != want;
        expect(!wrong, "%d sums are wrong in step %d", wrong, step);
    }
}

static void scratch_end(void) { EXPECT_OK(close(scratch_file)); }

/* --- owner: blocks of one file change their owner, and each is written every fourth step */

#define BLOCKS 32

static int owner_of(int block, int step) { return (block + step / 4) % size; }

static void owner_act(int step)
{
    uint32_t words[64];
    int file = open(path("of", 0), O_WRONLY | O_CREAT, 0644);
    EXPECT_OK(file);
    for (int block = step % 4; block < BLOCKS; block += 4)
        if (owner_of(block, step) == rank) {
            fill(words, sizeof words, rank, step);
            EXPECT_SAME(pwrite(file, words, sizeof words, block * (off_t)sizeof words), sizeof words);
        }
    EXPECT_OK(close(file));
}

static void owner_look(int step)
{
    uint32_t words[64];
    int file = open(path("of", 0), O_RDONLY);
    EXPECT_OK(file);
    for (int block = 0; block < BLOCKS; block++) {
        int last = step - (step - block % 4 + 4) % 4;
        if (last >= 0)
            expect_block(words, pread(file, words, sizeof words, block * (off_t)sizeof words), sizeof words, owner_of(block, last), last);
    }
    close(file);
}

/* --- stdio: a stream that stays open for reading and writing, and one that appends */

static FILE *stdio_file, *stdio_log;

static void stdio_begin(void)
{
    stdio_file = fopen(path("of", rank), "w+");
    stdio_log = fopen(path("log", rank), "a");
    expect(stdio_file && stdio_log, "fopen: %s", strerror(errno));
}

static void stdio_act(int step)
{
    char line[LINE + 1] = "";
    int who = -1, when = -1;
    line_of(line, rank, step);
    EXPECT_SAME(fprintf(stdio_file, "%s", line), LINE);
    EXPECT_SAME(fflush(stdio_file), 0);
    EXPECT_SAME(fseek(stdio_file, (step / 2) * LINE, SEEK_SET), 0);
    EXPECT_SAME(fscanf(stdio_file, "%d %d", &who, &when), 2);
    EXPECT_SAME(when, step / 2);
    EXPECT_SAME(fseek(stdio_file, 0, SEEK_END), 0);
    EXPECT_SAME(ftell(stdio_file), (step + 1) * LINE);
    EXPECT_SAME(fwrite(line, 1, LINE, stdio_log), LINE);
    EXPECT_SAME(fflush(stdio_log), 0);
}

static void stdio_look(int step)
{
    expect_lines(path("of", NEXT), NEXT, step);
    expect_lines(path("log", NEXT), NEXT, step);
}

static void stdio_end(void)
{
    EXPECT_SAME(fclose(stdio_file), 0);
    EXPECT_SAME(fclose(stdio_log), 0);
}

/* --- stdio-update: a counter is read and written in place, by a stream that is opened in each step
 */

static void update_act(int step)
{
    uint32_t count = 0;
    FILE *file = fopen(path("of", rank), step ? "r+" : "w+");
    expect(file != NULL, "fopen: %s", strerror(errno));
    EXPECT_SAME(fread(&count, 1, sizeof count, file), step ? sizeof count : 0);
    EXPECT_SAME(count, step);
    count++;
    EXPECT_SAME(fseek(file, 0, SEEK_SET), 0);
    EXPECT_SAME(fwrite(&count, 1, sizeof count, file), sizeof count);
    EXPECT_SAME(fclose(file), 0);
}

static void update_look(int step)
{
    uint32_t count = 0;
    EXPECT_SAME(slurp(path("of", NEXT), &count, sizeof count), sizeof count);
    EXPECT_SAME(count, step + 1);
}

/* --- names: folders and links are made, renamed and removed; each call must succeed once */

static void names_act(int step)
{
    char inside[600], renamed[600];
    EXPECT_OK(mkdir(path("folder", rank * 1000 + step), 0755));
    snprintf(inside, sizeof inside, "%s/file", path("folder", rank * 1000 + step));
    int file = open(inside, O_WRONLY | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(file);
    EXPECT_SAME(write(file, &step, sizeof step), sizeof step);
    EXPECT_OK(close(file));
    EXPECT_OK(link(inside, path("link", rank * 1000 + step)));
    EXPECT_OK(symlink(inside, path("symlink", rank * 1000 + step)));
    if (!step)
        return;
    snprintf(inside, sizeof inside, "%s/file", path("folder", rank * 1000 + step - 1));
    snprintf(renamed, sizeof renamed, "%s/other", path("folder", rank * 1000 + step));
    EXPECT_OK(rename(inside, renamed));
    EXPECT_OK(unlink(path("link", rank * 1000 + step - 1)));
    EXPECT_OK(unlink(path("symlink", rank * 1000 + step - 1)));
    snprintf(renamed, sizeof renamed, "%s/other", path("folder", rank * 1000 + step - 1));
    if (step > 1)
        EXPECT_OK(unlink(renamed));
    EXPECT_OK(rmdir(path("folder", rank * 1000 + step - 1)));
}

static void names_look(int step)
{
    char inside[600], target[600] = "";
    int found = -1, number = NEXT * 1000 + step;
    struct stat about;
    snprintf(inside, sizeof inside, "%s/file", path("folder", number));
    EXPECT_SAME(slurp(path("link", number), &found, sizeof found), sizeof found);
    EXPECT_SAME(found, step);
    EXPECT_SAME(readlink(path("symlink", number), target, sizeof target - 1), strlen(inside));
    expect(!strcmp(inside, target), "the link leads to %s", target);
    EXPECT_OK(stat(inside, &about));
    EXPECT_SAME(about.st_nlink, 2);
    if (step) {
        EXPECT_SAME(access(path("folder", number - 1), F_OK), -1);
        snprintf(inside, sizeof inside, "%s/other", path("folder", number));
        EXPECT_SAME(slurp(inside, &found, sizeof found), sizeof found);
        EXPECT_SAME(found, step - 1);
    }
}

/* --- workdir: each rank works in a folder of its own by relative names; the folder is renamed
 * while it is the working directory, and a new one takes its name */

static void workdir_act(int step)
{
    int number = rank * 1000 + step, last = -1, back = -1;
    if (step) {
        /* The working directory is still the folder of the step before. */
        EXPECT_SAME(slurp("inside", &last, sizeof last), sizeof last);
        EXPECT_SAME(last, step - 1);
        EXPECT_OK(rename(path("work", rank), path("worked", number - 1)));
        EXPECT_SAME(slurp("inside", &last, sizeof last), sizeof last);
        EXPECT_SAME(last, step - 1);
    }
    EXPECT_OK(mkdir(path("work", rank), 0755));
    back = open(".", O_RDONLY | O_DIRECTORY);
    EXPECT_OK(back);
    EXPECT_OK(chdir(path("work", rank)));
    int file = open("inside", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    EXPECT_SAME(write(file, &step, sizeof step), sizeof step);
    EXPECT_OK(close(file));
    EXPECT_OK(fchdir(back));
    EXPECT_OK(close(back));
    EXPECT_OK(chdir(path("work", rank)));
}

static void workdir_look(int step)
{
    char inside[600];
    int found = -1;
    snprintf(inside, sizeof inside, "%s/inside", path("work", NEXT));
    EXPECT_SAME(slurp(inside, &found, sizeof found), sizeof found);
    EXPECT_SAME(found, step);
}

/* --- tree: many files are made and removed by a descriptor of their folder */

#define LEAVES 40

static int tree = -1;

static void tree_begin(void)
{
    EXPECT_OK(mkdir(path("tree", rank), 0755));
    tree = open(path("tree", rank), O_RDONLY | O_DIRECTORY);
    EXPECT_OK(tree);
}

static void tree_act(int step)
{
    char name[32];
    for (int leaf = 0; leaf < LEAVES; leaf++) {
        snprintf(name, sizeof name, "leaf-%d-%d", step, leaf);
        int file = openat(tree, name, O_WRONLY | O_CREAT, 0644);
        EXPECT_OK(file);
        EXPECT_OK(close(file));
        if (step) {
            snprintf(name, sizeof name, "leaf-%d-%d", step - 1, leaf);
            EXPECT_OK(unlinkat(tree, name, 0));
        }
    }
    EXPECT_OK(futimens(tree, NULL));
}

static void tree_look(int step)
{
    char name[700];
    for (int leaf = 0; leaf < LEAVES; leaf++) {
        struct stat about;
        snprintf(name, sizeof name, "%s/leaf-%d-%d", path("tree", NEXT), step, leaf);
        EXPECT_OK(lstat(name, &about));
        snprintf(name, sizeof name, "%s/leaf-%d-%d", path("tree", NEXT), step - 1, leaf);
        EXPECT_SAME(lstat(name, &about), -1);
    }
}

static void tree_end(void) { EXPECT_OK(close(tree)); }

/* --- fifo: a named pipe from each rank to itself */

static void fifo_act(int step)
{
    int found = -1;
    if (!step)
        EXPECT_OK(mkfifo(path("of", rank), 0644));
    int file = open(path("of", rank), O_RDWR);
    EXPECT_OK(file);
    EXPECT_SAME(write(file, &step, sizeof step), sizeof step);
    EXPECT_SAME(read(file, &found, sizeof found), sizeof found);
    EXPECT_SAME(found, step);
    EXPECT_OK(close(file));
}

/* --- list: the entries of a folder, while other ranks add and remove some; relative names */

static void list_begin(void)
{
    if (!rank)
        EXPECT_OK(mkdir(path("folder", 0), 0755));
}

static void list_act(int step)
{
    char name[64];
    int where = open(path("folder", 0), O_RDONLY | O_DIRECTORY);
    EXPECT_OK(where);
    snprintf(name, sizeof name, "%d.%d", rank, step);
    int file = openat(where, name, O_WRONLY | O_CREAT | O_EXCL, 0644);
    EXPECT_OK(file);
    EXPECT_OK(close(file));
    snprintf(name, sizeof name, "%d.%d", rank, step - 2);
    if (step > 1)
        EXPECT_OK(unlinkat(where, name, 0));
    EXPECT_OK(close(where));
}

static void list_look(int step)
{
    int found = 0, who, when;
    DIR *where = opendir(path("folder", 0));
    expect(where != NULL, "opendir: %s", strerror(errno));
    if (!where)
        return;
    for (struct dirent *entry; (entry = readdir(where));)
        if (sscanf(entry->d_name, "%d.%d", &who, &when) == 2)
            found += when == step || when == step - 1 ? 1 : 1000;
    EXPECT_SAME(found, size * (step ? 2 : 1));
    closedir(where);
}

/* --- exclusive: all ranks try to make a file by O_EXCL in each step, and one succeeds */

static void exclusive_act(int step)
{
    int file = open(path("of", step), O_WRONLY | O_CREAT | O_EXCL, 0644), mine = file >= 0, all = 0;
    if (mine)
        EXPECT_OK(close(file));
    else
        EXPECT_SAME(errno, EEXIST);
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_SAME(all, 1);
}

/* --- flock, fcntl-lock, range-locks: all ranks add to a counter under a lock, which is held for some
 * milliseconds */

static void add_one(int step, int reader, int writer)
{
    uint32_t count = 0;
    ssize_t got = pread(reader, &count, sizeof count, 0);
    expect(got == (step || got ? (ssize_t)sizeof count : 0), "%zd bytes of the counter", got);
    compute(4);
    count++;
    EXPECT_SAME(pwrite(writer, &count, sizeof count, 0), sizeof count);
}

static void count_up(int step, int is_flock)
{
    int file = open(path("of", 0), O_RDWR | O_CREAT, 0644);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    EXPECT_OK(file);
    EXPECT_OK(is_flock ? flock(file, LOCK_EX) : fcntl(file, F_SETLKW, &whole));
    add_one(step, file, file);
    whole.l_type = F_UNLCK;
    EXPECT_OK(is_flock ? flock(file, LOCK_UN) : fcntl(file, F_SETLK, &whole));
    EXPECT_OK(close(file));
}

static void flock_act(int step) { count_up(step, 1); }
static void fcntl_act(int step) { count_up(step, 0); }

/* The same counter: each rank has locks of more ranges than the interposer counts, by a descriptor
 * that cannot write, and holds them while it asks for the counter by another one. */
static void ranges_act(int step)
{
    struct flock range = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 1};
    int file = open(path("of", 0), O_RDWR | O_CREAT, 0644), reader, writer;
    EXPECT_OK(file);
    EXPECT_OK(close(file));
    EXPECT_OK(reader = open(path("of", 0), O_RDONLY));
    for (range.l_start = 100 * (rank + 1); range.l_start < 100 * (rank + 1) + 40; range.l_start += 4)
        EXPECT_OK(fcntl(reader, F_SETLK, &range));
    EXPECT_OK(writer = open(path("of", 0), O_RDWR));
    range = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = sizeof(uint32_t)};
    EXPECT_OK(fcntl(writer, F_SETLKW, &range));
    add_one(step, reader, writer);
    range.l_type = F_UNLCK;
    EXPECT_OK(fcntl(reader, F_SETLK, &range));
    EXPECT_OK(close(writer));
    EXPECT_OK(close(reader));
}

static void count_look(int step)
{
    uint32_t count = 0;
    EXPECT_SAME(slurp(path("of", 0), &count, sizeof count), sizeof count);
    EXPECT_SAME(count, (step + 1) * size);
}

/* --- lock-timeout: rank 0 holds a lock, by flock and fcntl in turns, and a signal ends the waits of
 * the other ranks, which get the lock afterwards */

static volatile sig_atomic_t alarms;

static void on_alarm(int signal)
{
    (void)signal;
    alarms++;
}

static int lock_file(int file, int step, int is_locked)
{
    struct flock whole = {.l_type = is_locked ? F_WRLCK : F_UNLCK, .l_whence = SEEK_SET};
    return step % 2 ? flock(file, is_locked ? LOCK_EX : LOCK_UN) : fcntl(file, F_SETLKW, &whole);
}

static void timeout_act(int step)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    int file = open(path("of", 0), O_RDWR | O_CREAT, 0644);
    EXPECT_OK(file);
    EXPECT_OK(sigaction(SIGALRM, &action, NULL));
    if (!rank)
        EXPECT_OK(lock_file(file, step, 1));
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank) {
        EXPECT_OK(setitimer(ITIMER_REAL, &often, NULL));
        int outcome = lock_file(file, step, 1), why = errno;
        EXPECT_OK(setitimer(ITIMER_REAL, &never, NULL));
        EXPECT_SAME(outcome, -1);
        EXPECT_SAME(why, EINTR);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank)
        EXPECT_OK(lock_file(file, step, 1));
    EXPECT_OK(lock_file(file, step, 0));
    EXPECT_OK(close(file));
}

/* --- truncate-chance: the length of a file comes from the processor's counter, which no incarnation
 * reads again */

static void chance_act(int step)
{
    (void)step;
    EXPECT_OK(close(open(path("of", rank), O_WRONLY | O_CREAT, 0644)));
    EXPECT_OK(truncate(path("of", rank), (off_t)(__builtin_ia32_rdtsc() % 100000)));
}

/* --- dup: descriptors that share one position in a file */

static int dup_files[4];

static void dup_begin(void)
{
    dup_files[0] = open(path("of", rank), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup_files[1] = dup(dup_files[0]);
    dup_files[2] = dup2(dup_files[0], 222);
    dup_files[3] = fcntl(dup_files[1], F_DUPFD_CLOEXEC, 300);
    for (int i = 0; i < 4; i++)
        EXPECT_OK(dup_files[i]);
}

static void dup_act(int step)
{
    char line[LINE];
    int file = dup_files[step % 4];
    line_of(line, rank, step);
    EXPECT_SAME(write(file, line, LINE / 2), LINE / 2);
    EXPECT_SAME(write(dup_files[(step + 1) % 4], line + LINE / 2, LINE / 2), LINE / 2);
    if (step % 5 == 4) {
        EXPECT_OK(close(dup_files[3]));
        EXPECT_OK(dup_files[3] = fcntl(dup_files[0], F_DUPFD, 300));
    }
}

static void dup_end(void)
{
    for (int i = 0; i < 4; i++)
        EXPECT_OK(close(dup_files[i]));
}

/* --- vectors: several pieces in one call, at the position of the file and elsewhere */

static int vectors_file;

static void vectors_begin(void)
{
    vectors_file = open(path("of", rank), O_RDWR | O_CREAT | O_TRUNC, 0644);
    EXPECT_OK(vectors_file);
}

static void vectors_act(int step)
{
    char line[LINE];
    struct iovec pieces[3] = {{line, 5}, {line + 5, 10}, {line + 15, LINE - 15}};
    line_of(line, rank, step);
    if (step % 3 == 0)
        EXPECT_SAME(writev(vectors_file, pieces, 3), LINE);
    else if (step % 3 == 1)
        EXPECT_SAME(pwritev(vectors_file, pieces, 3, step * LINE), LINE);
    else
        EXPECT_SAME(pwritev2(vectors_file, pieces, 3, step * LINE, 0), LINE);
    EXPECT_SAME(lseek(vectors_file, (step + 1) * LINE, SEEK_SET), (step + 1) * LINE);
    char again[LINE];
    struct iovec halves[2] = {{again, 16}, {again + 16, LINE - 16}};
    EXPECT_SAME(preadv(vectors_file, halves, 2, step * LINE), LINE);
    expect(!memcmp(again, line, LINE), "not what was written in step %d", step);
}

static void vectors_end(void) { EXPECT_OK(close(vectors_file)); }

static void next_look(int step) { expect_lines(path("of", NEXT), NEXT, step); }

/* --- await: ranks poll for a file of another rank, and send the number of polls */

static void await_act(int step)
{
    long asked = 0, heard = -1;
    if (!rank) {
        compute(3);
        int file = open(path("flag", step), O_WRONLY | O_CREAT, 0644);
        EXPECT_OK(file);
        EXPECT_OK(close(file));
    }
    while (access(path("flag", step), F_OK)) {
        asked++;
        usleep(1000);
    }
    MPI_Sendrecv(&asked, 1, MPI_LONG, NEXT, 5, &heard, 1, MPI_LONG, (rank + size - 1) % size, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    expect(heard >= 0, "heard %ld", heard);
}

/* --- tmpfile: a file without a name, read and written all the time */

static FILE *tmp_file;

static void tmpfile_begin(void)
{
    tmp_file = tmpfile();
    expect(tmp_file != NULL, "tmpfile: %s", strerror(errno));
}

static void tmpfile_act(int step)
{
    char line[LINE];
    line_of(line, rank, step);
    EXPECT_SAME(fseek(tmp_file, 0, SEEK_END), 0);
    EXPECT_SAME(fwrite(line, 1, LINE, tmp_file), LINE);
    EXPECT_SAME(fflush(tmp_file), 0);
}

static void tmpfile_look(int step)
{
    char line[LINE], want[LINE];
    int wrong = 0;
    EXPECT_SAME(fseek(tmp_file, 0, SEEK_SET), 0);
    for (int s = 0; s <= step; s++) {
        line_of(want, rank, s);
        wrong += fread(line, 1, LINE, tmp_file) != LINE || memcmp(line, want, LINE);
    }
    EXPECT_SAME(wrong, 0);
}

/* --- unlinked: a file that loses its name while it is open */

static int unlinked_file;

static void unlinked_begin(void)
{
    unlinked_file = open(path("of", rank), O_RDWR | O_CREAT | O_EXCL, 0600);
    EXPECT_OK(unlinked_file);
    EXPECT_OK(unlink(path("of", rank)));
}

static void unlinked_act(int step)
{
    char line[LINE];
    line_of(line, rank, step);
    EXPECT_SAME(pwrite(unlinked_file, line, LINE, step * LINE), LINE);
}

static void unlinked_look(int step)
{
    char line[LINE], want[LINE];
    int wrong = 0;
    for (int s = 0; s <= step; s++) {
        line_of(want, rank, s);
        wrong += pread(unlinked_file, line, LINE, s * LINE) != LINE || memcmp(line, want, LINE);
    }
    EXPECT_SAME(wrong, 0);
}

/* --- attributes: permissions and times, which ranks set in turns */

static void attributes_act(int step)
{
    if (step % size != rank)
        return;
    int file = open(path("of", 0), O_WRONLY | O_CREAT, 0600);
    EXPECT_OK(file);
    EXPECT_OK(fchmod(file, 0400 | (mode_t)(step * 37 % 64)));
    struct timespec times[2] = {{1000, 0}, {1000000 + step, 0}};
    EXPECT_OK(close(file));
    EXPECT_OK(utimensat(AT_FDCWD, path("of", 0), times, 0));
}

static void attributes_look(int step)
{
    struct stat about;
    EXPECT_OK(stat(path("of", 0), &about));
    EXPECT_SAME(about.st_mode & 0777, 0400 | (step * 37 % 64));
    EXPECT_SAME(about.st_mtime, 1000000 + step);
}

/* --- redirected: standard output of each rank is a file, opened by the shell that executes the
 * program */

static void redirected_act(int step)
{
    char line[LINE + 1] = "";
    line_of(line, rank, step);
    EXPECT_SAME(printf("%s", line), LINE);
    EXPECT_SAME(fflush(stdout), 0);
}

/* --- redirected-stderr: standard error of each rank is such a file, and lines of Landbridge's
 * libraries (of level "Info") come in between */

static void *read_clock(void *nothing)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return nothing;
}

static void redirected_stderr_act(int step)
{
    char line[LINE + 1] = "";
    pthread_t other;
    line_of(line, rank, step);
    EXPECT_SAME(fprintf(stderr, "%s", line), LINE);
    if (step == 1) {
        EXPECT_SAME(pthread_create(&other, NULL, read_clock, NULL), 0);
        EXPECT_SAME(pthread_join(other, NULL), 0);
    }
}

/* --- redirected-append: the shell has appended to standard output, and the program locks
 * and appends to a file of its own before its buffered output leaves */

static int appended;

static void redirected_append_act(int step)
{
    char line[LINE + 1] = "";
    line_of(line, rank, step);
    if (step == 0) {
        EXPECT_OK(appended = open(path("own", rank), O_RDWR | O_CREAT | O_APPEND, 0600));
        EXPECT_OK(flock(appended, LOCK_EX));
    }
    EXPECT_SAME(printf("%s", line), LINE);
    EXPECT_SAME(write(appended, line, LINE), LINE);
}

static void own_lines_look(int step)
{
    struct stat about;
    EXPECT_OK(fstat(appended, &about));
    EXPECT_SAME(about.st_size, (step + 1) * LINE);
    EXPECT_OK(stat(path("own", rank), &about));
    EXPECT_SAME(about.st_size, (step + 1) * LINE);
}

static void redirected_append_end(void) { EXPECT_SAME(fflush(stdout), 0); }

/* --- failed-exec: the program goes on after it could not execute another one, with a lock that it
 * had before and a file without a name that comes after */

static int tried, after_tried;

static void failed_exec_act(int step)
{
    char line[LINE + 1] = "";
    line_of(line, rank, step);
    if (step == 0) {
        EXPECT_OK(tried = open(path("of", rank), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        EXPECT_OK(flock(tried, LOCK_EX));
        EXPECT_SAME(execl("/nowhere/at/all", "all", NULL), -1);
        EXPECT_OK(flock(tried, LOCK_EX));
        EXPECT_OK(after_tried = open(path("unnamed", rank), O_RDWR | O_CREAT, 0600));
        EXPECT_OK(unlink(path("unnamed", rank)));
    }
    EXPECT_SAME(pwrite(tried, line, LINE, step * LINE), LINE);
    EXPECT_SAME(pwrite(after_tried, "unnamed", 8, step * 8), 8);
}

static void failed_exec_look(int step)
{
    struct stat about;
    int other = open(path("of", rank), O_RDWR);
    EXPECT_SAME(flock(other, LOCK_EX | LOCK_NB), -1);
    EXPECT_OK(close(other));
    EXPECT_OK(fstat(after_tried, &about));
    EXPECT_SAME(about.st_size, (step + 1) * 8);
    EXPECT_OK(stat(path("of", rank), &about));
    EXPECT_SAME(about.st_size, (step + 1) * LINE);
}

/* --- renamed-over: the next rank removes a file that this rank has open; this rank then gives its
 * name to another file, and goes on with both, with a file without a name, and with a log. Each
 * third step begins again. */

static int over_data, over_unnamed, over_log;

static void renamed_over_act(int step)
{
    char line[LINE];
    int file;
    line_of(line, rank, step);
    if (step == 0)
        EXPECT_OK(over_log = open(path("log", rank), O_RDWR | O_CREAT | O_APPEND, 0600));
    if (step % 3 == 0) {
        if (step) {
            EXPECT_OK(close(over_data));
            EXPECT_OK(close(over_unnamed));
        }
        EXPECT_OK(over_data = open(path("data", rank), O_RDWR | O_CREAT | O_TRUNC, 0600));
    }
    if (step % 3 == 1)
        EXPECT_OK(unlink(path("data", (rank + 1) % size)));
    if (step % 3 == 2) {
        EXPECT_OK(file = open(path("new", rank), O_WRONLY | O_CREAT, 0600));
        EXPECT_SAME(write(file, line, LINE), LINE);
        EXPECT_OK(close(file));
        EXPECT_OK(rename(path("new", rank), path("data", rank)));
        EXPECT_OK(over_unnamed = open(path("unnamed", rank), O_RDWR | O_CREAT, 0600));
        EXPECT_OK(unlink(path("unnamed", rank)));
        EXPECT_SAME(write(over_log, line, LINE), LINE);
        EXPECT_SAME(pwrite(over_data, line, LINE, 0), LINE);
        EXPECT_SAME(pwrite(over_unnamed, line, LINE, 0), LINE);
        /* The test kills this rank from here on. */
        if (rank == 1)
            fprintf(report, "changed in %d\n", step);
    }
}

static void renamed_over_look(int step)
{
    char line[LINE], found[LINE];
    struct stat about;
    line_of(line, rank, step);
    if (step % 3 != 2)
        return;
    EXPECT_SAME(pread(over_data, found, LINE, 0), LINE);
    EXPECT_SAME(memcmp(found, line, LINE), 0);
    EXPECT_SAME(pread(over_unnamed, found, LINE, 0), LINE);
    EXPECT_SAME(memcmp(found, line, LINE), 0);
    EXPECT_OK(fstat(over_log, &about));
    EXPECT_SAME(about.st_size, (step / 3 + 1) * LINE);
    EXPECT_OK(fstat(over_data, &about));
    EXPECT_SAME(about.st_nlink, 0);
}

static const struct row rows[] = {
    {"rewrite", NULL, rewrite_act, rewrite_look, NULL},
    {"rename", NULL, rename_act, rewrite_look, NULL},
    {"renames", NULL, renames_act, renames_look, NULL},
    {"trunc", NULL, trunc_act, trunc_look, NULL},
    {"truncate", truncate_begin, truncate_act, trunc_look, truncate_end},
    {"append", append_begin, append_act, append_look, append_end},
    {"append-shared", NULL, shared_act, shared_look, NULL},
    {"scratch", scratch_begin, scratch_act, scratch_look, scratch_end},
    {"owner", NULL, owner_act, owner_look, NULL},
    {"stdio", stdio_begin, stdio_act, stdio_look, stdio_end},
    {"stdio-update", NULL, update_act, update_look, NULL},
    {"names", NULL, names_act, names_look, NULL},
    {"workdir", NULL, workdir_act, workdir_look, NULL},
    {"tree", tree_begin, tree_act, tree_look, tree_end},
    {"fifo", NULL, fifo_act, NULL, NULL},
    {"list", list_begin, list_act, list_look, NULL},
    {"exclusive", NULL, exclusive_act, NULL, NULL},
    {"flock", NULL, flock_act, count_look, NULL},
    {"fcntl-lock", NULL, fcntl_act, count_look, NULL},
    {"range-locks", NULL, ranges_act, count_look, NULL},
    {"lock-timeout", NULL, timeout_act, NULL, NULL},
    {"truncate-chance", NULL, chance_act, NULL, NULL},
    {"dup", dup_begin, dup_act, next_look, dup_end},
    {"vectors", vectors_begin, vectors_act, next_look, vectors_end},
    {"await", NULL, await_act, NULL, NULL},
    {"tmpfile", tmpfile_begin, tmpfile_act, tmpfile_look, NULL},
    {"unlinked", unlinked_begin, unlinked_act, unlinked_look, NULL},
    {"redirected", NULL, redirected_act, next_look, NULL},
    {"redirected-stderr", NULL, redirected_stderr_act, next_look, NULL},
    {"redirected-append", NULL, redirected_append_act, own_lines_look, redirected_append_end},
    {"failed-exec", NULL, failed_exec_act, failed_exec_look, NULL},
    {"renamed-over", NULL, renamed_over_act, renamed_over_look, NULL},
    {"attributes", NULL, attributes_act, attributes_look, NULL},
};

int main(int argc, char **argv) { return run_rows(sizeof rows / sizeof *rows, rows, argc, argv); }
