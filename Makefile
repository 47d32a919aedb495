# `make help` lists the targets. All of them set up the environment first; when nothing changed that is instant.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := cli,plots,bpe,tensorboard,examples,test,check
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export MPLBACKEND = Agg
export PYTHONDONTWRITEBYTECODE =# the tests start some hundred Pythons: none should compile the package again

.DEFAULT_GOAL := help
.PHONY: help setup setup-all demo test test-all test-web check dist docs format bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.ready  ## create .venv with pinned versions (idempotent)

# Pinned exactly, so that two machines run the same code. Without an NVIDIA GPU the CPU build of
# torch is tried first: the default build brings several GB of CUDA libraries with it.
$(VENV)/.ready: pyproject.toml constraints.txt tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh $(VENV) $(EXTRAS)
	@touch $@

$(VENV)/.ready-all: $(VENV)/.ready
	@PYTHON=$(PYTHON) bash tools/setup.sh $(VENV) $(EXTRAS),docs,integrations,corpus
	@touch $@

$(VENV)/.ready-web: $(VENV)/.ready
	@PYTHON=$(PYTHON) bash tools/setup.sh $(VENV) $(EXTRAS),web
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@PYTHON=$(PYTHON) bash tools/setup.sh $(VENV) $(EXTRAS),docs
	@touch $@

setup-all: $(VENV)/.ready-all  ## the same with every extra (transformers, the documentation's)

demo: setup  ## the main job: does the learning rate transfer? Writes runs/demo (resumes if interrupted)
	@$(BIN)/surefoot transfer --seeds 3 --steps 86 --out runs/demo

test: setup  ## the test suite (no network, no GPU), without the house, which `make check` holds
	@$(BIN)/python -m pytest -q -n 2 --ignore=tests/unit/house

test-all: setup-all  ## the same with the slow tests and those that need extras
	@$(BIN)/python -m pytest -q -n 2 -m '(slow or integration or not slow) and not web'

test-web: $(VENV)/.ready-web  ## the pages of `surefoot report` in the system's Chromium
	@$(BIN)/python -m pytest -q -p no:xdist -m web tests/web

check: setup  ## format, lint, docstrings, types, and the house: its limits, its imports, its pages
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/pydoclint --quiet src && $(BIN)/mypy
	@$(BIN)/python tools/public_types.py
	@$(BIN)/python -m pytest -q -p no:xdist tests/unit/house

dist: setup  ## wheel and sdist in dist/, as a release uploads them: built, read as PyPI does, installed and tried
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[release]" && rm -rf dist
	@$(BIN)/python -m build --quiet && $(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python -m pytest -q -p no:xdist -m 'slow or not slow' tests/packaging

docs: $(VENV)/.ready-docs  ## the documentation as a site that needs no server, in site/; every warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "site/index.html"

format: setup  ## rewrite the sources in the house format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: setup  ## whole-step time and memory beside torch's AdamW and Muon
	@$(BIN)/python benchmarks/step.py

clean:  ## remove the environment and the caches (never runs/)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
