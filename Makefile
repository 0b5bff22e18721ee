# Each target sets up what it needs: an environment for each Python version, under .venv/. PYTHON=python3.12
# chooses another Python; JAX=0.7.2 the oldest JAX, for `test` and `dist`. Whole paths are in quotes, as a
# folder above may have a space in its name; make's own functions would split it there.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
DEMO := .venv/$(VERSION)-demo
DOCS := .venv/$(VERSION)-docs
DIST := .venv/$(VERSION)-dist
OLDEST := .venv/$(VERSION)-oldest-jax
TPU := .venv/$(VERSION)-tpu
# A new environment each time, with nothing but a wheel and what it depends on.
CLEAN := .venv/$(VERSION)-clean
WHEEL := "$(CURDIR)"/dist/shardrules-*-cp$(subst py,,$(subst .,,$(VERSION)))-*.whl
CPP := $(shell find csrc CMakeLists.txt -type f) pyproject.toml
SOURCES := $(CPP) $(shell find python -type f -not -name '*.pyc')
INSTALL := install --quiet --disable-pip-version-check
# Tests run on every core; PYTEST_ARGS passes more.
PYTEST = -m pytest -n auto --dist worksteal $(PYTEST_ARGS)
# How long `make fuzz` spends on each target.
SECONDS ?= 300

.PHONY: demo test test-all lint docs sanitize fuzz bench dist

# A real model, planned, checked and proved; only eformer is there to compare with.
demo: $(DEMO)/installed
	$(DEMO)/bin/python examples/demo.py
	JAX_PLATFORMS=cpu $(DEMO)/bin/python examples/prove_405b.py

# All but what is slow. With the oldest JAX, the rooms that stand on the layer and need no compiled program, and
# how a compiler is asked: the others are not tried there yet.
ifdef JAX
TESTED := $(OLDEST)
TESTS := $(wildcard tests/test_*.py) $(addprefix tests/,checkpoint compat files place plan rules trees \
  program/test_compiler.py)
else
TESTED := $(VENV)
endif
test: $(TESTED)/installed build/test
	$(TESTED)/bin/python $(PYTEST) $(TESTS)

# And what is slow, a server of S3, and the TPU's compiler for its tests and the proofs of the pages.
# PYTEST_ARGS=--hypothesis-profile=many tries ten times as many examples of each property.
test-all: override PYTEST_ARGS += -m ""
test-all: $(VENV)/stores $(TPU)/installed test
	PYTHONPATH="$(CURDIR)/$(TPU)" JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) tests/tpu tests/cli/test_project.py \
	  $(foreach page,$(shell grep -l 'needs: .*libtpu' -r docs),"tests/docs/test_docs.py::test_page[$(page)]")

lint: $(VENV)/installed build/lint
	$(VENV)/bin/clang-format --dry-run --Werror $(shell find benchmarks csrc -name '*.?pp')
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tests/typing
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m mypy.stubtest --allowlist .stubtest-allowlist shardrules._core
	$(VENV)/bin/python $(VENV)/bin/run-clang-tidy.py -quiet -hide-progress -p build/lint \
	  -clang-tidy-binary "$(CURDIR)/$(VENV)/bin/clang-tidy"

# The site, into build/site, from sources alone; warnings are errors, which --quiet would hide from --strict.
docs: $(DOCS)/dependencies
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The C++ tests and the core's Python tests under AddressSanitizer with UndefinedBehaviorSanitizer; the C++ tests,
# for the DFA cache's sake, under ThreadSanitizer. Left out: tests of whole models, of other libraries, and of
# several processes, which take long. CPython itself leaks by LeakSanitizer's standards; tests/trees/test_leaks.py looks
# for ours. The stack is for ASan's frames in the deepest trees, and libstdc++ is loaded early for its exceptions
# to be intercepted.
SANITIZED := tests/fuzzing tests/trees $(addprefix tests/,$(addsuffix .py,\
  files/test_files files/test_bad_files rules/test_bad_input rules/test_bounds rules/test_logical \
  rules/test_rules rules/test_semantics \
  plan/test_fold place/test_shardings test_correction))
