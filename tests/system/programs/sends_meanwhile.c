/* Rank 0 sends to rank 1 while its messages do not leave its node: `COUNT BYTES WAIT_MS`.
 *
 * Rank 0 prints `ready`, waits for WAIT_MS milliseconds, and sends one message with MPI_Send and COUNT
 * with MPI_Isend and MPI_Waitall. It prints how long that took. Then it does nothing for two seconds,
 * and waits for a sum from rank 1. It prints the sum, and how long after its first send the sum came. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static long count, bytes;

static void fill(unsigned char *message, long number)
{
    for (long i = 0; i < bytes; i++)
        message[i] = (unsigned char)(7 * number + i);
}

static void send_all(long wait_ms)
{
    unsigned char *messages = malloc((count + 1) * bytes);
    MPI_Request *requests = malloc(count * sizeof *requests);
    long sum = 0;
    for (long i = 0; i <= count; i++)
        fill(messages + i * bytes, i);
    printf("rank 0 turn 0: ready\n");
    fflush(stdout);
    usleep(wait_ms * 1000);
    double began = MPI_Wtime();
    MPI_Send(messages, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
    for (long i = 0; i < count; i++)
        MPI_Isend(messages + (i + 1) * bytes, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, requests + i);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    printf("sent after ms: %.0f\n", (MPI_Wtime() - began) * 1e3);
    fflush(stdout);
    /* What was sent may be used again. */
    for (long i = 0; i < (count + 1) * bytes; i++)
        messages[i] = 0;
    sleep(2);
    MPI_Recv(&sum, 1, MPI_LONG, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    printf("answered after ms: %.0f\nright messages: %ld\n", (MPI_Wtime() - began) * 1e3, sum);
    free(messages);
    free(requests);
}

static void receive_all(void)
{
    unsigned char *message = malloc(bytes), *expected = malloc(bytes);
    long right = 0;
    for (long i = 0; i <= count; i++) {
        int is_right = 1;
        MPI_Recv(message, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        fill(expected, i);
        for (long at = 0; at < bytes; at++)
            is_right &= message[at] == expected[at];
        right += is_right;
    }
    MPI_Send(&right, 1, MPI_LONG, 0, 1, MPI_COMM_WORLD);
    free(message);
    free(expected);
}

int main(int argc, char **argv)
{
    int rank;
    MPI_Init(&argc, &argv);
    if (argc < 4)
        MPI_Abort(MPI_COMM_WORLD, 2);
    count = atol(argv[1]);
    bytes = atol(argv[2]);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        send_all(atol(argv[3]));
    else
        receive_all();
    MPI_Finalize();
    return 0;
}
