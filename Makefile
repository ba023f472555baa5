# make test   installs into .venv when that is missing, then checks style, types and behavior
# make demo   the study on a small data set, with its report (comes with the study)

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test check bench clean

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

bench: $(VENV)/installed
	$(BIN)/python benchmarks/operator.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
