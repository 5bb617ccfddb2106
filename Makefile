# `make demo` and `make test` work in a fresh clone: they build their own environment in .venv first.

PYTHON ?= python3
TRANSFORMERS ?= 5.24.0
TORCH ?= 2.13.0
THREADS ?= 1
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed.stamp
INTERPRETER := $(VENV)/interpreter.stamp
SITE := $(VENV)/site.stamp
CLUSTER := .venv-cluster
# Bytecode is made of what is imported: of all packages it takes longer than to unpack them.
PIP := -m pip install -qq --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-all test-matrix sanitize sweep snapshot check format bench docs wheel wheel-check soak soak-devices fuzz-server faults-server soak-server test-cluster clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

install: $(INSTALLED) ## Build the environment in .venv.

# The stamp is written last, so an interrupted installation is begun again. Torch and transformers go first and are
# pinned: the extras then settle around versions that every test has passed with. The package itself allows a range;
# `make clean`, then `make test TRANSFORMERS=5.2.0` tests another one of it.
$(INSTALLED): pyproject.toml hatch_build.py $(wildcard src/penstock/kernels/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	@echo 'Building the environment in $(VENV); the first time this takes a few minutes.'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PY) $(PIP) torch==$(TORCH)
	@$(PY) $(PIP) transformers==$(TRANSFORMERS)
	@$(PY) $(PIP) --editable '.[bench,dev]'
	@touch $@

# For the tests alone: the kernels for GPUs are tested in Triton's interpreter. The package is there; built anew it would be compiled
# once more.
$(INTERPRETER): $(INSTALLED)
	@$(PY) $(PIP) 'penstock[interpreter]'
	@touch $@

demo: $(INSTALLED) ## Ask a question about a 16K-token document at 1/34 of the full KV cache.
	@PYTHONDONTWRITEBYTECODE= $(VENV)/bin/penstock demo

# WORKERS processes with THREADS threads each; files stay whole, so that a module's fixtures are made once. Bytecode is kept, whatever
# the shell says: tests start many processes, and each would compile the package anew. In a fresh clone each worker would rewrite all
# assertions, ten seconds long: they stay plain, and what fails is run again to say more. Threads that wait leave their core to others.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=passive $(PY) -m pytest -q
TESTS := $(TEST) -n $(WORKERS) --dist loadfile --assert=plain
MORE := { [ $$? -ne 1 ] || $(TEST) -q --last-failed; exit 1; }
test: $(INTERPRETER) ## Lint, then run the tests, all but the slow ones.
	$(PY) -m ruff check --quiet .
	$(TESTS) -m 'not gpu and not slow' || $(MORE)

test-all: $(INTERPRETER) ## Lint, then run all tests: before a release, and behind larger changes.
	$(PY) -m ruff check --quiet .
	$(TESTS) || $(MORE)

# Ray is installed beside the environment, not into it: `make test` runs without Ray, and this sees the packages of both.
$(CLUSTER)/installed.stamp: $(INSTALLED)
	@$(PY) -m venv --clear $(CLUSTER)
	@$(PY) -c 'import sysconfig as at; print("import site; site.addsitedir(%r)" % at.get_path("purelib"))' \
		> $$($(CLUSTER)/bin/python -c 'import sysconfig as at; print(at.get_path("purelib"))')/main.pth
	@$(CLUSTER)/bin/python $(PIP) 'penstock[cluster]'
	@touch $@

# Both files wait for processes most of the time, so that two clusters run beside each other. Ray looks twice a second, not every three,
# whether a host is there.
RAY := RAY_raylet_start_wait_time_s=300 RAY_health_check_initial_delay_ms=500 RAY_health_check_period_ms=500
test-cluster: $(CLUSTER)/installed.stamp ## Run the tests that need Ray.
	$(RAY) $(subst $(PY),$(CLUSTER)/bin/python,$(TEST)) -n 2 --dist loadfile tests/cluster/live.py tests/cluster/live_devices.py

# MATRIX='--only plain,both-avx2 --workers 8' chooses lines and processes; what this machine has passed with the same code
# is not run again. MATRIX='--add FILE.json' takes over what another machine has passed.
test-matrix: $(INSTALLED) ## Run the tests as other machines do; writes docs/test-matrix.md.
	$(PY) tests/matrix.py $(MATRIX)

sanitize: $(INSTALLED) ## Run what calls the compiled kernels under ASan and UBSan.
	$(PY) tests/sanitize.py

sweep: $(INSTALLED) ## Run every policy over every model family; the tables are docs/families.md and docs/vision-families.md.
	OMP_NUM_THREADS=1 $(PY) -m penstock.testing.family_sweep --json docs/families.json --table docs/families.md
	OMP_NUM_THREADS=1 $(PY) -m penstock.testing.vision_sweep --json docs/vision-families.json --table docs/vision-families.md

# SNAPSHOT='write FILE' before a change, SNAPSHOT='compare FILE' behind it; '--device cuda' where there is one.
SNAPSHOT ?= --help
snapshot: $(INSTALLED) ## What every policy selects, reads and answers: SNAPSHOT='write FILE' or 'compare FILE'.
	OMP_NUM_THREADS=1 $(PY) tests/snapshot.py $(SNAPSHOT)

check: $(INSTALLED) ## Formatting, lint and types.
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(INSTALLED) ## Format and fix what ruff can.
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(INSTALLED) ## A quick throughput table on this machine.
	$(PY) -m penstock.evaluate.throughput --quick

# Their own extra: neither the demo nor a test needs it.
$(SITE): $(INSTALLED)
	@$(PY) $(PIP) 'penstock[docs]'
	@touch $@

docs: $(SITE) ## Build the site of docs/ into build/site; a broken link fails it.
	$(PY) docs/tools/commands.py --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# The wheel is built from the sdist, so that both are whole.
wheel: $(INSTALLED) ## Build sdist and wheel into dist/.
	rm -rf dist
	$(PY) -m build --outdir dist .

wheel-check: wheel ## Install the wheel into an empty environment and run the demo there, in an empty folder.
	$(PY) tests/wheel_check.py dist/penstock-*.whl --torch $(TORCH)

MINUTES ?= 120
soak: $(INSTALLED) ## Random operations, interrupts and faults for MINUTES (120); memory must stay flat.
	$(PY) -m tests.soak --minutes $(MINUTES) --out benchmarks/results/soak.json

TRIALS ?= 200
soak-devices: $(INSTALLED) ## Hosts of near-storage devices that fail in TRIALS (200) answers, and 5,000 damaged frames.
	$(PY) -m tests.soak_devices --trials $(TRIALS) --output benchmarks/results/near_storage_faults.json

REQUESTS ?= 10000
fuzz-server: $(INSTALLED) ## Ask a server REQUESTS (10000) malformed and odd requests.
	$(PY) -m pip install --quiet 'schemathesis>=4'
	$(PY) -m tests.server.fuzz --requests $(REQUESTS) --resume --output benchmarks/results/server-fuzz.json

TIMES ?= 500
faults-server: $(INSTALLED) ## Kill a server TIMES (500), fill its disk, damage what it stored: what it promised is there.
	$(PY) -m tests.server.faults --times $(TIMES) --resume --output benchmarks/results/server-faults.json

soak-server: $(INSTALLED) ## Talk to one server for MINUTES (120); what it holds must stay flat.
	$(PY) -m tests.server.soak --minutes $(MINUTES) --output benchmarks/results/server-soak.json

clean: ## Remove the environment and the tools' caches.
	rm -rf $(VENV) $(CLUSTER) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
