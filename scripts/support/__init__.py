"""What the drivers in tests/, bench/ and scripts/ share: paths, processes, MPI launch lines."""
