"""Each rank writes its number into a window that its node shares, and prints the numbers found
there."""

from mpi4py import MPI

world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
window = MPI.Win.Allocate_shared(8, 8, comm=node)
parts = [memoryview(window.Shared_query(rank)[0]).cast("q") for rank in range(node.size)]
window.Lock_all()
parts[node.rank][0] = world.rank
window.Sync()
node.Barrier()
window.Sync()
found = [part[0] for part in parts]
window.Unlock_all()
# Communication across nodes works as well.
assert world.allreduce(world.rank) == world.size * (world.size - 1) // 2
print(f"shared: {world.rank},{','.join(map(str, found))}", flush=True)
del parts
window.Free()
