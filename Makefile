.DEFAULT_GOAL := help
SHELL := /bin/bash
MAKEFLAGS += --no-builtin-rules

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3 python,\
	$(shell command -v $(name) >/dev/null && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $(name))))
PIP_FLAGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
COOKBOOK := .venv-cookbook
VLLM := .venv-vllm
SDKS := 0.6.3 0.18.2 0.24.1 0.30.4 0.38.0
MYPY := $(BIN)/mypy -p openrl
JOBS ?= 2
# A file's tests share services, so a file stays together; the long files are in the middle, so that no process waits long.
PYTEST := $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help install demo bench simulate mixed-curves duty-cycle chaos test test-full test-wheel test-cookbook test-vllm test-sdks openapi compatibility manifests lint format proto clean

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo "Variables: PYTHON (now: $(or $(PYTHON),none found)), PIP_FLAGS, ARGS (for test, demo and chaos),"
	@echo "  JOBS (processes that test: $(JOBS); 0 for one that can be debugged)"

install: $(STAMP) ## Make .venv with all that the demo and the tests need

$(STAMP): setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found: install one, or make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) can't make virtual environments: on Debian, install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

demo: install ## Fine-tune a small real model twice, through the service, and check that it learned
	$(BIN)/python examples/demo.py $(ARGS)

chaos: install ## Kill everything while four runs train, and compare with undisturbed ones: about five minutes
	$(BIN)/python -m tests.chaos $(ARGS)

test: install ## Run the tests
	$(PYTEST) $(ARGS)

test-full: install ## Run the longer forms of the tests: more examples, every method of the SDK
	$(PYTEST) -m "full and not cookbook and not sdks and not vllm" $(ARGS)

test-wheel: install ## Build the wheel, install it elsewhere, import every module
	$(BIN)/python -m pytest tests/test_wheel.py $(ARGS)

test-cookbook: install $(COOKBOOK)/.installed ## Run recipes of the tinker-cookbook, unmodified, against the service
	$(BIN)/python -m pytest tests/cookbook -m cookbook $(ARGS)

# tml-renderers, which the cookbook names, isn't on the index in the version that it wants; it is for models not used here.
$(COOKBOOK)/.installed: tests/cookbook/requirements.txt
	test -x $(COOKBOOK)/bin/python || $(PYTHON) -m venv $(COOKBOOK)
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --upgrade pip
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r $<
	$(COOKBOOK)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps tinker-cookbook==0.6.1
	@touch $@

test-vllm: install $(VLLM)/.installed ## Run vLLM: the suite that every engine runs, and a service that samples on it
	$(VLLM)/bin/python -m pytest tests/contract -m vllm -W default $(ARGS)
	$(BIN)/python -m pytest tests/stack/test_vllm.py -m vllm $(ARGS)

# vLLM's CPU build wants audio and video libraries that it can't load, and that nothing here needs.
$(VLLM)/.installed: tests/contract/requirements.txt | $(STAMP)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r $<
	$(VLLM)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchaudio torchcodec torchvision
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-build-isolation --no-deps --editable .
	@touch $@

test-sdks: install $(SDKS:%=.venv-sdk-%/.installed) ## Run one session under each SDK that is supported, against the service
	$(BIN)/python -m pytest tests/sdks -m sdks $(ARGS)

# Nothing but the custom losses needs torch: the main environment's is found behind all that is installed here.
.venv-sdk-%/.installed: tests/sdks/requirements-%.txt tests/sdks/requirements-common.txt | $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps -r $<
	$(BIN)/python -c '$(PURELIB)' > "$$($(@D)/bin/python -c '$(PURELIB)')/torch-of-the-main-environment.pth"
	@touch $@

bench: install ## Measure what the service costs over a plain loop: one JSON line a figure, some minutes
	$(BIN)/python benchmarks/bench.py $(ARGS)
	@test ! -e $(VLLM)/.installed || $(BIN)/python benchmarks/bench.py --vllm $(CURDIR)/$(VLLM)/bin/python $(ARGS)

simulate: install ## Time the scheduler's decisions, and what they make of the shipped traces: one JSON line a figure
	$(BIN)/python benchmarks/simulate.py $(ARGS)

mixed-curves: install ## Train eight runs at once and each alone, and compare their curves: a few minutes
	$(BIN)/python experiments/mixed_curves.py $(ARGS)

duty-cycle: install ## Let three jobs share two accelerators, and compare with six dedicated ones: some ten minutes
	$(BIN)/python experiments/duty_cycle.py $(ARGS)

lint: install ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(MYPY)

format: install ## Put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

openapi: install ## Keep the OpenAPI document after an addition; refuses where /api/v1 would break
	$(BIN)/python -m tests.app.contract

compatibility: install ## Probe every method of the SDK against a service, and write docs/compatibility.md
	$(BIN)/python -m tests.stack.compatibility

manifests: install ## Render the Kustomize base, k8s/openrl.yaml and the chart's table from the chart
	$(BIN)/python k8s/manifests.py

proto: install ## Compile our .proto files
	$(BIN)/python -m grpc_tools.protoc --proto_path=.typing --python_out=.typing --pyi_out=.typing \
		openrl/tasks/wire/openrl.proto openrl/workers/model/snapshot_agent.proto

clean: ## Remove what was built or demonstrated; the virtual environments stay
	rm -rf .demo build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
