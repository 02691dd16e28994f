PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: install demo test test-slow test-oracle test-flower test-containers bench peers docs lint clean

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

# OpenDP, with which sensitivities and charges are compared, is large.
.venv/installed-oracle: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[oracle]'
	@touch $@

test-oracle: .venv/installed-oracle
	$(BIN)/python -m pytest -n 0 tests/privacy/test_opendp.py

# Skips with a reason where no container engine can be had.
test-containers: install
	@tests/containers/run.sh || [ $$? = 77 ]

bench: install
	$(BIN)/python -m benchmarks.bench

# Other simulators on the same work, in environments of their own; the machine should have nothing else to do.
peers: install
	$(BIN)/python -m benchmarks.peers

# A second environment with the oldest Flower on which experiments run in one process and in Flower's simulation. What
# both need is shared with the first.
.venv-139/installed: .venv/installed
	$(BIN)/python -m venv --without-pip .venv-139
	echo 'import site; site.addsitedir("$(CURDIR)/.venv/lib/'$$(ls .venv/lib)'/site-packages")' \
		> .venv-139/lib/$$(ls .venv-139/lib)/site-packages/shared.pth
	$(BIN)/python -m pip --python .venv-139/bin/python install --quiet --disable-pip-version-check --no-deps \
		--ignore-installed 'flwr==1.39.*' 'cryptography==46.*'
	@touch $@

# On the oldest Flower: the same model in one process, in workers and in Flower's simulation. Real processes run on the
# newest alone, with the slow tests.
test-flower: install .venv-139/installed
	.venv-139/bin/python -m pytest -n 0 tests/engine/test_engines.py tests/engine/test_workers.py \
		tests/strategies/test_interop.py tests/deploy/test_run_commands.py

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
	rm -rf .venv .venv-139 runs build *.egg-info
