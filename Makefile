# make up      set everything up, start two real vLLM instances and the proxy, stay up until Ctrl-C
# make test    set everything up and run every check and test
# make clean   remove what the other targets made in this folder
#
# MODEL=PATH_OR_NAME make up     serves that model instead of a tiny one made here

SHELL := /bin/bash
PYTHON ?= python3
CACHE := .cache
BIN := .venv/bin
VLLM := .venv-vllm
TINY := $(CACHE)/tiny-llama
TINY_OPTIONS := --instances 2 --kv-cache 512M --overhead 2G

.PHONY: up test lint setup setup-vllm clean

setup: .venv/.installed
setup-vllm: $(VLLM)/.ready

.venv/.installed: pyproject.toml scripts/debian_packages.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zenlaunch needs Python 3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || scripts/debian_packages.sh python3-venv
	@scripts/debian_packages.sh numactl libtcmalloc-minimal4 g++ python3-dev || echo "going on without them" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip --disable-pip-version-check install -q -e '.[dev]'
	@touch $@

$(VLLM)/.ready: .venv/.installed scripts/install_vllm.sh scripts/tiny_model.py
	@PYTHON=$(PYTHON) scripts/install_vllm.sh $(VLLM)
	@mkdir -p $(CACHE)
	@$(VLLM)/bin/python scripts/tiny_model.py $(TINY) >/dev/null 2>&1
	@touch $@

up: setup-vllm
ifdef MODEL
	@$(BIN)/zenlaunch up '$(MODEL)' --python $(VLLM)/bin/python --ask 'Say hello.' $(UP_FLAGS)
else
	@$(BIN)/zenlaunch up $(TINY) --python $(VLLM)/bin/python --ask 'Say hello.' \
	  $(TINY_OPTIONS) $(UP_FLAGS) -- --max-model-len 1024 --served-model-name tiny-llama
endif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	@scripts/debian_packages.sh shellcheck || echo "going on without it" >&2
	@$(MAKE) --no-print-directory setup-vllm || echo "the tests with a real vLLM will be skipped" >&2
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .venv-vllm .cache .coverage .mypy_cache .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
