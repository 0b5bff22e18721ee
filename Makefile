# `make demo` and `make test` do all the set-up: each Python version has its own virtual environment
# under .venv/. PYTHON=python3.12 chooses another Python. Whole paths are in quotes, as a folder above may
# have a space in its name; make's own functions would split it there.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
OLDEST := .venv/$(VERSION)-oldest-jax
DOCS := .venv/$(VERSION)-docs
DIST := .venv/$(VERSION)-dist
TPU := .venv/$(VERSION)-tpu
CUDA := .venv/$(VERSION)-cuda
# A new environment each time, with nothing but a wheel and what it depends on.
CLEAN := .venv/$(VERSION)-clean
WHEEL := "$(CURDIR)"/dist/shardrules-*-cp$(subst py,,$(subst .,,$(VERSION)))-*.whl
SOURCES := $(shell find csrc python CMakeLists.txt -type f -not -name '*.pyc') pyproject.toml
INSTALL := install --quiet --disable-pip-version-check
# Python in the clean environment, in a directory without this package, and no compiler to be found.
IN_CLEAN = cd $(CLEAN) && PATH="$(CURDIR)/$(CLEAN)/bin" CC=false CXX=false "$(CURDIR)/$(CLEAN)/bin/python"
# Tests run on every core; PYTEST_ARGS passes more.
PYTEST = -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

# How long `make fuzz` spends on each target.
SECONDS ?= 300

.PHONY: demo test environments test-all test-newest test-tpu test-tpu-pages test-cuda test-cpp test-oldest test-asan bench docs fuzz fuzz-cpp fuzz-python \
	fuzz-differential lint format sanitize clean dist test-dist api

demo: $(VENV)/installed
	$(VENV)/bin/python examples/demo.py
	JAX_PLATFORMS=cpu $(VENV)/bin/python examples/prove_405b.py

test: $(VENV)/installed test-cpp
	$(VENV)/bin/python $(PYTEST)

# And what is marked slow, with ten times as many examples of each property, and a server of S3.
test-all: PYTEST_ARGS += -m "" --hypothesis-profile=many
test-all: $(VENV)/stores test

$(VENV)/stores: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --group stores
	touch $@

# What `make test-all`, `make test-tpu` and `make test-dist` install before they begin.
environments: $(VENV)/installed $(VENV)/stores $(TPU)/installed $(DIST)/dependencies

# The TPU's compiler, in the version that this JAX wants, in a directory of its own: with it in the
# environment, JAX would look for a TPU in each process.
test-tpu: $(VENV)/installed $(TPU)/installed
	PYTHONPATH="$(CURDIR)/$(TPU)" JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) -m "" tests/tpu tests/cli/test_project.py "tests/docs/test_docs.py::test_page[docs/pod.md]"

# The proofs of the other pages, which take some minutes.
PROVED_PAGES = quickstart $(addprefix guides/,eformer equinox keras linen lora maxtext moe nnx offload prove rl)
test-tpu-pages: $(VENV)/installed $(TPU)/installed
	PYTHONPATH="$(CURDIR)/$(TPU)" JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) -m "" $(PROVED_PAGES:%="tests/docs/test_docs.py::test_page[docs/%.md]")

$(TPU)/installed: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --no-deps --upgrade --target $(TPU) "$$($(VENV)/bin/python -c \
	  'import importlib.metadata as m; print(next(r for r in m.requires("jax") if r[:6] == "libtpu").split(";")[0])')"
	touch $@

# The compiler for CUDA, in the version that this JAX wants, in the same way: 0.5 GB, so not in CI.
test-cuda: $(VENV)/installed $(CUDA)/installed
	PYTHONPATH="$(CURDIR)/$(CUDA)" JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) -m "" tests/cuda

$(CUDA)/installed: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --no-deps --upgrade --target $(CUDA) $$($(VENV)/bin/python -c \
	  'import importlib.metadata as m; name = "jax-cuda12-plugin"; \
	  pin = next(r for r in m.requires("jax") if r.startswith(name) and "local" in r).split(";")[0][len(name):]; \
	  print(name + pin, "jax-cuda12-pjrt" + pin)')
	touch $@

# The newest Python, for which nothing but a python3.14 is needed.
test-newest:
	$(MAKE) test PYTHON=python3.14

# The oldest JAX that is supported; Python 3.11 or 3.12.
# Of the rooms that stand on the layer and need no compiled program, and how a compiler is asked; the others
# are not tried there yet.
OLDEST_TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,checkpoint compat files place plan rules trees \
  program/test_compiler.py)
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python $(PYTEST) $(OLDEST_TESTS)

test-cpp: cpp-test

