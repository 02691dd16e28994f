PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: install demo test test-slow test-flower test-containers bench peers docs lint clean

# Compiled code is kept in one folder, also where the environment says to keep none: collecting the tests takes
# less than half the time, and processes that tests start compile nothing.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode

# The environment is built once, and again when what it is built from changes.
.venv/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $$(command -v $(PYTHON) || command -v python3) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: .venv/installed

demo: install
	@rm -rf runs/quickstart
	$(BIN)/perennial run experiments/quickstart.yaml

test: install
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# Skips with a reason where no container engine can be had.
test-containers: install
	@tests/containers/run.sh || [ $$? = 77 ]

bench: install
	$(BIN)/python -m benchmarks.bench

# Other simulators on the same work, in environments of their own; the machine should have nothing else to do.
peers: install
	$(BIN)/python -m benchmarks.peers

# A second environment, with the newest Flower that is supported.
.venv-142/installed: pyproject.toml constraints.txt
	@test -x .venv-142/bin/python || $$(command -v $(PYTHON) || command -v python3) -m venv .venv-142
	grep -vE '^(flwr|cryptography|grpcio)' constraints.txt > .venv-142/constraints.txt
	.venv-142/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-142/constraints.txt \
		'flwr==1.42.*' -e '.[dev]'
	@touch $@

# Real processes on both versions of Flower: the same model as in process, and what outsiders reach.
test-flower: install .venv-142/installed
	for bin in $(BIN) .venv-142/bin; do \
		$$bin/python -m pytest -n 0 tests/deploy/test_deployment.py tests/deploy/test_warm.py \
			tests/redteam/test_gateway.py || exit 1; done

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The documentation site, in build/site; a link that leads nowhere is an error.
docs: .venv/installed-docs
	$(BIN)/python docs/build_site.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .venv-142 runs build *.egg-info
