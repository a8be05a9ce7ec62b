"""Modules that the drivers in tests/, bench/ and scripts/ share: paths, processes, command
lines."""

import os

# Tests and benchmarks are about this project's provider, inside a node as well.
os.environ.setdefault("LANDBRIDGE_LOCAL", "own")
