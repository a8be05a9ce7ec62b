/* Stops this process inside MPI's calls that write files, so that a test kills it exactly there.
 *
 * ROWS_STOPPED: `RANK:CALL:WAY`, separated by commas. CALL counts the calls of a rank that write a
 * file, from 0. WAY is `before` or `after` the first pwrite(2) within that call or a later one, or
 * a number of microseconds after the beginning of that call; if the call has returned by then, of
 * a later one. Each incarnation stops there. The test ends or resumes a process that has stopped.
 *
 * The wrappers are found before the library's own functions because the program defines them. */
#ifndef WITHIN_H
#define WITHIN_H

#include "rows.h"

#include <dlfcn.h>
#include <signal.h>

enum way { NOWHERE, BEFORE, AFTER, LATER };

static struct stop {
    enum way way;
    long call, calls;
    int is_prepared, is_inside;
    timer_t timer;
    struct itimerspec delay;
} within;

static void within_prepare(void)
{
    const char *text = getenv("ROWS_STOPPED");
    within.is_prepared = 1;
    for (; text && *text; text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL) {
        char *rest, *way;
        if (strtol(text, &rest, 10) != rank)
            continue;
        within.call = strtol(rest + 1, &way, 10);
        within.way = way[1] == 'b' ? BEFORE : way[1] == 'a' ? AFTER : LATER;
        within.delay.it_value.tv_nsec = 1000 * strtol(way + 1, NULL, 10) + 1;
    }
    if (within.way == LATER) {
        struct sigevent stop = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGSTOP};
        if (timer_create(CLOCK_MONOTONIC, &stop, &within.timer))
            abort();
    }
}

static void within_begin(void)
{
    if (!within.is_prepared)
        within_prepare();
    within.is_inside = within.calls++ >= within.call;
    if (within.is_inside && within.way == LATER)
        timer_settime(within.timer, 0, &within.delay, NULL);
}

static void within_end(void)
{
    if (within.is_inside && within.way == LATER) {
        struct itimerspec never = {0}, left;
        timer_settime(within.timer, 0, &never, &left);
        /* The timer has expired inside the call. */
        if (!left.it_value.tv_sec && !left.it_value.tv_nsec)
            within.way = NOWHERE;
    }
    within.is_inside = 0;
}

static void within_pwrite(enum way way)
{
    if (within.is_inside && within.way == way) {
        within.way = NOWHERE;
        raise(SIGSTOP);
    }
}

ssize_t pwrite(int file, const void *bytes, size_t length, off_t place)
{
    static ssize_t (*next)(int, const void *, size_t, off_t);
    if (!next)
        next = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    within_pwrite(BEFORE);
    ssize_t result = next(file, bytes, length, place);
    within_pwrite(AFTER);
    return result;
}

#define WITHIN(call)                                                                               \
    {                                                                                              \
        within_begin();                                                                            \
        int result = P##call;                                                                      \
        within_end();                                                                              \
        return result;                                                                             \
    }
#define PIECES_OF const void *bytes, int count, MPI_Datatype type

int MPI_File_write_at(MPI_File file, MPI_Offset at, PIECES_OF, MPI_Status *status)
WITHIN(MPI_File_write_at(file, at, bytes, count, type, status))
int MPI_File_write_at_all(MPI_File file, MPI_Offset at, PIECES_OF, MPI_Status *status)
WITHIN(MPI_File_write_at_all(file, at, bytes, count, type, status))
int MPI_File_write_shared(MPI_File file, PIECES_OF, MPI_Status *status)
WITHIN(MPI_File_write_shared(file, bytes, count, type, status))
int MPI_File_write_ordered(MPI_File file, PIECES_OF, MPI_Status *status)
WITHIN(MPI_File_write_ordered(file, bytes, count, type, status))
int MPI_File_iwrite_at(MPI_File file, MPI_Offset at, PIECES_OF, MPI_Request *request)
WITHIN(MPI_File_iwrite_at(file, at, bytes, count, type, request))
int MPI_File_iwrite_at_all(MPI_File file, MPI_Offset at, PIECES_OF, MPI_Request *request)
WITHIN(MPI_File_iwrite_at_all(file, at, bytes, count, type, request))
int MPI_File_iwrite_shared(MPI_File file, PIECES_OF, MPI_Request *request)
WITHIN(MPI_File_iwrite_shared(file, bytes, count, type, request))
/* Only requests of files are waited for one at a time. */
int MPI_Wait(MPI_Request *request, MPI_Status *status)
WITHIN(MPI_Wait(request, status))
int MPI_File_write_at_all_begin(MPI_File file, MPI_Offset at, PIECES_OF)
WITHIN(MPI_File_write_at_all_begin(file, at, bytes, count, type))
int MPI_File_write_at_all_end(MPI_File file, const void *bytes, MPI_Status *status)
WITHIN(MPI_File_write_at_all_end(file, bytes, status))

#endif
