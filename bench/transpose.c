/* Fourier transforms of a square by rows and columns, as spectral codes do them.
 *
 *     transpose SIDE STEPS
 *
 * Each rank has the same number of rows of SIDE x SIDE complex numbers; SIDE is a power of two, and
 * a multiple of the number of ranks. A step transforms forward (rows, transposition, rows) and back.
 * A transposition is an MPI_Alltoall of nearly all data. What leaves: on rank 0 a line `seconds S
 * error E`, where E is the largest difference from the square at the start. Exit code 1 if E is not
 * small.
 */
#include <complex.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;
static long side, rows;
static double complex *square, *packed, *roots;

/* The transform of one row in place; `roots` has those of unity, conjugate for the way back. */
static void transform(double complex *row, int is_back)
{
    for (long at = 1, other = 0; at < side; at++) {
        long bit = side >> 1;
        for (; other & bit; bit >>= 1)
            other ^= bit;
        other ^= bit;
        if (at < other) {
            double complex kept = row[at];
            row[at] = row[other];
            row[other] = kept;
        }
    }
    for (long length = 2; length <= side; length <<= 1)
        for (long first = 0; first < side; first += length)
            for (long at = 0; at < length / 2; at++) {
                double complex root = roots[at * (side / length)];
                double complex low = row[first + at];
                double complex high = row[first + at + length / 2] * (is_back ? conj(root) : root);
                row[first + at] = low + high;
                row[first + at + length / 2] = low - high;
            }
}

/* The block for each rank is packed transposed, so that what arrives is a part of each row. */
static void transpose(void)
{
    for (long to = 0; to < ranks; to++)
        for (long row = 0; row < rows; row++)
            for (long column = 0; column < rows; column++)
                packed[(to * rows + column) * rows + row] = square[row * side + to * rows + column];
    int each = (int)(2 * rows * rows);
    MPI_Alltoall(packed, each, MPI_DOUBLE, square, each, MPI_DOUBLE, MPI_COMM_WORLD);
    for (long from = 0; from < ranks; from++)
        for (long row = 0; row < rows; row++)
            for (long column = 0; column < rows; column++)
                packed[row * side + from * rows + column] = square[(from * rows + row) * rows + column];
    double complex *kept = square;
    square = packed;
    packed = kept;
}

static void both_ways(int is_back)
{
    for (int turn = 0; turn < 2; turn++) {
        for (long row = 0; row < rows; row++)
            transform(square + row * side, is_back);
        transpose();
    }
    for (long at = 0; is_back && at < rows * side; at++)
        square[at] /= (double)side * (double)side;
}

static double complex at_start(long at)
{
    return (double)((at * 31 + rank * 17) % 101) / 101;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    side = argc == 3 ? atol(argv[1]) : 0;
    rows = side / ranks;
    if (side < 2 || (side & (side - 1)) || rows * ranks != side)
        MPI_Abort(MPI_COMM_WORLD, 2);
    square = malloc((size_t)(rows * side) * sizeof *square);
    packed = malloc((size_t)(rows * side) * sizeof *packed);
    roots = malloc((size_t)side * sizeof *roots);
    if (square == NULL || packed == NULL || roots == NULL)
        MPI_Abort(MPI_COMM_WORLD, 2);
    for (long at = 0; at < rows * side; at++)
        square[at] = at_start(at);
    for (long at = 0; at < side; at++)
        roots[at] = cexp(-2 * acos(-1) * I * (double)at / (double)side);
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime(), own = 0, error;
    for (long step = 0, steps = atol(argv[2]); step < steps; step++) {
        both_ways(0);
        both_ways(1);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - began;
    for (long at = 0; at < rows * side; at++)
        own = fmax(own, cabs(square[at] - at_start(at)));
    MPI_Allreduce(&own, &error, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0)
        printf("seconds %.4f error %.3e\n", seconds, error);
    MPI_Finalize();
    return error < 1e-9 ? 0 : 1;
}