# The C++ tests and the core's Python tests under AddressSanitizer with UndefinedBehaviorSanitizer;
# the C++ tests, for the DFA cache's sake, under ThreadSanitizer.
sanitize: test-asan cpp-tsan

configure-%: $(VENV)/dependencies
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" CMAKE_PREFIX_PATH="$$($(VENV)/bin/python -c \
	  'import pybind11; print(pybind11.get_cmake_dir())')" \
	  $(VENV)/bin/cmake --preset $* --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja"

build-%: configure-%
	$(VENV)/bin/cmake --build build/$*

cpp-%: build-%
	$(VENV)/bin/ctest --test-dir build/$* --output-on-failure

# Left out: tests of whole models, of other libraries, and of several processes, which take long. CPython
# itself leaks by LeakSanitizer's standards; tests/trees/test_leaks.py looks for ours. The stack is for ASan's frames
# in the deepest trees, and libstdc++ is loaded early for its exceptions to be intercepted.
ASAN_TESTS := tests/fuzzing tests/trees $(addprefix tests/,$(addsuffix .py,\
  files/test_files files/test_bad_files rules/test_bad_input rules/test_bounds rules/test_logical \
  rules/test_rules rules/test_semantics \
  plan/test_fold place/test_shardings test_correction))
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
	$(VENV)/bin/python -m tests.support.differential $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks

# The site, into build/site, from sources alone; warnings are errors.
docs: $(DOCS)/dependencies
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

CPP_FILES := $(shell find benchmarks csrc -name '*.?pp')
lint: $(VENV)/installed configure-lint
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests/typing
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m mypy.stubtest --allowlist .stubtest-allowlist shardrules._core
	$(VENV)/bin/python $(VENV)/bin/run-clang-tidy.py -quiet -hide-progress -p build/lint \
	  -clang-tidy-binary "$(CURDIR)/$(VENV)/bin/clang-tidy"

# The sdist, and this Python's wheel made from it, in dist/.
dist: dist/.built-$(VERSION)

dist/.built-$(VERSION): $(DIST)/dependencies $(SOURCES) README.md LICENSE NOTICE
	mkdir -p dist
	rm -f $(WHEEL)
	rm -rf build/dist-$(VERSION)
	$(DIST)/bin/python -m build --no-isolation --sdist --outdir build/dist-$(VERSION) . >/dev/null
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" $(DIST)/bin/python -m pip wheel --quiet \
	  --disable-pip-version-check --no-index --no-build-isolation --no-deps \
	  --wheel-dir build/dist-$(VERSION) build/dist-$(VERSION)/*.tar.gz
	mv build/dist-$(VERSION)/*.tar.gz dist/
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" $(DIST)/bin/auditwheel repair --wheel-dir dist \
	  build/dist-$(VERSION)/*.whl
	$(DIST)/bin/twine check --strict dist/*.tar.gz dist/*.whl
	touch $@

# Installs the wheel where there is no compiler, with the newest JAX or JAX=0.7.2, and tests it from
# elsewhere, without extras and then with them.
test-dist: dist
	$(DIST)/bin/auditwheel show $(WHEEL)
	$(DIST)/bin/python -m tests.packaging.wheel $(WHEEL)
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)
	$(IN_CLEAN) -m pip $(INSTALL) --only-binary :all: $(WHEEL) \
	  $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	$(IN_CLEAN) -I "$(CURDIR)/tests/packaging/smoke.py"
	$(IN_CLEAN) -m pip $(INSTALL) --only-binary :all: "$$(echo $(WHEEL))[yaml]"
	$(IN_CLEAN) -I "$(CURDIR)/tests/packaging/smoke.py"
	rm -rf $(CLEAN)

# What tests/packaging/test_api.py compares with, to be reviewed and committed.
api: $(VENV)/installed
	$(VENV)/bin/python -m tests.support.api >tests/data/api.txt.new
	mv tests/data/api.txt.new tests/data/api.txt

format: $(VENV)/dependencies
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

$(VENV)/fuzzers: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --group fuzz
	touch $@

clean:
	rm -rf .venv build dist

# Each environment and the dependency group that it has.
$(VENV)/dependencies: GROUP := dev
$(OLDEST)/dependencies: GROUP := oldest
$(DOCS)/dependencies: GROUP := docs
$(DIST)/dependencies: GROUP := dist
$(addsuffix /dependencies,$(VENV) $(OLDEST) $(DOCS) $(DIST)): pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip $(INSTALL) --group $(GROUP)
	touch $@

# cmake and ninja are the environment's own.
%/installed: %/dependencies $(SOURCES)
	PATH="$(CURDIR)/$*/bin:$$PATH" $*/bin/python -m pip $(INSTALL) --no-build-isolation --no-deps \
	  -C cmake.define.SHARDRULES_WERROR=ON .
	touch $@
