# `make demo` and `make test` do all the set-up: each Python version has its own virtual environment
# under .venv/. PYTHON=python3.12 chooses another Python.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
OLDEST := .venv/$(VERSION)-oldest-jax
SOURCES := $(shell find csrc python CMakeLists.txt -type f -not -name '*.pyc') pyproject.toml
INSTALL := install --quiet --disable-pip-version-check
# Tests run on every core; PYTEST_ARGS passes more.
PYTEST := -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

# How long `make fuzz` spends on each target.
SECONDS ?= 300

.PHONY: demo test test-cpp test-oldest test-asan bench fuzz fuzz-cpp fuzz-python fuzz-differential \
  lint format sanitize clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m shardrules demo

test: $(VENV)/installed test-cpp
	$(VENV)/bin/python $(PYTEST)

# The oldest JAX that is supported; Python 3.11 or 3.12.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python $(PYTEST)

test-cpp: cpp-test

# The C++ tests and the core's Python tests under AddressSanitizer with UndefinedBehaviorSanitizer;
# the C++ tests, for the DFA cache's sake, under ThreadSanitizer.
sanitize: test-asan cpp-tsan

build-%: $(VENV)/dependencies
	VIRTUAL_ENV=$(abspath $(VENV)) CMAKE_PREFIX_PATH="$$($(VENV)/bin/python -m pybind11 --cmakedir)" \
	  $(VENV)/bin/cmake --preset $* --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja)
	$(VENV)/bin/cmake --build build/$*

cpp-%: build-%
	$(VENV)/bin/ctest --test-dir build/$* --output-on-failure

# Left out: tests/test_patch.py and the like, which run other libraries or other processes. CPython itself
# leaks by LeakSanitizer's standards; tests/test_leaks.py looks for ours. The stack is for ASan's frames
# in the deepest trees, and libstdc++ is loaded early for its exceptions to be intercepted.
ASAN_TESTS := $(addprefix tests/test_,$(addsuffix .py,bad_input bounds correction coverage derive \
  failures files fuzzing leaks logical records rules semantics shardings signals trees))
ASAN_PACKAGES := build/asan/site
test-asan: cpp-asan
	rm -rf $(ASAN_PACKAGES) && mkdir $(ASAN_PACKAGES) && cp -R python/shardrules $(ASAN_PACKAGES)
	cp build/asan/_core.*.so $(ASAN_PACKAGES)/shardrules
	ulimit -s 65536 && PYTHONPATH=$(ASAN_PACKAGES) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  $(VENV)/bin/python $(PYTEST) $(ASAN_TESTS)

# Each target for SECONDS seconds; ARGS goes to libFuzzer, as ARGS=-jobs=8.
fuzz: fuzz-cpp fuzz-python

FUZZ_CPP := patterns dfa
fuzz-cpp:
	@command -v clang++ >/dev/null || { echo "make fuzz-cpp needs clang++ and its libFuzzer \
	(Debian: clang libclang-rt-dev; macOS: brew install llvm)" >&2; exit 1; }
	$(MAKE) build-fuzz
	@for name in $(FUZZ_CPP); do \
	  mkdir -p build/fuzz/corpus/$$name && \
	  build/fuzz/fuzz_$$name -max_total_time=$(SECONDS) -print_final_stats=1 -artifact_prefix=build/fuzz/ \
	    -rss_limit_mb=2048 -timeout=10 $(ARGS) build/fuzz/corpus/$$name csrc/fuzz/corpus/$$name || exit 1; \
	done

fuzz-python: $(VENV)/fuzzers $(VENV)/installed
	$(VENV)/bin/python -m tests.fuzzing --seconds $(SECONDS) $(ARGS)

# A million random cases against `re`; ARGS='--seed 7' repeats a run.
fuzz-differential: $(VENV)/installed
	$(VENV)/bin/python -m tests.differential $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m mypy.stubtest --allowlist .stubtest-allowlist shardrules._core

format: $(VENV)/dependencies
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/fuzzers: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --group fuzz
	touch $@

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

# cmake and ninja are the environment's own.
%/installed: %/dependencies $(SOURCES)
	PATH="$(abspath $*)/bin:$$PATH" $*/bin/python -m pip $(INSTALL) --no-build-isolation --no-deps .
	touch $@
