# make demo   train a small sharded model on this machine's own Python files, and look at it
# make test   lint, the fast tests, and one of what starts processes in each main part
# make check   lint, types, and all tests but those of whole runs: what CI runs before test-system
# make test-quick   the tests of that alone
# make test-fast   the tests that start no process and take at most half a second each
# make test-system   launchers, schedulers, containers, whole runs, and more layouts
# make kubernetes   a real Kubernetes control plane from Debian's sources, into ~/.cache/shardyard-tests
# make test-kubernetes   that, and the launcher's whole life against it
# make test-all   every test but those that need an accelerator
# make test-versions   the tests closest to torch, with each minor version of it (5 GB each)
# make test-oldest   the same with the oldest torch, and the oldest of all else, that is accepted
# make system-packages   Debian's packages that tests need, as root: Slurm, podman, Docker and others
# make site   the documentation as pages that open from disk, every link checked
# make bench   the slow proofs; their results are in benchmarks/results/

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check test-core test-quick test-fast test-system kubernetes test-kubernetes test-all test-versions test-oldest system-packages durations lint types bench docs site clean

demo: .venv/installed
	$(BIN)/shardyard train examples/quickstart.yaml

# One thread a process: the ranks of a test are as many as the cores, or more.
export OMP_NUM_THREADS ?= 1
# Where it is set, each of the many processes of a test compiles every module anew. Empty: not set.
export PYTHONDONTWRITEBYTECODE :=

# Kinds of tests: tests/selection.py. Two files at a time, but for benchmarks of the system half,
# which measure time.
# -rs: what was skipped, and why, is read at the end.
PYTEST := $(BIN)/python -m pytest --account -rs
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
ALONE := tests/benchmarks

test: lint test-core

# Types beside the tests: each leaves the other's waiting times a processor.
check: lint
	$(MAKE) --no-print-directory -j 2 types test-quick

test-core: .venv/installed-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "(not heavy or core) and not system and not slow and not gpu"

test-quick: .venv/installed-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "not system and not slow and not gpu"

test-fast: .venv/installed-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "not heavy and not system and not slow and not gpu"

test-system: .venv/installed-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "system and not slow and not gpu" $(ALONE:%=--ignore=%) --durations=25
	$(PYTEST) -m "system and not slow and not gpu" $(ALONE) --durations=25

# Built once; test-system runs these tests too where it is built, and skips them elsewhere.
kubernetes:
	nice tests/launchers/kubernetes/build_control_plane.sh

test-kubernetes: .venv/installed-dev kubernetes
	$(PYTEST) tests/launchers/kubernetes/test_control_plane.py

test-all: lint types
	$(PYTEST) -m "not gpu" --durations=25

# Looks for each first: where all are there it is quick, and needs neither root nor apt-get.
system-packages: .venv/installed-dev
	$(BIN)/python -m tests.debian_packages

# What the last of these runs cost becomes what the next ones are compared with.
durations:
	cp .durations.json tests/durations.json

# Not part of CI: each brings 5 GB of parts for accelerators with it. TORCH=2.11.0 tries that alone.
test-versions: .venv/installed-dev
	$(BIN)/python -m benchmarks.torch_versions $(TORCH)

test-oldest: .venv/installed-dev
	$(BIN)/python -m benchmarks.torch_versions 2.11.0

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m benchmarks.start_up
	$(BIN)/python -m benchmarks.step_overhead
	$(BIN)/python -m benchmarks.tensor_dispatch
	$(BIN)/python -m benchmarks.layout_equality
	$(BIN)/python -m benchmarks.axis_grid
	$(BIN)/python -m benchmarks.lamb
	$(BIN)/python -m benchmarks.muon
	$(BIN)/python -m benchmarks.loss_parity
	$(BIN)/python -m benchmarks.timed_kills examples/quickstart.yaml cluster.device=cpu cluster.devices=2 --faults power,kill-in-save,kill-in-load,nan --steps 60 --repeat 5
	$(BIN)/python -m benchmarks.planner_accuracy --table benchmarks/groundtruth/measured_runs.csv
	$(BIN)/python -m benchmarks.planner_speed
	$(BIN)/python -m benchmarks.all_reduce_fit
	$(BIN)/python -m benchmarks.source_systems
	$(BIN)/python -m benchmarks.planner_bert
	$(BIN)/python -m benchmarks.dry_run_memory
	$(BIN)/python -m benchmarks.launching
	$(BIN)/python -m benchmarks.axis_traffic
	$(BIN)/python -m benchmarks.memory_table
	$(BIN)/python -m benchmarks.mutations

docs: .venv/installed-dev
	$(BIN)/python -m docs.generate

site: .venv/installed-docs
	$(BIN)/python -m docs.site

# The stamps make the second call quick; a changed dependency list makes it install again.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .durations.json runs prepared build/site
