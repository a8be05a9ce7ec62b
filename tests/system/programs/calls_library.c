/* Stands for an MPI library, whose sockets are part of the job, and for a library of the program's
 * own: the driver calls.py builds it as libmpi_cxx.so and libmpihelper.so. It uses each channel that the interposer reports when a program uses it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void need(int is_right)
{
    if (!is_right)
        _exit(4);
}

void communicate(void)
{
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof own;
    struct iovec piece = {"word", 4};
    struct mmsghdr many = {{&own, sizeof own, &piece, 1, NULL, 0, 0}, 0};
    int to = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
    need(!bind(to, (void *)&own, sizeof own));
    need(!getsockname(to, (void *)&own, &length));
    for (int time = 0; time < 3; time++) {
        need(sendto(from, "word", 4, 0, (void *)&own, sizeof own) == 4);
        need(sendmsg(from, &many.msg_hdr, 0) == 4);
        need(sendmmsg(from, &many, 1, 0) == 1);
        need(syscall(SYS_sendmsg, from, &many.msg_hdr, 0) == 4);
    }
    need(!syscall(SYS_connect, from, &own, sizeof own));
    need(!connect(from, (void *)&own, sizeof own));
    int memory = shmget(IPC_PRIVATE, 4096, 0600), count = semget(IPC_PRIVATE, 1, 0600);
    need(shmat(memory, NULL, 0) != (void *)-1);
    shmctl(memory, IPC_RMID, NULL);
    semctl(count, 0, IPC_RMID);
}
