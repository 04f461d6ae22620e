# `make demo` trains a small model, `make test-fast` runs the tests without engines, `make test` runs all but slow tests,
# `make nightly` runs the slow ones, `make lint` checks style, imports and types, `make docs` builds the documentation into
# build/docs, `make durations` keeps what the last run of tests took. Each sets up .venv first (the demo without the tools
# of the others) and needs only Python 3.11 or 3.12 and pip.
.PHONY: demo docs durations lint nightly test test-fast venv

# Two processes, which get pieces of about 30 s (tests/support/durations.py).
PYTEST_ARGS ?= -n 2

demo:
	@bash .ci/setup demo
	.venv/bin/rlctl train grpo --preset laptop

test: venv
	.venv/bin/python -m pytest $(PYTEST_ARGS)

test-fast: venv
	.venv/bin/python -m pytest $(PYTEST_ARGS) -m "not (slow or long or gpu)" \
		$(addprefix tests/,config planner methods data models weights)

nightly: venv
	.venv/bin/python -m pytest $(PYTEST_ARGS) -m "slow and not gpu"

durations:
	cp .pytest_cache/d/durations/durations.txt tests/durations.txt

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright --pythonpath .venv/bin/python

# Warnings, such as a link that leads nowhere, are errors. The variable turns off an advertisement.
docs: venv
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet

venv:
	@bash .ci/setup
