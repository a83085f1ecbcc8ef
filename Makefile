# Everything a fresh machine needs is set up by the targets themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := $(if $(shell command -v flock),flock .setup.lock,)

.PHONY: train test lint docs clean

train: $(VENV)/recipes.stamp
	$(BIN)/allstep train digits --workers 2

test: $(VENV)/test.stamp
	scripts/install_test_packages
	$(BIN)/python -m pytest

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/lint.stamp
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .setup.lock

# A stamp says that an extra is installed as pyproject.toml and constraints.txt want it.
$(VENV)/lint.stamp: EXTRAS := test,lint,docs
$(VENV)/test.stamp: EXTRAS := test
$(VENV)/recipes.stamp: EXTRAS := recipes

$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(LOCK) $(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' || \
		{ echo 'allstep needs Python 3.11 or newer: apt-get install python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
		{ echo 'Python lacks ensurepip: apt-get install python3-venv'; exit 1; }
	$(LOCK) $(PYTHON) -m venv $(VENV)
