"""Heat flowing through a square plate, computed by all ranks together (mpi4py, numpy).

    landbridge run --clusters 2 -n 4 PYTHON examples/heat.py --check

PYTHON must have mpi4py on MPICH 5 or Intel MPI, and numpy: build/venv/mpich/bin/python after `make wheels`.

The plate's rim is kept hot on one side and cold on the others; the explicit five-point scheme runs
for a number of steps. Each rank owns a block of a two-dimensional process grid and swaps one-cell
borders with its four neighbours in every step. With --check rank 0 computes the same plate alone
and demands the same bits: the sum of every cell is formed in the same order on any number of ranks.
"""

import argparse
import struct
import sys
import time
import zlib

import numpy as np
from mpi4py import MPI

HOT, COLD = 100.0, 0.0
# Below 0.25 the explicit scheme is stable in two dimensions.
DIFFUSION = 0.2
# Colours from cold to hot. Heat fades like a bell curve, so its square root is what is drawn.
RAMP = [(16, 12, 70), (96, 20, 150), (190, 50, 120), (240, 130, 50), (250, 245, 130)]
PICTURE_PIXELS = 512


def main() -> int:
    options = arguments()
    world = MPI.COMM_WORLD
    grid = world.Create_cart(MPI.Compute_dims(world.size, 2), periods=(False, False))
    rows, columns = (share(options.size, grid.dims[d], grid.coords[d]) for d in (0, 1))

    started = time.perf_counter()
    block = compute(grid, rows, columns, options)
    seconds = time.perf_counter() - started
    plate = gather(grid, block, rows, columns, options.size)

    if world.rank != 0:
        return 0
    steps_per_s = options.steps / seconds
    print(f"heat: {options.size} x {options.size} cells, {options.steps} steps, {world.size} ranks")
    print(f"heat: {seconds:.2f} s, {steps_per_s:.0f} steps/s, mean {plate.mean():.6f}")
    if options.picture:
        save_picture(plate, options.picture)
        print(f"heat: picture in {options.picture}")
    return check(plate, options) if options.check else 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="cells along one side")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--check", action="store_true", help="compare with a serial run")
    parser.add_argument("--picture", help="write the plate as a PNG image")
    return parser.parse_args()


def share(cells: int, parts: int, part: int) -> range:
    """The cells of one dimension that belong to `part` of `parts`: sizes differ by one at most."""
    return range(cells * part // parts, cells * (part + 1) // parts)


def new_block(rows: range, columns: range) -> np.ndarray:
    """A block with a border of one cell; the border is the rim until a neighbour's cells replace it."""
    block = np.full((len(rows) + 2, len(columns) + 2), COLD)
    if rows.start == 0:
        block[0, :] = HOT
    return block


def step(old: np.ndarray, new: np.ndarray) -> None:
    """One time step of all inner cells, written so that each cell's sum has one fixed order."""
    middle = old[1:-1, 1:-1]
    around = (old[:-2, 1:-1] + old[2:, 1:-1]) + (old[1:-1, :-2] + old[1:-1, 2:])
    new[1:-1, 1:-1] = middle + DIFFUSION * (around - 4.0 * middle)


def compute(grid, rows: range, columns: range, options) -> np.ndarray:
    old = new_block(rows, columns)
    new = old.copy()
    for _ in range(options.steps):
        swap_borders(grid, old)
        new[0, :], new[-1, :], new[:, 0], new[:, -1] = old[0], old[-1], old[:, 0], old[:, -1]
        step(old, new)
        old, new = new, old
    return old


def swap_borders(grid, block: np.ndarray) -> None:
    """Each neighbour's outermost own row or column becomes our border, and ours its."""
    up, down = grid.Shift(0, 1)
    left, right = grid.Shift(1, 1)
    grid.Sendrecv(block[1], dest=up, recvbuf=block[-1], source=down)
    grid.Sendrecv(block[-2], dest=down, recvbuf=block[0], source=up)
    for send, dest, receive, source in ((1, left, -1, right), (-2, right, 0, left)):
        incoming = np.ascontiguousarray(block[:, receive])
        outgoing = np.ascontiguousarray(block[:, send])
        grid.Sendrecv(outgoing, dest=dest, recvbuf=incoming, source=source)
        block[:, receive] = incoming


def gather(grid, block: np.ndarray, rows: range, columns: range, size: int):
    """The whole plate on rank 0, None elsewhere."""
    pieces = grid.gather((rows, columns, block[1:-1, 1:-1].copy()), root=0)
    if pieces is None:
        return None
    plate = np.empty((size, size))
    for rows, columns, piece in pieces:
        plate[rows.start : rows.stop, columns.start : columns.stop] = piece
    return plate


def check(plate: np.ndarray, options) -> int:
    old = new_block(range(options.size), range(options.size))
    new = old.copy()
    for _ in range(options.steps):
        step(old, new)
        old, new = new, old
    alike = np.array_equal(plate, old[1:-1, 1:-1])
    worst = np.abs(plate - old[1:-1, 1:-1]).max()
    verdict = "identical to" if alike else f"DIFFERS (by {worst:.3g}) from"
    print(f"heat: answer {verdict} the serial run")
    return 0 if alike else 1


def save_picture(plate: np.ndarray, file: str) -> None:
    """A PNG image, written by hand because that needs no library."""
    shade = np.sqrt(np.clip((plate - COLD) / (HOT - COLD), 0, 1)) * (len(RAMP) - 1)
    channels = [np.interp(shade, range(len(RAMP)), channel) for channel in zip(*RAMP)]
    zoom = max(1, PICTURE_PIXELS // len(plate))
    pixels = np.stack(channels, axis=-1).astype(np.uint8).repeat(zoom, 0).repeat(zoom, 1)
    height, width = pixels.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    with open(file, "wb") as out:
        out.write(b"\x89PNG\r\n\x1a\n")
        out.write(png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)))
        out.write(png_chunk(b"IDAT", zlib.compress(lines)))
        out.write(png_chunk(b"IEND", b""))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    code = main()
    if code:
        sys.stdout.flush()
        MPI.COMM_WORLD.Abort(code)
