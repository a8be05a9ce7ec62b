/* A rank performs one effect on a file while another rank acts on the same file. Arguments:
 * `interrupted FOLDER CASE alone|answered [soon]`.
 *
 * Rank 0 prints `ready`, computes for a while, and performs the effect. With `answered`, rank 1
 * watches for the effect and answers it, or does the same itself where both want the same. With
 * `soon`, rank 0 changes every file and the directory right before, at the begin of a tick of the
 * clock by which many file systems note changes. Rank 0 prints `result …`, which is the same in
 * every run: what all ranks together have seen and done. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static int is_answered, is_soon;

static int exists(const char *name)
{
    struct stat about;
    return !lstat(name, &about);
}

static void make(const char *name, const char *text)
{
    int file = open(name, O_CREAT | O_WRONLY | O_TRUNC, 0644);
    if (file < 0 || write(file, text, strlen(text)) < 0)
        perror(name);
    close(file);
}

static void until(int (*is_so)(void))
{
    while (!is_so())
        usleep(is_soon ? 1 : 300);
}

/* Changes all files and the directory, and leaves them as they are. */
static void change_all(void)
{
    static const char *names[] = {"base", "task", "box", "log", "form", "question"};
    struct timespec begin, now;
    clock_gettime(CLOCK_REALTIME_COARSE, &begin);
    do
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
    while (now.tv_nsec == begin.tv_nsec);
    if (mknod("made", S_IFREG | 0600, 0))
        perror("made");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (exists(names[i]) && chown(names[i], -1, -1))
            perror(names[i]);
}

/* Two ranks claim one task; one succeeds. */
static int claim_by_removal(void) { return !unlink("task"); }
static int claim_by_renaming(void) { return !rename("task", "taken"); }
/* Rank 0 renames its working directory, by absolute names. */
static char here[512], there[512];
static void enter_here(void)
{
    char folder[400];
    if (!getcwd(folder, sizeof folder))
        perror("getcwd");
    snprintf(here, sizeof here, "%s/here", folder);
    snprintf(there, sizeof there, "%s/there", folder);
    if (mkdir(here, 0755) || chdir(here))
        perror(here);
}
static int rename_here(void)
{
    char name[600];
    int is_renamed = !rename(here, there);
    make("within", "");
    snprintf(name, sizeof name, "%s/within", there);
    return is_renamed + 10 * exists(name) + 100 * !chdir("..");
}
/* Rank 0 closes a file that it has locked; the lock is free then. */
static int locked;
static void lock_box(void)
{
    locked = open("box", O_CREAT | O_WRONLY, 0644);
    if (flock(locked, LOCK_EX))
        perror("box");
}
static int close_locked(void)
{
    int is_closed = !close(locked), other = open("box", O_RDONLY);
    int is_free = !flock(other, LOCK_EX | LOCK_NB);
    close(other);
    return is_closed + 10 * is_free;
}
static void lock_range(void)
{
    struct flock range = {.l_type = F_WRLCK, .l_len = 10};
    locked = open("box", O_CREAT | O_RDWR, 0644);
    if (fcntl(locked, F_SETLK, &range))
        perror("box");
}
static int close_range_locked(void)
{
    struct flock range = {.l_type = F_WRLCK, .l_len = 10};
    int is_closed = !close(locked), other = open("box", O_RDWR);
    int is_free = !fcntl(other, F_OFD_SETLK, &range);
    close(other);
    return is_closed + 10 * is_free;
}
static int replace_locked(void)
{
    int null = open("/dev/null", O_RDWR), is_replaced = dup2(null, locked) == locked, other = open("box", O_RDONLY);
    int is_free = !flock(other, LOCK_EX | LOCK_NB);
    close(other);
    return is_replaced + 10 * is_free;
}
/* Rank 1 takes its turn when rank 0 was killed at its own. */
static int turn_ms = 1000;
static void wait_for_turn(void) { usleep(1000 * turn_ms); }

