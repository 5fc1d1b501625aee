# Every path is relative: the checkout may lie in a folder of any name.
PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?= --quick

BIN := .venv/bin
STAMP := .venv/.installed
# Not to be installed, which needs an NPU's drivers: a test reads its source.
NPU_WHEEL := torch-npu --constraint constraints.txt --dest .venv/wheels --no-deps \
	--only-binary :all: --implementation cp --python-version 3.11 --platform manylinux_2_28_x86_64
# MindSpore wants another NumPy than torch: it has an environment of its own, for the tests and
# examples that need it. It has no build for Python 3.13.
MINDSPORE := .venv-mindspore
MINDSPORE_STAMP := $(MINDSPORE)/.installed
SOURCES := rekindle tests $(wildcard examples benchmarks)

# A virtual environment holds absolute paths, so a checkout that was moved needs a new one.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(shell pwd -P))
.PHONY: $(STAMP)
endif
ifneq ($(shell cat $(MINDSPORE_STAMP) 2>/dev/null),$(shell pwd -P))
.PHONY: $(MINDSPORE_STAMP)
endif

.PHONY: help setup mindspore lint test soak demo bench clean

help:
	@echo 'make setup   virtual environment in .venv with all that is needed'
	@echo 'make mindspore  MindSpore, in .venv-mindspore'
	@echo 'make test    setup, then every check and test'
	@echo 'make lint    setup, then the checks alone'
	@echo 'make soak    setup, then the long fault tests'
	@echo 'make demo    setup, then a training run that survives three faults'
	@echo 'make bench   setup, then every benchmark in its short form'
	@echo 'make clean   remove what the above left here'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo 'Installing into .venv (a few minutes the first time)'
	@test -e $(STAMP) && test "$$(cat $(STAMP))" = "$$(pwd -P)" || "$(PYTHON)" -m venv --clear .venv
	@rm -f $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
		--editable '.[torch,dev]' --constraint constraints.txt
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-input $(NPU_WHEEL)
	@pwd -P > $(STAMP)

mindspore: $(MINDSPORE_STAMP)

$(MINDSPORE_STAMP): pyproject.toml constraints.txt constraints-mindspore.txt
	@echo 'Installing MindSpore into $(MINDSPORE) (2.8 GB)'
	@test -e $(MINDSPORE_STAMP) && test "$$(cat $(MINDSPORE_STAMP))" = "$$(pwd -P)" \
		|| "$(PYTHON)" -m venv --clear $(MINDSPORE)
	@rm -f $(MINDSPORE_STAMP)
	@grep -v '^numpy==' constraints.txt | cat constraints-mindspore.txt - > $(MINDSPORE)/pins.txt
	@if "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		$(MINDSPORE)/bin/python -m pip install -qq --disable-pip-version-check --no-input \
			--editable '.[mindspore,s3]' scikit-learn --constraint $(MINDSPORE)/pins.txt; \
	else echo 'There is no MindSpore for Python 3.13: its tests are left out'; fi
	@pwd -P > $(MINDSPORE_STAMP)

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

# The console script, not `python -m pytest`: that would put the root, and with it the links there,
# on the module path.
test: lint mindspore
	$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

soak: setup mindspore
	$(BIN)/pytest -m soak $(PYTEST_ARGS)

demo: setup
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

bench: setup mindspore
	@set -e; for script in benchmarks/[a-z]*.py; do \
		echo "$$script $(BENCH_ARGS)"; $(BIN)/python "$$script" $(BENCH_ARGS); \
	done

clean:
	rm -rf .venv $(MINDSPORE) build dist rekindle.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
