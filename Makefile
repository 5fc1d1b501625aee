# Every path is relative: the checkout may lie in a folder of any name.
PYTHON ?= python3
PYTEST_ARGS ?=
BASE ?= HEAD
DEMO_ARGS ?=
BENCH_ARGS ?= --quick

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := .venv/.installed
TOOLS_STAMP := .venv/.tools-installed
# A test reads the source of this wheel. It cannot be installed without an NPU's driver.
WHEELS := .venv/wheels
NPU_VERSION := $(shell sed -n 's/^torch-npu==//p' constraints.txt)
NPU_WHEEL := torch-npu --constraint constraints.txt --dest $(WHEELS) --no-deps \
	--only-binary :all: --implementation cp --python-version 3.11 --platform manylinux_2_28_x86_64
# MindSpore needs another NumPy than torch, so it has an environment of its own. Only tests,
# examples and benchmarks of MindSpore use it. MindSpore has no build for Python 3.13.
MINDSPORE := .venv-mindspore
MINDSPORE_STAMP := $(MINDSPORE)/.installed
SOURCES := rekindle tests docs $(wildcard examples benchmarks)
# Sphinx 9 has no version for Python 3.10.
DOCS := docs --builder html --doctree-dir build/doctrees --fresh-env --fail-on-warning --quiet
# Each file of tests runs on one worker, so its tests can share jobs and servers.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every process of a job would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# A virtual environment holds absolute paths, so a checkout that was moved needs a new one.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(shell pwd -P))
.PHONY: $(STAMP)
endif
ifneq ($(shell cat $(MINDSPORE_STAMP) 2>/dev/null),$(shell pwd -P))
.PHONY: $(MINDSPORE_STAMP)
endif

.PHONY: help setup tools mindspore lint docs reference test test-unit test-changed soak demo bench clean

help:
	@echo 'make setup         Rekindle in .venv, with all that the demo needs'
	@echo 'make tools         setup, then what checks and tests need'
	@echo 'make mindspore     MindSpore, in .venv-mindspore'
	@echo 'make test-unit     the tests without processes and servers, in under 3 minutes'
	@echo 'make test-changed  the tests that the changes since BASE can affect (BASE=HEAD)'
	@echo 'make test          every check and every test but the soak tests'
	@echo 'make lint          the checks alone'
	@echo 'make docs          the documentation site, in build/docs; a broken link is an error'
	@echo 'make reference     the tables of docs/reference that follow from the source'
	@echo 'make soak          the long fault tests'
	@echo 'make demo          a training run that survives three faults'
	@echo 'make bench         every benchmark in its short form'
	@echo 'make clean         remove what the above left here'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo 'Installing Rekindle into .venv (1 to 5 minutes the first time)'
	@test -e $(STAMP) && test "$$(cat $(STAMP))" = "$$(pwd -P)" || "$(PYTHON)" -m venv --clear .venv
	@rm -f $(STAMP)
	@$(PIP) install --editable '.[torch,prefect]' --constraint constraints.txt
	@pwd -P > $(STAMP)

tools: $(TOOLS_STAMP)

$(TOOLS_STAMP): $(STAMP)
	@echo 'Installing the tools for checks and tests into .venv'
	@$(PIP) install --editable '.[torch,prefect,dev,docs]' --constraint constraints.txt
	@ls $(WHEELS)/torch_npu-$(NPU_VERSION)-*.whl >/dev/null 2>&1 || \
		{ rm -f $(WHEELS)/torch_npu-*.whl && $(PIP) download $(NPU_WHEEL); }
	@touch $(TOOLS_STAMP)

mindspore: $(MINDSPORE_STAMP)

$(MINDSPORE_STAMP): pyproject.toml constraints.txt constraints-mindspore.txt
	@echo 'Installing MindSpore into $(MINDSPORE) (2.8 GB)'
	@test -e $(MINDSPORE_STAMP) && test "$$(cat $(MINDSPORE_STAMP))" = "$$(pwd -P)" \
		|| "$(PYTHON)" -m venv --clear $(MINDSPORE)
	@rm -f $(MINDSPORE_STAMP)
	@grep -v '^numpy==' constraints.txt | cat constraints-mindspore.txt - > $(MINDSPORE)/pins.txt
	@if "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		$(MINDSPORE)/bin/python -m pip --disable-pip-version-check --no-input install \
			--editable '.[mindspore,s3]' scikit-learn --constraint $(MINDSPORE)/pins.txt; \
	else echo 'There is no MindSpore for Python 3.13: its tests are left out'; fi
	@pwd -P > $(MINDSPORE_STAMP)

lint: tools
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

docs: tools
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		$(BIN)/python -m sphinx $(DOCS) build/docs && echo 'The site is in build/docs/index.html'; \
	else echo 'There is no Sphinx 9 for Python 3.10: the site is left out'; fi

reference: tools
	PYTHONPATH=tests/support:docs/tools $(BIN)/python -m reference_tables

# The console script, not `python -m pytest`: that would put the root, and with it the links there,
# on the module path.
test: lint docs mindspore
	$(PYTEST) --alone 5 $(PYTEST_ARGS)

test-unit: tools
	$(PYTEST) tests/unit -m 'not soak and not process' $(PYTEST_ARGS)

test-changed: tools
	$(PYTEST) --alone 5 --changed $(BASE) $(PYTEST_ARGS)

soak: tools mindspore
	$(BIN)/pytest -m soak $(PYTEST_ARGS)

demo: setup
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

bench: tools mindspore
	@set -e; for script in benchmarks/[a-z]*.py; do \
		echo "$$script $(BENCH_ARGS)"; $(BIN)/python "$$script" $(BENCH_ARGS); \
	done

clean:
	rm -rf .venv $(MINDSPORE) build dist rekindle.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