/* Rank 0 raises a flag; rank 1 counts it and lowers it. */
static int raise_open(void) { return close(open("flag", O_CREAT | O_WRONLY, 0644)); }
static int raise_exclusive(void) { return close(open("flag", O_CREAT | O_EXCL | O_WRONLY, 0644)); }
static int raise_folder(void) { return mkdir("flag", 0755); }
static int raise_link(void) { return symlink("nowhere", "flag"); }
static int raise_second_name(void) { return link("base", "flag"); }
/* A link in another directory leads to the flag, which is not there yet. */
static void lead_there(void)
{
    if (mkdir("far", 0755) || symlink("../flag", "far/way"))
        perror("far/way");
}
static int raise_by_link(void) { return close(open("far/way", O_CREAT | O_WRONLY, 0644)); }
/* Rank 0 makes a file and writes to it; rank 1 gives that file another name, and makes a new one. */
static int raise_and_write(void)
{
    int file = open("flag", O_CREAT | O_WRONLY, 0644), got = write(file, "x", 1);
    close(file);
    return got;
}
static void exchange(void)
{
    if (rename("flag", "log"))
        perror("flag");
    close(open("flag", O_CREAT | O_EXCL | O_WRONLY, 0644));
}
static int flag_is_up(void) { return exists("flag"); }
static void lower(void) { remove("flag"); }

/* Rank 0 appends to a box that rank 1 empties. */
static int put_in_box(void)
{
    int box = open("box", O_CREAT | O_WRONLY | O_APPEND, 0644), got = write(box, "letter\n", 7);
    int place = lseek(box, 0, SEEK_CUR);
    close(box);
    return got == 7 && (is_answered || place == 7);
}
static int box_is_full(void)
{
    struct stat about;
    return !stat("box", &about) && about.st_size == 7;
}
static void empty_box(void)
{
    if (truncate("box", 0))
        perror("box");
}

/* Both ranks append the same line to a log; rank 0 has appended to it before, or has not. */
static int log_size(void)
{
    struct stat about;
    return stat("log", &about) ? 0 : about.st_size;
}
static int append_to_log(void)
{
    int file = open("log", O_CREAT | O_WRONLY | O_APPEND, 0644), got = write(file, "line\n", 5);
    int place = lseek(file, 0, SEEK_CUR);
    close(file);
    return got == 5 && (is_answered || place == log_size());
}
static void begin_log(void) { append_to_log(); }

/* Rank 0 is killed in the middle of a long call: a write to a file into which rank 1 writes when it
 * can, an append to a file to which rank 1 appends the same, a copy. */
enum { LONG = 192 << 20 };
static int field_at = 5000;
static char *long_text(int letter)
{
    char *text = malloc(LONG);
    memset(text, letter, LONG);
    return text;
}
static void prepare_long(void)
{
    field_at = LONG - 100;
    int file = open("form", O_CREAT | O_WRONLY, 0644);
    if (ftruncate(file, LONG))
        perror("form");
    close(file);
}
static int write_long(void)
{
    char *text = long_text('A');
    int file = open("form", O_WRONLY), got = pwrite(file, text, LONG, 0);
    close(file);
    free(text);
    return got;
}
static int long_has_begun(void)
{
    char found = 0;
    int file = open("form", O_RDONLY), got = pread(file, &found, 1, 0);
    close(file);
    return got == 1 && found == 'A';
}
static void write_into_long(void)
{
    int file = open("form", O_WRONLY);
    if (pwrite(file, "x", 1, LONG - 100) != 1)
        perror("form");
    close(file);
}
static int append_long(void)
{
    char *text = long_text(0);
    int file = open("log", O_CREAT | O_WRONLY | O_APPEND, 0644), got = write(file, text, LONG);
    close(file);
    free(text);
    return got == LONG;
}
static void prepare_copy(void)
{
    char *text = long_text('b');
    int file = open("question", O_CREAT | O_WRONLY, 0644);
    if (write(file, text, LONG) != LONG)
        perror("question");
    close(file);
    free(text);
}
static int copy_long(void)
{
    int from = open("question", O_RDONLY), to = open("log", O_CREAT | O_WRONLY, 0644);
    int got = sendfile(to, from, NULL, LONG);
    close(from);
    close(to);
    return got;
}