sanitize: $(VENV)/installed build/tsan build/asan
	rm -rf build/asan/site && mkdir build/asan/site && cp -R python/shardrules build/asan/site
	cp build/asan/_core.*.so build/asan/site/shardrules
	echo 'import sys; sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]' \
	  >build/asan/site/sitecustomize.py # or the editable one would be found first
	PYTHONPATH=build/asan/site $(VENV)/bin/python -c \
	  'import importlib.util as u; assert "/asan/" in u.find_spec("shardrules._core").origin'
	ulimit -s 65536 && PYTHONPATH=build/asan/site PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	  $(VENV)/bin/python $(PYTEST) $(SANITIZED)

# Each target for SECONDS seconds, in C++ by libFuzzer and in Python by atheris.
fuzz: $(VENV)/fuzzers $(VENV)/installed
	@command -v clang++ >/dev/null || { echo "make fuzz needs clang++ and its libFuzzer \
	(Debian: clang libclang-rt-dev; macOS: brew install llvm)" >&2; exit 1; }
	$(MAKE) build/fuzz
	@for name in patterns dfa; do \
	  mkdir -p build/fuzz/corpus/$$name && \
	  build/fuzz/fuzz_$$name -max_total_time=$(SECONDS) -print_final_stats=1 -artifact_prefix=build/fuzz/ \
	    -rss_limit_mb=2048 -timeout=10 build/fuzz/corpus/$$name csrc/fuzz/corpus/$$name || exit 1; \
	done
	$(VENV)/bin/python -m tests.fuzzing --seconds $(SECONDS) $(ARGS)

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks $(ARGS)

# The sdist, and this Python's wheel made from it, in dist/; then the wheel where there is no compiler, with the newest
# JAX or JAX=0.7.2, tested from elsewhere, without extras and then with them.
IN_CLEAN = cd $(CLEAN) && PATH="$(CURDIR)/$(CLEAN)/bin" CC=false CXX=false "$(CURDIR)/$(CLEAN)/bin/python"
dist: dist/.built-$(VERSION)
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

# A preset of CMake: configured, built and, where it has tests, tested.
.PHONY: build/test build/asan build/tsan build/fuzz build/lint
build/test build/asan build/tsan build/fuzz build/lint: $(VENV)/dependencies
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" CMAKE_PREFIX_PATH="$$($(VENV)/bin/python -c \
	  'import pybind11; print(pybind11.get_cmake_dir())')" \
	  $(VENV)/bin/cmake --preset $(@F) --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja"
	$(if $(filter lint,$(@F)),,$(VENV)/bin/cmake --build $@)
	$(if $(filter lint fuzz,$(@F)),,$(VENV)/bin/ctest --test-dir $@ --output-on-failure)

# Each environment, the dependency group that it has, and the versions that CI has tried, where it knows the environment.
PINS = $(addprefix -c ,$(wildcard .ci/constraints/$(notdir $(@D)).txt))
$(VENV)/dependencies: GROUP := dev
$(DEMO)/dependencies: GROUP := demo
$(OLDEST)/dependencies: GROUP := oldest
$(DOCS)/dependencies: GROUP := docs
$(DIST)/dependencies: GROUP := dist
$(addsuffix /dependencies,$(VENV) $(DEMO) $(OLDEST) $(DOCS) $(DIST)): pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip $(INSTALL) --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip $(INSTALL) --group $(GROUP) $(PINS)
	touch $@

$(VENV)/stores: GROUP := stores
$(VENV)/fuzzers: GROUP := fuzz
$(VENV)/stores $(VENV)/fuzzers: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --group $(GROUP) $(PINS)
	touch $@

# Editable: Python is read from python/, and only a change of C++ builds anew. cmake and ninja are the environment's own.
%/installed: %/dependencies $(CPP)
	PATH="$(CURDIR)/$*/bin:$$PATH" $*/bin/python -m pip $(INSTALL) --no-build-isolation --no-deps \
	  -C cmake.define.SHARDRULES_WERROR=ON -e .
	touch $@

# The TPU's compiler, in the version that this JAX wants, in a directory of its own: with it in the
# environment, JAX would look for a TPU in each process.
$(TPU)/installed: $(VENV)/dependencies
	$(VENV)/bin/python -m pip $(INSTALL) --no-deps --upgrade --target $(TPU) "$$($(VENV)/bin/python -c \
	  'import importlib.metadata as m; print(next(r for r in m.requires("jax") if r[:6] == "libtpu").split(";")[0])')"
	touch $@
