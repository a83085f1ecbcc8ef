# Every target sets up what it needs, in .venv; what is there already is not installed again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# One more than cores: tests of faults mostly wait.
TEST_PROCESSES ?= $(shell expr $$(nproc) + 1)
# Two makes at once take turns; without flock they had better not be.
LOCK := $(if $(shell command -v flock),flock .setup.lock,)
export NO_MKDOCS_2_WARNING := 1

.PHONY: train test test-slow test-many fuzz lint docs clean

train: $(VENV)/recipes.stamp
	$(BIN)/allstep train digits --workers 2

test: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(TEST_PROCESSES) --dist worksteal

# Real clusters and long random runs; every property-based test with many more examples.
test-slow: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile thorough --timeout 1500 \
		--numprocesses $(TEST_PROCESSES) --dist worksteal

# N runs in random order on a busy machine; counts the failures of each test.
N ?= 10
test-many: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python scripts/test_many.py $(N) --processes $(TEST_PROCESSES)

# Random trainings on workers against one process, for so long.
MINUTES ?= 30
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
$(VENV)/lint.stamp: EXTRAS := test,lint,docs

$(VENV)/%.stamp: pyproject.toml constraints.txt allstep/__init__.py | $(BIN)/pip
	@echo "Installing allstep[$(EXTRAS)] in $(VENV); the first time it takes a few minutes."
	@$(LOCK) $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# pip is the last thing that venv makes.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "allstep needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "This Python can't make a .venv: apt-get install python3-venv"; exit 1; }
	@$(LOCK) sh -c 'test -x $@ || "$(PYTHON)" -m venv $(VENV)'