/* Rank 0 writes a form of three pages, most of it empty; rank 1 fills in the second page. */
enum { FORM = 3 * 4096, FIELD = 5000 };
static char field(void)
{
    char found = 0;
    int file = open("form", O_RDONLY);
    if (file >= 0 && pread(file, &found, 1, field_at) < 0)
        perror("form");
    close(file);
    return found ? found : '-';
}
static void lay_out(void)
{
    make("form", "");
    if (truncate("form", FORM))
        perror("form");
}
static int hand_in(void)
{
    static char form[FORM] = "form";
    int file = open("form", O_WRONLY), got = pwrite(file, form, FORM, 0);
    close(file);
    return got == FORM;
}
static int is_handed_in(void)
{
    char found = 0;
    int file = open("form", O_RDONLY), got = pread(file, &found, 1, 0);
    close(file);
    return got == 1 && found == 'f';
}
static int is_at_end(void)
{
    char found = 0;
    int file = open("form", O_RDONLY), got = pread(file, &found, 1, FORM - 1);
    close(file);
    return got == 1 && found == 'd';
}
static int send_form(void)
{
    static char form[FORM] = "form";
    form[FIELD] = 'm';
    form[FORM - 1] = 'd';
    int file = open("form", O_WRONLY), got = pwrite(file, form, FORM, 0);
    close(file);
    return got == FORM;
}
/* Takes the form away: all of it is as empty as before. */
static void take_form(void)
{
    static const char nothing[FORM];
    int file = open("form", O_WRONLY);
    if (pwrite(file, nothing, FORM, 0) != FORM)
        perror("form");
    close(file);
}
static void fill_in(void)
{
    int file = open("form", O_WRONLY);
    if (pwrite(file, "x", 1, FIELD) != 1)
        perror("form");
    close(file);
}

/* Rank 0 writes a question over a file, rank 1 an answer over the question. */
static int ask(void)
{
    int file = open("base", O_WRONLY), got = pwrite(file, "ask?", 4, 0);
    close(file);
    return got == 4;
}
static char *content(void)
{
    static char text[64];
    int file = open("base", O_RDONLY), got = read(file, text, sizeof text - 1);
    text[got < 0 ? 0 : got] = 0;
    close(file);
    return text;
}
static int is_asked(void) { return !strncmp(content(), "ask?", 4); }
static void answer(void)
{
    int file = open("base", O_WRONLY);
    if (pwrite(file, "said", 4, 0) != 4)
        perror("base");
    close(file);
}

/* The same by copies within the kernel, which move the positions of both files. */
static void prepare_question(void) { make("question", "ask?!!"); }
static int copy_question(void)
{
    int from = open("question", O_RDONLY), to = open("base", O_WRONLY);
    int got = sendfile(to, from, NULL, 4), rest = sendfile(to, from, NULL, 4);
    close(from);
    close(to);
    return 10 * got + rest;
}

/* Rank 0 changes length or mode; rank 1 changes it back. */
static int shorten(void) { return truncate("base", 2); }
/* Rank 0 empties a file by opening it; rank 1 removes the empty file. */
static int clear(void)
{
    int file = open("base", O_WRONLY | O_TRUNC);
    close(file);
    return file >= 0;
}
static int is_clear(void)
{
    struct stat about;
    return !stat("base", &about) && about.st_size == 0;
}
static void remove_base(void) { unlink("base"); }
static int is_short(void) { return strlen(content()) == 2; }
static void restore_length(void) { make("base", "base content"); }
static int hide(void) { return chmod("base", 0600); }
static mode_t mode(void)
{
    struct stat about;
    return stat("base", &about) ? 0 : about.st_mode & 0777;
}
static int is_hidden(void) { return mode() == 0600; }
static void show(void) { chmod("base", 0644); }

