/* A conjugate gradient solver: Poisson's equation on a cube, as codes of flow and heat solve it.
 *
 *     gradient CELLS STEPS
 *
 * The cube of CELLS cells along each side is cut into slabs, one for each rank. Each step exchanges
 * one layer of cells with both neighbours, and forms two sums over all ranks. What leaves: on rank 0
 * a line `seconds S residual R`, where R is relative to that at the start. Exit code 1 if R does not
 * fall below 1.
 */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;
static long cells, layers, plane;

/* Layer 0 and the last one are those of the neighbours, or the cold rim of the cube. */
static double *new_slab(void)
{
    double *slab = calloc((size_t)((layers + 2) * plane), sizeof *slab);
    if (slab == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    return slab;
}

static void exchange(double *slab)
{
    int below = rank > 0 ? rank - 1 : MPI_PROC_NULL;
    int above = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    MPI_Request all[4];
    MPI_Irecv(slab, (int)plane, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, &all[0]);
    MPI_Irecv(slab + (layers + 1) * plane, (int)plane, MPI_DOUBLE, above, 1, MPI_COMM_WORLD, &all[1]);
    MPI_Isend(slab + plane, (int)plane, MPI_DOUBLE, below, 1, MPI_COMM_WORLD, &all[2]);
    MPI_Isend(slab + layers * plane, (int)plane, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, &all[3]);
    MPI_Waitall(4, all, MPI_STATUSES_IGNORE);
}

/* product = six times each cell, without its neighbours; returns the own part of direction . product. */
static double apply(const double *direction, double *product)
{
    double sum = 0;
    for (long z = 1; z <= layers; z++)
        for (long y = 0; y < cells; y++)
            for (long x = 0; x < cells; x++) {
                long at = z * plane + y * cells + x;
                double around = direction[at - plane] + direction[at + plane];
                around += (y > 0 ? direction[at - cells] : 0) + (y + 1 < cells ? direction[at + cells] : 0);
                around += (x > 0 ? direction[at - 1] : 0) + (x + 1 < cells ? direction[at + 1] : 0);
                product[at] = 6 * direction[at] - around;
                sum += direction[at] * product[at];
            }
    return sum;
}

static double over_all(double own)
{
    double sum;
    MPI_Allreduce(&own, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3)
        MPI_Abort(MPI_COMM_WORLD, 2);
    cells = atol(argv[1]);
    long steps = atol(argv[2]), first = cells * rank / ranks;
    layers = cells * (rank + 1) / ranks - first;
    plane = cells * cells;
    double *found = new_slab(), *residual = new_slab(), *direction = new_slab(), *product = new_slab();
    double own = 0;
    for (long at = plane; at < (layers + 1) * plane; at++) {
        residual[at] = direction[at] = 1 + (double)((at + first * plane) % 7);
        own += residual[at] * residual[at];
    }
    double at_start = over_all(own), square = at_start;
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (long step = 0; step < steps; step++) {
        exchange(direction);
        double length = square / over_all(apply(direction, product));
        own = 0;
        for (long at = plane; at < (layers + 1) * plane; at++) {
            found[at] += length * direction[at];
            residual[at] -= length * product[at];
            own += residual[at] * residual[at];
        }
        double next = over_all(own);
        for (long at = plane; at < (layers + 1) * plane; at++)
            direction[at] = residual[at] + next / square * direction[at];
        square = next;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double relative = sqrt(square / at_start);
    if (rank == 0)
        printf("seconds %.4f residual %.3e\n", MPI_Wtime() - began, relative);
    MPI_Finalize();
    return relative < 1 ? 0 : 1;
}
