# `make demo` trains a small model, `make test` runs the tests, `make lint` checks style, imports and types. Each sets up
# .venv first and needs only Python 3.11 and pip.
.PHONY: demo test lint venv

# Two processes, each with whole folders of tests (tests/conftest.py).
PYTEST_ARGS ?= -n 2 --no-loadscope-reorder

demo: venv
	.venv/bin/rlctl train grpo --preset laptop

test: venv
	.venv/bin/python -m pytest $(PYTEST_ARGS)

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright --pythonpath .venv/bin/python

venv:
	@bash .ci/setup
