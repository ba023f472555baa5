# make test      checks style, types and behavior, without the slow tests
# make test-all  the same with the slow tests; what .ci/run calls
# make demo      the study on a small data set: trains, attacks, and writes a report page
# make docs      builds the site into site/, strictly: a broken link is an error; open site/index.html
# make bench     the cost of the operator, of a training step and of attacks on this machine
# make fuzz      looks for faults: random calls, damaged files, killed commands; CALLS= DAMAGES= KILLS= SEED= choose (CONTRIBUTING.md)
# make release-check  builds the sdist and the wheel and tries each in a clean environment; minutes (RELEASING.md)
# make clean     removes .venv and what the tools left behind
# make help      shows these lines
#
# All of them install into .venv first. PYTHON=... chooses the interpreter, and makes .venv again if that has another version.

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3 python3.13 python3.12 python3.11 python
IS_SUITABLE := -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null

ifdef PYTHON
  ifneq ($(shell $(PYTHON) --version 2>/dev/null),$(shell $(BIN)/python --version 2>/dev/null))
    .PHONY: $(BIN)/python
  endif
else
  PYTHON = $(shell for python in $(CANDIDATES); do $$python $(IS_SUITABLE) && echo $$python && break; done)
endif

.PHONY: test test-all demo docs bench fuzz release-check clean help

test: SELECTION := -m "not slow"
test test-all: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal $(SELECTION)

demo: $(VENV)/installed
	$(BIN)/wassersmooth reproduce --preset digits

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/wassersmooth bench
	$(BIN)/python -m experiments.speed operator
	$(BIN)/python -m experiments.speed attacks

fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz $(foreach name,CALLS DAMAGES KILLS SEED FIRST,$(if $($(name)),--$(name)=$($(name))))

release-check: $(VENV)/installed
	$(BIN)/python tools/release_check.py

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) $(IS_SUITABLE) || { echo "Python 3.11 or newer with venv and ensurepip is needed;" \
	    "tried: $(or $(PYTHON),$(CANDIDATES)); install one, or name one with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
