# Needs Python 3.11+ and make. Everything else is installed into .venv (export, tests) and .venv-runtime (no PyTorch).
PYTHON ?= python3
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES = pyproject.toml constraints.txt
PACKAGE = $(wildcard runtime/*.py cli/*.py exporter/*.py)
STUDENT = artifacts/checkpoints/student.pt
TEST_BUNDLE = $(CURDIR)/build/test-bundle

.PHONY: demo test check test-large docs clean

demo: .venv/export.stamp .venv-runtime/runtime.stamp  ## export the shipped checkpoint, prove it, write a story without PyTorch
	.venv/bin/infer export $(STUDENT) --force
	.venv/bin/infer parity $(STUDENT) artifacts/student
	.venv-runtime/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
	.venv-runtime/bin/infer generate artifacts/student "In the beginning" --max-new-tokens 120 --seed 7

test: .venv/dev.stamp .venv-runtime/test.stamp  ## all tests, one layer of them in an environment without torch and onnx
	.venv/bin/python tests/make_bundle.py $(TEST_BUNDLE)
	INFER_TEST_BUNDLE=$(TEST_BUNDLE) .venv-runtime/bin/python -m pytest
	INFER_TEST_BUNDLE=$(TEST_BUNDLE) INFER_TEST_LAYER=torch .venv/bin/python -m pytest

check: .venv/dev.stamp .venv-runtime/runtime.stamp  ## format, lint, types, tests: what defines done
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy --python-executable .venv-runtime/bin/python -p infer.runtime -p infer.cli
	.venv/bin/python -m pytest

test-large: .venv/dev.stamp  ## exports of base-size models: gigabytes of disk and memory
	.venv/bin/python -m pytest -m large

docs: .venv/dev.stamp  ## docs/cli.md from the help pages
	.venv/bin/python docs/make_cli_help.py

clean:
	rm -rf .venv .venv-runtime build onnx_infer.egg-info

.venv/python.stamp .venv-runtime/python.stamp:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(@D)
	touch $@

.venv/export.stamp: .venv/python.stamp $(SOURCES)
	.venv/bin/python $(PIP_INSTALL) --editable '.[export]'
	touch $@

.venv/dev.stamp: .venv/python.stamp $(SOURCES)
	.venv/bin/python $(PIP_INSTALL) --editable '.[dev]'
	touch $@

# Not editable: what a user gets, and what mypy can read.
.venv-runtime/runtime.stamp: .venv-runtime/python.stamp $(SOURCES) $(PACKAGE)
	rm -rf build/lib
	.venv-runtime/bin/python $(PIP_INSTALL) .
	touch $@

.venv-runtime/test.stamp: .venv-runtime/runtime.stamp
	.venv-runtime/bin/python $(PIP_INSTALL) pytest
	touch $@
