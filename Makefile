# `make demo` trains a small model; `make test` runs the tests. Both set up .venv first and need only Python 3.11 and pip.
.PHONY: demo test lint venv

PYTEST_ARGS ?=

demo: venv
	.venv/bin/rlctl train grpo --preset laptop

test: venv
	.venv/bin/python -m pytest $(PYTEST_ARGS)

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports

venv:
	@bash .ci/setup
