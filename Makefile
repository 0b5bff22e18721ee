# `make demo` and `make test` do all the set-up: each Python version has its own virtual environment
# under .venv/. PYTHON=python3.12 chooses another Python.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
OLDEST := .venv/$(VERSION)-oldest-jax
DOCS := .venv/$(VERSION)-docs
SOURCES := $(shell find csrc python CMakeLists.txt -type f -not -name '*.pyc') pyproject.toml
INSTALL := install --quiet --disable-pip-version-check
# Tests run on every core; PYTEST_ARGS passes more.
PYTEST := -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

.PHONY: demo test test-cpp test-oldest bench docs fuzz-differential lint format sanitize clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m shardrules demo

test: $(VENV)/installed test-cpp
	$(VENV)/bin/python $(PYTEST)

# The oldest JAX that is supported; Python 3.11 or 3.12.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python $(PYTEST)

test-cpp: cpp-test

# AddressSanitizer with UndefinedBehaviorSanitizer, then ThreadSanitizer.
sanitize: cpp-sanitize cpp-sanitize-threads

cpp-%: $(VENV)/dependencies
	$(VENV)/bin/cmake --preset $* --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja)
	$(VENV)/bin/cmake --build build/$*
	$(VENV)/bin/ctest --test-dir build/$* --output-on-failure

# A million random cases against `re`; ARGS='--seed 7' repeats a run.
fuzz-differential: $(VENV)/installed
	$(VENV)/bin/python -m tests.differential $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks

# The site, into build/site, from sources alone; warnings are errors.
docs: $(DOCS)/dependencies
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m mypy.stubtest --allowlist .stubtest-allowlist shardrules._core

format: $(VENV)/dependencies
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv build

$(VENV)/dependencies: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(VENV)/bin/python -m pip $(INSTALL) --group dev
	touch $@

$(OLDEST)/dependencies: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(OLDEST)/bin/python -m pip $(INSTALL) --group oldest
	touch $@

$(DOCS)/dependencies: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(DOCS)/bin/python -m pip $(INSTALL) --group docs
	touch $@

# cmake and ninja are the environment's own.
%/installed: %/dependencies $(SOURCES)
	PATH="$(abspath $*)/bin:$$PATH" $*/bin/python -m pip $(INSTALL) --no-build-isolation --no-deps .
	touch $@
