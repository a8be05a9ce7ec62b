# The few commands of this repository. `make` alone prints them. Everything that is made lies under
# target/ and build/; `make clean` removes both.

RELEASE = target/release
PYTHON ?= python3

.PHONY: help setup build wheels criu test test-all bench demo lint clean

help:
	@echo "make build      the launcher, the relay, the lab and the provider, in $(RELEASE)"
	@echo "make wheels     stock MPI libraries with mpi4py, into build/venv"
	@echo "make criu       CRIU, which takes checkpoints of processes, into build/tools"
	@echo "make demo       stock MPI programs over two clusters, with a table and a picture"
	@echo "make test       fast tests, and samples of the slow ones; parts alone: $(PYTHON) scripts/test.py --list"
	@echo "make test-all   every case of every test: hours"
	@echo "make bench      the comparisons with other transports, into docs/BENCHMARKS.md"
	@echo "make lint       rustfmt, clippy, cargo deny"
	@echo "make clean      remove target/ and build/"

setup:
	@$(PYTHON) scripts/setup.py

# Cargo names the provider liblandbridge_fi.so; the launcher looks first for liblandbridge-fi.so.
build: setup
	cargo build --release --workspace
	@cp -f $(RELEASE)/liblandbridge_fi.so $(RELEASE)/.new-fi.so
	@mv -f $(RELEASE)/.new-fi.so $(RELEASE)/liblandbridge-fi.so
	@echo "built $(RELEASE)/landbridge and $(RELEASE)/liblandbridge-fi.so"

wheels: setup
	@$(PYTHON) scripts/wheels.py

criu: setup
	@$(PYTHON) scripts/criu.py

# The script first makes what the tests need (setup, build, wheels, CRIU, and moto, a server that
# keeps checkpoints), so that its table has the time of each.
test:
	@$(PYTHON) scripts/test.py --prepare

test-all:
	@$(PYTHON) scripts/test.py --prepare --slow

bench: build wheels
	@$(PYTHON) scripts/setup.py --bench
	@$(PYTHON) bench/run.py

demo: build
	@$(PYTHON) scripts/wheels.py mpich impi
	@$(PYTHON) scripts/demo.py

lint:
	@$(PYTHON) scripts/test.py fmt clippy deny

clean:
	rm -rf target build
