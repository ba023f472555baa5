# make test   installs into .venv when that is missing, then checks style, types and behavior
# make demo   the study on a small data set: trains, attacks, and writes a report page
# make bench  the cost of the operator, of a training step and of attacks on this machine

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test demo bench clean

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

demo: $(VENV)/installed
	$(BIN)/wassersmooth reproduce --preset digits

bench: $(VENV)/installed
	$(BIN)/wassersmooth bench
	$(BIN)/python benchmarks/operator.py
	$(BIN)/python benchmarks/attacks.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
