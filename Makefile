# Thin calls into the command line; each target does all the set-up it needs.
# HIRAISHIN_HOME: where sources, builds, models and results go (default: .hiraishin here). PYTHON, VENV: see README.
# JOBS: test files at a time. PYTEST: more of pytest's options.

PROFILE ?= default
PYTEST ?=
JOBS ?= 3

export PYTHONPATH := $(CURDIR)
export PYTHONUTF8 := 1
SHELL := /bin/sh

# The environment's Python, after making or updating the environment if need be.
python = "$$(./tools/python -P -m hiraishin.native.environment)"
with_python = python=$(python) && [ -n "$$python" ] &&

.PHONY: help report figures test test-fast test-hard exhaustive lab setup build doctor lint lock clean distclean

help:
	@echo "make report      everything: set-up, builds, measurements, notebooks, report/html/index.html"
	@echo "make figures     the finished report's figures into figures/, for publishing"
	@echo "make test        set-up, builds, and every test but the longest"
	@echo "make test-fast   only the tests that need no native build and no model"
	@echo "make test-hard   interruptions, hostile files, odd machines, planted faults (up to 30 minutes)"
	@echo "make exhaustive  the long sweeps (hours); resumes where it stopped"
	@echo "make lab         JupyterLab on the notebooks"
	@echo "make setup       the virtual environment only"
	@echo "make build       the native builds only"
	@echo "make doctor      what is missing on this machine, and the command that mends it"
	@echo "make lint        ruff and mypy"
	@echo "make lock        requirements.lock from pyproject.toml (needs uv)"
	@echo "make clean       removes the report and caches; distclean: also the environment, builds, models, results"

setup:
	@$(with_python) echo "$$python"

build:
	@$(with_python) "$$python" -m hiraishin.native all

report:
	@$(with_python) "$$python" -m hiraishin report --profile "$(PROFILE)"

figures:
	@$(with_python) "$$python" -m hiraishin.report.publish

test:
	@$(with_python) "$$python" -m hiraishin.native all && "$$python" -m hiraishin model && \
		"$$python" -m pytest -m "not hard and not witness" -n $(JOBS) --dist loadfile $(PYTEST)

test-fast:
	@$(with_python) "$$python" -m pytest -m "not slow and not real_model and not hard" $(PYTEST)

test-hard:
	@$(with_python) "$$python" -m hiraishin.native all && "$$python" -m hiraishin.native witness && \
		"$$python" -m hiraishin model && "$$python" -m pytest -m "hard or witness" $(PYTEST)

exhaustive:
	@$(with_python) "$$python" -m hiraishin.native all && "$$python" -m hiraishin run exhaustive

lab:
	@$(with_python) "$$python" -m hiraishin.native all && "$$python" -m jupyterlab notebooks

doctor:
	@$(with_python) "$$python" -m hiraishin doctor

lint:
	@$(with_python) "$$python" -m ruff check . && "$$python" -m ruff format --check . && "$$python" -m mypy

# Index addresses stay out: whoever installs uses the index their own machine is set up for.
lock:
	@uv pip compile pyproject.toml --extra build --extra dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-package llama-cpp-python --no-header --no-annotate --quiet \
		--output-file requirements.lock.new
	@{ sed -n '/^#/p' requirements.lock; cat requirements.lock.new; } > requirements.lock.newer
	@mv requirements.lock.newer requirements.lock && rm requirements.lock.new

clean:
	rm -rf report/html .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .hiraishin
