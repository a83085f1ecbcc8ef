# Every target sets up what it needs, in .venv; what is there already is not installed again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# More than cores, as tests of processes and faults mostly wait.
TEST_PROCESSES ?= $(shell expr $$(nproc) + 3)
SLOW_TEST_PROCESSES ?= $(shell expr $$(nproc) + 2)
# They share the GPU and its memory.
GPU_TEST_PROCESSES ?= $(shell expr $$(nproc) / 2 + 1)
# How long nemesis and fuzz look for failures.
MINUTES ?= 30
# Two makes at once take turns; without flock they had better not be.
LOCK := $(if $(shell command -v flock),flock .setup.lock,)
export NO_MKDOCS_2_WARNING := 1
# Tests start hundreds of processes: what one has compiled the others take, wherever this was set.
export PYTHONDONTWRITEBYTECODE :=
# They share few cores: OpenMP's threads had better sleep than wait for each other awake.
test test-gpu test-slow test-long test-many nemesis kill-anywhere same-bits simulate fuzz: export OMP_WAIT_POLICY := PASSIVE

.PHONY: train test test-gpu test-slow test-long test-many nemesis kill-anywhere same-bits simulate fuzz lint docs clean

train: $(VENV)/recipes.stamp
	$(BIN)/allstep train digits --workers 2

test: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python -m pytest -m "not slow and not long" --numprocesses $(TEST_PROCESSES) --dist worksteal

# Those that need a GPU; without one they are skipped.
test-gpu: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m gpu --numprocesses $(GPU_TEST_PROCESSES) --dist worksteal

# Real clusters, other people's frameworks and long random runs; every property-based test with many
# more examples.
test-slow: $(VENV)/test.stamp
	scripts/install_test_packages
	@$(MAKE) --no-print-directory $(VENV)/frameworks.stamp || \
		echo "not installed: allstep[frameworks] (pip failed); the tests that need it are skipped"
	@$(MAKE) --no-print-directory $(VENV)/cluster_tools.stamp || \
		echo "not installed: tests/helpers/cluster_tools.txt (pip failed); the tests that need it are skipped"
	$(BIN)/python -m pytest -m "(slow or hypothesis) and not long" --hypothesis-profile thorough \
		--timeout 2400 --numprocesses $(SLOW_TEST_PROCESSES) --dist worksteal

# More variants of what the slow tests do: before a release, and after a change of what they are of.
test-long: $(VENV)/test.stamp
	scripts/install_test_packages
	@$(MAKE) --no-print-directory $(VENV)/frameworks.stamp
	$(BIN)/python -m pytest -m long --timeout 14400 --numprocesses $(SLOW_TEST_PROCESSES) --dist worksteal

# Elastic trainings on two hosts of this machine, whose processes, links, disks and clocks fail, for so long;
# from seed SEED on, and a failure says which one. Needs root.
SEED ?= 0
nemesis: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python -m tests.helpers.nemesis $(MINUTES) $(SEED)

# Workers of elastic trainings that are killed and join at any call, by so many seeds.
SEEDS ?= 100
kill-anywhere: $(VENV)/test.stamp
	SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/train/test_elastic.py \
		tests/train/test_elastic_loop.py tests/train/test_elastic_checkpoint.py -k any_call

# Whole trainings of recipes as shipped, of the same bits on any number of workers; hours.
NUM_WORKERS ?= 2 3 4 7
RECIPES ?= digits fashion
same-bits: $(VENV)/test.stamp
	scripts/install_test_packages
	RECIPES="$(RECIPES)" NUM_WORKERS="$(NUM_WORKERS)" $(BIN)/python -m pytest --timeout 14400 \
		tests/train/test_exact.py -k as_shipped

# The same loops on simulated machines, by so many seeds from SEED on: kills, stops, joins, cut networks; then with
# checkpoints on a disk that is full or loses its power.
simulate: SEEDS := 10000
simulate: $(VENV)/test.stamp
	SEED=$(SEED) SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/train/test_simulated_elastic.py \
		tests/train/test_simulated_checkpoints.py --numprocesses $(shell nproc)

# N runs in random order on a busy machine; counts the failures of each test.
N ?= 10
test-many: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python scripts/test_many.py $(N) --processes $(TEST_PROCESSES)

# Random trainings on workers against one process, for so long.
fuzz: $(VENV)/test.stamp
	$(BIN)/python -m tests.exchange.fuzz $(MINUTES)

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/lint.stamp
	$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf $(VENV) .setup.lock site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# A stamp says that an extra is installed as these files want it; the package's own has the version.
$(VENV)/recipes.stamp: EXTRAS := recipes,plot
$(VENV)/test.stamp: EXTRAS := test
$(VENV)/frameworks.stamp: EXTRAS := test,frameworks
$(VENV)/lint.stamp: EXTRAS := test,lint,docs

$(VENV)/%.stamp: pyproject.toml constraints.txt allstep/__init__.py | $(BIN)/pip
	@echo "Installing allstep[$(EXTRAS)] in $(VENV); the first time it takes a few minutes."
	@$(LOCK) $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# Large programs that only check files, apart from allstep's packages.
$(VENV)/cluster_tools.stamp: tests/helpers/cluster_tools.txt | $(BIN)/pip
	@$(LOCK) sh -c '"$(PYTHON)" -m venv $(VENV)/cluster_tools && \
		$(VENV)/cluster_tools/bin/pip install --quiet --disable-pip-version-check --requirement $<'
	@touch $@

# pip is the last thing that venv makes.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "allstep needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "This Python can't make a .venv: apt-get install python3-venv"; exit 1; }
	@$(LOCK) sh -c 'test -x $@ || "$(PYTHON)" -m venv $(VENV)'