/* A call whose repetition fails, and one that changes what it reads. */
static int label(void) { return setxattr("base", "user.label", "x", 1, XATTR_CREATE); }
static int shift(void)
{
    int file = open("base", O_RDWR);
    off_t from = 4;
    lseek(file, 0, SEEK_SET);
    int got = sendfile(file, file, &from, 8);
    close(file);
    return got;
}

static const struct effect {
    const char *name;
    int (*act)(void);
    int (*is_seen)(void);
    void (*answer)(void);
    void (*prepare)(void);
} effects[] = {
    {"claim-removal", claim_by_removal, NULL, NULL},
    {"claim-renaming", claim_by_renaming, NULL, NULL},
    {"rename-here", rename_here, NULL, NULL, enter_here},
    {"close-locked", close_locked, NULL, NULL, lock_box},
    {"close-range-locked", close_range_locked, NULL, NULL, lock_range},
    {"replace-locked", replace_locked, NULL, NULL, lock_box},
    {"open", raise_open, flag_is_up, lower},
    {"open-link", raise_by_link, flag_is_up, lower, lead_there},
    {"open-moved", raise_and_write, flag_is_up, exchange},
    {"open-cleared", clear, is_clear, remove_base},
    {"exclusive", raise_exclusive, flag_is_up, lower},
    {"folder", raise_folder, flag_is_up, lower},
    {"symlink", raise_link, flag_is_up, lower},
    {"link", raise_second_name, flag_is_up, lower},
    {"append", put_in_box, box_is_full, empty_box},
    {"append-same", append_to_log, NULL, NULL},
    {"append-more", append_to_log, NULL, NULL, begin_log},
    {"write", ask, is_asked, answer},
    {"write-pages", hand_in, is_handed_in, fill_in, lay_out},
    {"write-taken", send_form, is_at_end, take_form, lay_out},
    {"long-write", write_long, long_has_begun, write_into_long, prepare_long},
    {"long-append", append_long, NULL, NULL},
    {"long-copy", copy_long, NULL, NULL, prepare_copy},
    {"copy", copy_question, is_asked, answer, prepare_question},
    {"truncate", shorten, is_short, restore_length},
    {"chmod", hide, is_hidden, show},
    {"attribute", label, NULL, NULL},
    {"shift", shift, NULL, NULL},
};

static const struct effect *find(const char *name)
{
    for (size_t i = 0; i < sizeof effects / sizeof *effects; i++)
        if (!strcmp(effects[i].name, name))
            return effects + i;
    fprintf(stderr, "there is no case %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    int rank, done = 0, all = 0;
    if (argc < 4)
        return 2;
    const struct effect *effect = find(argv[2]);
    is_answered = !strcmp(argv[3], "answered");
    is_soon = argc > 4;
    if (!strcmp(effect->name, "long-append"))
        turn_ms = 790;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (chdir(argv[1]))
        perror(argv[1]);
    if (!rank) {
        make("base", "base content");
        make("task", "");
        if (effect->prepare)
            effect->prepare();
        printf("ready\n");
        fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (!rank) {
        usleep(800 * 1000);
        if (is_soon)
            change_all();
        done = effect->act();
    } else if (is_answered && effect->answer) {
        until(effect->is_seen);
        effect->answer();
        done = 1000;
    } else if (is_answered) {
        wait_for_turn();
        done = effect->act();
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Allreduce(&done, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (!rank)
        printf("result %d, flag %d, box %d, log %d, field %c, mode %o, %s\n", all, exists("flag"), box_is_full(), log_size(),
               field(), mode(), content());
    MPI_Finalize();
    return 0;
}
