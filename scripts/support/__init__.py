"""What the drivers in tests/, bench/ and scripts/ share: paths, processes, MPI launch lines."""

import os

# What is tested and measured is our provider, inside a node as well.
os.environ.setdefault("LANDBRIDGE_LOCAL", "own")
