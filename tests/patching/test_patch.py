"""`patch` and `unpatch`: the functions that they replace, and that only the time changes."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import traceback
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._patching import patch as _patch
from shardrules._patching.patch import code_digest
from tests.support import corpus, peer_sources
from tests.support.contexts import legacy
from tests.support.folders import ROOT
from tests.support.slow import some
from tests.support.work import calls_by_file

AXES = st.sampled_from(["dp", "fsdp", "tp", "absent"])
MESH_AXES = st.none() | AXES | st.lists(AXES, max_size=3, unique=True).map(tuple)
SPECS = st.lists(MESH_AXES | st.just(P.UNCONSTRAINED), max_size=4).map(lambda entries: P(*entries))
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 24]), max_size=4).map(tuple)
LOGICAL = st.sampled_from(["batch", "embed", "heads", "mlp"])
NAMES = st.lists(st.none() | LOGICAL | st.just(P.UNCONSTRAINED), max_size=5)
RULES = st.lists(st.tuples(LOGICAL, MESH_AXES | st.just(["fsdp", "tp"])), max_size=10)
BAD_RULES = [
    [("a", "x", "y")], [("a",)], ["ab", "a"], {"a": "x"}, [("a", "x"), 3], [(["a"], "x")], "ab",
    [("a", 3)],
]  # fmt: skip


def is_known(library):
    try:
        sr.patch(library)
    except (ModuleNotFoundError, RuntimeError):
        return False
    sr.unpatch()
    return True


def needs(library):
    return pytest.mark.skipif(
        not is_known(library),
        reason=f"{library} is not installed, or in a version that patch does not know",
    )


EFORMER, FLAX = needs("eformer"), needs("flax")
LIBRARIES = [pytest.param("eformer", marks=EFORMER), pytest.param("flax", marks=FLAX)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    sr.unpatch()


def replaced_in(library):
    """The module where the functions are defined, and their names."""
    found = _patch._LIBRARIES[library]
    return importlib.import_module(found.module), found.functions


def globals_of_all_modules():
    return {
        (id(module), name): id(value)
        for module in list(sys.modules.values())
        if type(module) is types.ModuleType
        for name, value in list(vars(module).items())
        if inspect.isfunction(value)
    }


class TestReplacing:
    @pytest.mark.parametrize("library", LIBRARIES)
    def test_everywhere_and_back(self, library):
        module, names = replaced_in(library)
        originals = {name: getattr(module, name) for name in names}
        user = types.ModuleType("a_user_of_it")
        vars(user).update({f"my_{name}": f for name, f in originals.items()})
        sys.modules[user.__name__] = user
        try:
            sr.patch(library)  # what it imports is imported now
            sr.unpatch()
            before = globals_of_all_modules()
            patched = sr.patch(library)
            for name, original in originals.items():
                new = getattr(module, name)
                assert new is not original
                assert getattr(user, f"my_{name}") is new
                assert inspect.signature(new) == inspect.signature(original)
                assert (new.__name__, new.__doc__) == (name, original.__doc__)
                assert pickle.loads(pickle.dumps(new)) is new
            assert len(patched.replaced) == len(names)
            assert all(name in repr(patched) for name in patched.replaced)
            now = globals_of_all_modules()
            changed = {key for key in before if before[key] != now[key]}
            assert len(changed) > 2 * len(names)  # re-exports
            sr.unpatch()
            assert globals_of_all_modules() == before
        finally:
            del sys.modules[user.__name__]

    @EFORMER
    def test_re_exports_of_eformer(self):
        import eformer.escale as escale
        from eformer.escale import partition
        from eformer.escale.partition import constraints, manager

        with sr.patch("eformer"):
            assert escale.match_partition_rules is constraints.match_partition_rules
            assert partition.match_partition_rules is constraints.match_partition_rules
            assert constraints.match_partition_rules.__wrapped__ is not None
            new = constraints.get_corrected_named_sharding
            assert manager.get_corrected_named_sharding is new
            assert escale.lax_reshard is constraints.with_sharding_constraint

    @FLAX
    def test_re_exports_of_flax(self):
        from flax import linen
        from flax.core import spmd as core_spmd
        from flax.linen import partitioning, spmd

        rules = core_spmd._axis_rules
        box = linen.LogicallyPartitioned
        with sr.patch("flax"):
            assert linen.logical_to_mesh_sharding is spmd.logical_to_mesh_sharding
            assert partitioning.logical_to_mesh_axes is spmd.logical_to_mesh_axes
            assert spmd.logical_to_mesh_axes.__wrapped__ is not None
            assert core_spmd._axis_rules is rules
            assert linen.LogicallyPartitioned is box
            with sr.logical_axis_rules([("a", "x")]):
                assert linen.logical_to_mesh(P("a")) == P("x")

    @FLAX
    def test_imported_by_name_while_it_is_on(self):
        from flax.linen import spmd

        original = spmd.logical_to_mesh
        user = types.ModuleType("a_late_user")
        sys.modules[user.__name__] = user
        try:
            with sr.patch("flax"):
                exec("from flax.linen import logical_to_mesh as f", vars(user))
                assert user.f is not original
            assert user.f is original
        finally:
            del sys.modules[user.__name__]

    @FLAX
    def test_lazy_modules_stay_unloaded(self):
        spec = importlib.util.find_spec("this")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        lazy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lazy)
        sys.modules["a_lazy_module"] = lazy
        sys.modules["no_module"] = object()
        try:
            with sr.patch("flax"):
                pass
            assert type(lazy) is not types.ModuleType  # it becomes one when it is loaded
        finally:
            del sys.modules["a_lazy_module"], sys.modules["no_module"]


class TestContexts:
    @FLAX
    def test_nothing_is_left(self):
        from flax.linen import spmd

        before = globals_of_all_modules()

        def fails():
            with sr.patch("flax"):
                assert spmd.logical_to_mesh.__wrapped__
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        assert globals_of_all_modules() == before

    @EFORMER
    @FLAX
    def test_nesting(self):
        from eformer.escale.partition import constraints
        from flax.linen import spmd

        originals = constraints.match_partition_rules, spmd.logical_to_mesh

        def patched():
            now = constraints.match_partition_rules, spmd.logical_to_mesh
            return [new is not old for new, old in zip(now, originals, strict=True)]

        with sr.patch("eformer"):
            with sr.patch("eformer", "flax") as inner:
                assert patched() == [True, True]
                assert all(name.startswith("flax.") for name in inner.replaced)
            assert patched() == [True, False]
        assert patched() == [False, False]
        sr.patch("eformer")
        with sr.patch("flax"):
            sr.unpatch()
            assert patched() == [False, False]
        assert patched() == [False, False]

    @FLAX
    def test_again_and_again(self):
        from flax.linen import spmd

        importlib.import_module("shardrules.compat.flax_linen_spmd")  # patch does, the first time
        before = globals_of_all_modules()
        first = sr.patch("flax", "flax")
        replaced = spmd.logical_to_mesh
        assert sr.patch("flax").replaced == ()
        assert spmd.logical_to_mesh is replaced
        sr.unpatch()
        sr.unpatch()
        assert globals_of_all_modules() == before
        sr.patch("flax")
        assert spmd.logical_to_mesh is replaced
        first.__exit__()
        assert globals_of_all_modules() == before

    def test_nothing_to_patch(self):
        before = globals_of_all_modules()
        with sr.patch() as patched:
            assert patched.replaced == ()
        sr.unpatch()
        assert globals_of_all_modules() == before


class TestRefusals:
    def test_an_unknown_library(self):
        with pytest.raises(ValueError, match="'keras'; it knows 'eformer', 'flax'"):
            sr.patch("keras")

    @EFORMER
    @FLAX
    def test_a_function_that_is_not_known_is_refused_whatever_the_version(self, monkeypatch):
        from eformer.escale.partition import constraints

        def get_incontext_mesh(raise_error=True):
            return None

        # What the replaced functions reach is another, so they are others themselves.
        get_incontext_mesh.__module__ = constraints.__name__
        monkeypatch.setattr(constraints, "get_incontext_mesh", get_incontext_mesh)
        before = globals_of_all_modules()
        with pytest.raises(RuntimeError) as caught:
            sr.patch("flax", "eformer")
        for part in (
            "create_pattern_based_partition_spec of eformer", "0.0.95 to 0.1.0",
            "newer shardrules", "shardrules.compat.eformer",
        ):  # fmt: skip
            assert part in str(caught.value)
        assert globals_of_all_modules() == before

    @EFORMER
    @FLAX
    @pytest.mark.parametrize("number", ["0.0.99.12", "0.1.0", "9.9", None])
    def test_version_numbers_do_not_decide(self, monkeypatch, number):
        """patch ran with no EasyDeL at all: it wanted eformer 0.0.101 and flax 0.12.8 or 0.12.12."""

        def version(name):
            if number is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(importlib.metadata, "version", version)
        with sr.patch("eformer", "flax") as patched:
            assert len(patched.replaced) == 7

    @FLAX
    def test_a_function_that_someone_else_has_replaced(self, monkeypatch):
        from flax.linen import spmd

        @functools.wraps(spmd.logical_to_mesh)
        def counting(*args):
            return counting.__wrapped__(*args)

        monkeypatch.setattr(spmd, "logical_to_mesh", counting)
        with pytest.raises(RuntimeError, match="does not know this logical_to_mesh of flax"):
            sr.patch("flax")

    def test_functions_without_source_or_none_at_all(self, monkeypatch):
        for name in ("len", "missing"):
            library = _patch._Library("builtins", "builtins", "ours", "1.0", {name: ("0",)})
            monkeypatch.setitem(_patch._LIBRARIES, "builtins", library)
            with pytest.raises(RuntimeError, match=f"this {name} of builtins"):
                sr.patch("builtins")
        made = {"__name__": __name__}
        exec("def nowhere(): pass", made)
        assert not _patch._is_known(made["nowhere"], ("0",))

    @pytest.mark.parametrize("module", ["no_such_library.spmd", "json.no_such_module"])
    def test_not_installed(self, monkeypatch, module):
        library = _patch._Library(module, "ours", "ours", "1.0", {})
        monkeypatch.setitem(_patch._LIBRARIES, "a_library", library)
        with pytest.raises(ModuleNotFoundError, match=r"no_such_\w+ is not installed") as caught:
            sr.patch("a_library")
        assert caught.value.name == (module if module.startswith("json") else "no_such_library")


PLAIN = """
LEAST = 3
def helper(x):
    return x + 1
def function(x):
    return f"{helper(x)} {x!r}" if x > LEAST else None
"""
REWRITTEN = """
def unrelated(): pass
LEAST = 3
def helper(x: int) -> int:
    'A docstring.'
    return (x
            + 1)  # a comment
def function(x):
    "Another."
    return f'{helper(x)} {x!r}' if x > LEAST else None
"""
REACHES_A_CLASS = """
class Marker:
    def __bool__(self): return False
marker = Marker()
def function(x):
    return marker
"""


class TestFingerprints:
    @pytest.fixture
    def of(self, tmp_path, monkeypatch):
        """The digest of `function` in a library of this text."""

        def call(text):
            number = len(list(tmp_path.iterdir()))
            (tmp_path / f"text{number}.py").write_text(text)
            library = types.ModuleType("library")
            code = compile(text, tmp_path / f"text{number}.py", "exec")
            monkeypatch.setitem(sys.modules, "library", library)
            library.__file__ = str(tmp_path / f"text{number}.py")
            exec(code, vars(library))
            return code_digest(library.function)

        return call

    def test_comments_layout_docstrings_and_annotations_do_not_count(self, of):
        assert of(PLAIN) == of(REWRITTEN)

    @pytest.mark.parametrize(
        ("old", "new"), [("x > LEAST", "x >= LEAST"), ("x + 1", "x + 2"), ("(x):", "(x=1):")]
    )
    def test_what_it_does_counts_and_what_it_reaches(self, of, old, new):
        assert of(PLAIN.replace(old, new)) != of(PLAIN)

    def test_the_classes_of_its_objects_count(self, of):
        assert of(REACHES_A_CLASS.replace("False", "True")) != of(REACHES_A_CLASS)


def outcome(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def beside_the_original(function):
    """The function that is in force, and the one that it has replaced."""
    return function, function.__wrapped__


@EFORMER
class TestEformerIsTheSame:
    @pytest.fixture(autouse=True)
    def _patched(self):
        from eformer.escale.partition import constraints

        with sr.patch("eformer"):
            self.module = constraints
            yield

    def compare(self, name, *args, **kwargs):
        new, original = beside_the_original(getattr(self.module, name))
        expected = outcome(original, *args, **kwargs)
        assert outcome(new, *args, **kwargs) == expected
        return expected

    @pytest.mark.parametrize("rule_set", some(corpus.regex_rule_sets()[::4], 4))
    def test_real_rules(self, rule_set):
        tree = corpus.manifest("easydel-mixtral-8x22b").nested(corpus.abstract)
        rules = corpus.rules(rule_set)
        for options in ({}, {"min_size": None}, {"strict": False}, {"min_size": 10**6}):
            self.compare("match_partition_rules", rules, tree, **options)
            self.compare("match_partition_rules", [*rules, (".*", P())], tree, **options)

    def test_what_ours_would_do_otherwise(self):
        leaf = jax.ShapeDtypeStruct((8, 8), "int8")
        tree = {"a": leaf, "b": [leaf, 3]}
        match = functools.partial(self.compare, "match_partition_rules")
        assert match([(".*", ("tp", None))], tree)["a"] == ("tp", None)
        assert match([(".*", P("tp")), ("(", P())], tree)["a"] == P("tp")  # never reached
        assert match([("(", P())], tree)[0].__name__ in ("error", "PatternError")
        assert match([(".*", None)], tree)[0] is TypeError
        assert match([("x", P())], tree) == (ValueError, "Partition rule not found for param: a")
        assert match({"abc": P()}, tree)[0] is ValueError
        assert match([], {}) == {}

    def test_settings_that_eformer_reads_when_imported(self, monkeypatch):
        tree = {"a": jax.ShapeDtypeStruct((64, 64), "int8")}
        match = self.module.match_partition_rules
        monkeypatch.setenv("MIN_SHARDING_SIZE", "1")
        assert match([("a", P("tp"))], tree, min_size=None) == {"a": P()}
        monkeypatch.setattr(self.module, "MIN_SHARDING_SIZE", 64)
        assert match([("a", P("tp"))], tree, min_size=None) == {"a": P("tp")}
        monkeypatch.setattr(self.module, "LOG_SHARDING_MOVE", True)
        with pytest.warns(UserWarning, match="safer and faster being local") as record:
            match([("a", P("tp"))], tree, min_size=10**6)
        assert record[0].filename == self.module.__file__  # as eformer's own

    @given(SHAPES, SPECS)
    def test_corrected_shardings(self, mesh, shape, spec):
        with legacy(mesh):
            self.compare("get_corrected_named_sharding", shape, spec)

    def test_the_mesh_is_the_one_that_eformer_sees(self, mesh):
        assert self.compare("get_corrected_named_sharding", (8,), P("tp"))[0] is AssertionError
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            sharding = self.compare("get_corrected_named_sharding", (8,), P("tp"), False)
        assert sharding.mesh.empty
        with legacy(mesh):
            assert self.compare("get_corrected_named_sharding", (8,), P("tp")).spec == P("tp")
            assert self.compare("get_corrected_named_sharding", (8,), P()).spec == P()

    def test_under_set_mesh(self, mesh):
        with jax.set_mesh(mesh):
            assert self.compare("get_corrected_named_sharding", (8,), P("tp"))[0] is AssertionError
            assert self.compare("make_shard_and_gather_fns", {"a": P()})[0] is AssertionError

    @given(SHAPES, SPECS)
    def test_shard_functions(self, mesh, shape, spec):
        placed = [
            outcome(lambda f=f: f(spec, mesh)[0](jnp.ones(shape)))
            for f in beside_the_original(self.module.make_shard_and_gather_fns)
        ]
        if isinstance(placed[1], tuple):
            assert placed[0] == placed[1]
        else:
            assert placed[0].sharding.is_equivalent_to(placed[1].sharding, len(shape))

    def test_shard_and_gather_functions_of_trees(self, mesh):
        specs = {"w": P("fsdp", "tp"), "odd": P("tp"), "n": [P(), P("dp")], "host": P("tp")}
        tree = {
            "w": jnp.arange(64.0).reshape(8, 8), "odd": jnp.arange(3.0),
            "n": [jnp.ones(4), jnp.ones(4, "bfloat16")], "host": np.arange(8.0, dtype="float32"),
        }  # fmt: skip
        results = []
        for make in beside_the_original(self.module.make_shard_and_gather_fns):
            shard_fns, gather_fns = make(specs, mesh)
            placed = jax.tree.map(lambda f, x: f(tensor=x), shard_fns, tree)
            fetched = jax.tree.map(lambda f, x: f(x), gather_fns, placed)
            results.append((jax.tree.structure(shard_fns), placed, fetched))
        (structure, placed, fetched), (its_structure, its_placed, its_fetched) = results
        assert structure == its_structure
        for ours, its in zip(jax.tree.leaves(placed), jax.tree.leaves(its_placed), strict=True):
            assert type(ours) is type(its)
            if isinstance(ours, jax.Array):
                assert ours.sharding.is_equivalent_to(its.sharding, ours.ndim)
        for ours, its in zip(jax.tree.leaves(fetched), jax.tree.leaves(its_fetched), strict=True):
            assert type(ours) is type(its) is np.ndarray
            assert ours.dtype == its.dtype
            np.testing.assert_array_equal(ours, its)
        error = self.compare("make_shard_and_gather_fns", {"w": P("absent")}, mesh)
        assert error[0] is ValueError

    def test_pattern_based_specs(self, mesh):
        new, original = beside_the_original(self.module.create_pattern_based_partition_spec)
        for text in ("a|b->dp.tp,c->fsdp", "^x$->tp,nothing,.*->dp", "", "a->", "x->tp,(->dp"):
            for default in (None, P("z")):
                ours, its = new(text, mesh, default), original(text, mesh, default)
                for name in ("a", "bc", "layers/c", "x", "xx", ""):
                    assert outcome(ours, name, None) == outcome(its, name, None)
        assert outcome(new, "a->b->c", mesh) == outcome(original, "a->b->c", mesh)

    @pytest.mark.parametrize("which", [0, 1], ids=["shard", "gather"])
    def test_shard_and_gather_functions_inside_transformations(self, mesh, which):
        """The gather raised ConcretizationTypeError under the patch."""
        x = jnp.arange(16.0).reshape(8, 2)
        transformations = [
            lambda f: jax.jit(f)(x),
            lambda f: jax.vmap(f)(jnp.stack([x] * 3)),
            lambda f: jax.grad(lambda x: (f(x) ** 2).sum())(x),
            lambda f: jax.lax.scan(lambda c, y: (f(c), f(y)), x, jnp.stack([x] * 2)),
            lambda f: jax.eval_shape(f, x),
        ]
        for transform in transformations:
            got, expected = (
                transform(make(P("fsdp", "tp"), mesh)[which])
                for make in beside_the_original(self.module.make_shard_and_gather_fns)
            )
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                assert type(a) is type(b)
                if isinstance(a, jax.Array):
                    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
                    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    def test_shard_and_gather_functions_on_anything(self, mesh):
        things = [
            jax.ShapeDtypeStruct((8,), "float32"), "text", len, None, 3, 2**40, np.arange(8.0),
            np.arange(8, dtype=">f4"), np.ma.array([1, 2]), {"a": "x", "b": np.arange(8)},
            {1: "x", "a": "y"}, (None, None), ({}, None),
        ]  # fmt: skip
        for which in (0, 1):
            for thing in things:
                got, expected = (
                    re.sub("0x[0-9a-f]+", "", repr(outcome(make(P("tp"), mesh)[which], thing)))
                    for make in beside_the_original(self.module.make_shard_and_gather_fns)
                )
                assert got == expected

    def test_pattern_functions_with_a_name_that_is_no_string(self, mesh):
        made = [
            make("a->b", mesh)
            for make in beside_the_original(self.module.create_pattern_based_partition_spec)
        ]
        for name in (3, None, b"a", ["a"]):
            assert outcome(made[0], name, None) == outcome(made[1], name, None)

    def test_specs_that_are_none(self, mesh):
        with legacy(mesh):
            for spec in (["fsdp", "tp"], ("tp",), "tp", [["fsdp", "tp"]], None, P(3), P(["tp"])):
                self.compare("get_corrected_named_sharding", (8, 8), spec)

    def test_shapes_beyond_64_bits(self, mesh):
        with legacy(mesh):
            for shape in ((2**70, 3), (2**70 + 1, 8), (2**63, 2**64)):
                self.compare("get_corrected_named_sharding", shape, P("fsdp", "tp"))

    def test_keys_of_the_result_are_sorted(self):
        leaf = jax.ShapeDtypeStruct((8,), "int8")
        tree = {"w": leaf, "b": {"z": leaf, "a": leaf}}
        specs = self.compare("match_partition_rules", [(".*", P("x"))], tree)
        assert list(specs) == list(self.module.match_partition_rules([(".*", P("x"))], tree))
        unsortable = self.compare("match_partition_rules", [(".*", P("x"))], {1: leaf, "a": leaf})
        assert unsortable[0] is ValueError

    def test_an_empty_mesh_is_warned_about_at_the_callers_line(self, mesh, monkeypatch):
        """The warning named the file of patch."""
        get = self.module.get_corrected_named_sharding
        with pytest.warns(UserWarning, match="Active mesh is empty") as record:
            get((8,), P("tp"), raise_mesh_error=False)
        assert [w.filename for w in record] == [__file__]
        monkeypatch.setattr(self.module, "LOG_SHARDING_MOVE", True)
        with legacy(mesh), pytest.warns(UserWarning, match="not divisible|not found") as record:
            get((3, 8), P("fsdp", "absent"))
        assert [w.filename for w in record] == [__file__] * 2

    def test_errors_are_not_chained_to_ours(self, mesh):
        """They were raised "during handling of the above exception", which was one of ours."""
        package = Path(sr.__file__).parent
        make = self.module.make_shard_and_gather_fns
        name_of = self.module.create_pattern_based_partition_spec("a->b", mesh)
        calls = [
            lambda: self.module.match_partition_rules([("x", P())], {"a": np.ones(2)}),
            lambda: self.module.match_partition_rules([("(", P())], {"a": np.ones(2)}),
            lambda: self.module.get_corrected_named_sharding((8,), P("tp")),
            lambda: make({"a": P("absent")}, mesh),
            lambda: make(P("tp"), mesh)[1]("text"),
            lambda: name_of(3, None),
        ]
        for call in calls:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                call()
            error = caught.value
            while error is not None:
                files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
                assert str(package) not in str(error)
                assert not Path(files[-1]).is_relative_to(package)
                error = error.__context__

    def test_it_is_ours_that_answers(self, mesh, monkeypatch):
        for name in ("named_tree_map", "PartitionSpec", "NamedSharding"):
            monkeypatch.setattr(self.module, name, None)
        tree = {"a": jax.ShapeDtypeStruct((8, 8), "int8")}
        assert self.module.match_partition_rules([("a", P("tp"))], tree) == {"a": P("tp")}
        shard_fns, gather_fns = self.module.make_shard_and_gather_fns({"a": P("tp")}, mesh)
        np.testing.assert_array_equal(gather_fns["a"](shard_fns["a"](jnp.arange(8))), np.arange(8))
        assert self.module.create_pattern_based_partition_spec("a->b", mesh)("a", None) == P("b")
        with legacy(mesh):
            found = self.module.get_corrected_named_sharding((8, 7), P("fsdp", "tp"))
        assert found.spec == P("fsdp", None)


@FLAX
class TestFlaxIsTheSame:
    @pytest.fixture(autouse=True)
    def _patched(self):
        from flax import linen

        with sr.patch("flax"):
            self.linen = linen
            yield

    def compare(self, name, *args):
        new, original = beside_the_original(getattr(self.linen, name))
        expected = outcome(original, *args)
        got = outcome(new, *args)
        assert got == expected
        assert type(got) is type(expected)
        return expected

    @given(NAMES, RULES)
    def test_any_names(self, names, rules):
        for made in (tuple, list, lambda entries: P(*entries)):
            self.compare("logical_to_mesh_axes", made(names), rules)
        self.compare("logical_to_mesh", [P(*names), {"a": P(*names)}, None], tuple(rules))

    @pytest.mark.parametrize("rules", BAD_RULES, ids=repr)
    def test_bad_input(self, rules):
        for names in (("a", "b"), ("a", "a"), "ab", 3):
            self.compare("logical_to_mesh_axes", names, rules)
            self.compare("logical_to_mesh", {"w": names}, rules)
        self.compare("logical_to_mesh", {"w": P("a", "b")}, rules)

    @pytest.mark.parametrize("rule_set", corpus.rule_sets("logical")[::3])
    @pytest.mark.parametrize(
        "model", ["maxtext-llama3.1-405b-scanned", "maxtext-mixtral-8x22b-scanned"]
    )
    def test_real_rules(self, model, rule_set):
        tree = {name: P(*axes) for name, axes in corpus.logical_axes(model).items()}
        rules = corpus.logical_rules(rule_set)
        specs = self.compare("logical_to_mesh", tree, rules)
        entries = [entry for spec in specs.values() for entry in spec]
        axes = {a for e in entries if e for a in ((e,) if isinstance(e, str) else e)}
        for names in (sorted(axes) or ["x"], ["absent"]):
            mesh = sr.resolve_mesh(dict.fromkeys(names, 2))
            self.compare("logical_to_mesh_sharding", tree, mesh, rules)

    def test_the_rules_in_force(self):
        assert self.linen.logical_to_mesh_axes(("a",)) == P(None)
        with self.linen.logical_axis_rules([("a", ["x", "y"])]):
            self.compare("logical_to_mesh_axes", ("a", None))
            assert self.linen.logical_to_mesh({"w": P("a")}) == {"w": P(("x", "y"))}
        assert self.compare("logical_to_mesh_axes", None) is None

    def test_it_is_ours_that_answers(self, mesh, monkeypatch):
        from flax.linen import spmd

        monkeypatch.setattr(spmd, "_logical_to_mesh_axes", None)
        assert self.linen.logical_to_mesh_axes(("a",), [("a", "tp")]) == P("tp")
        assert self.linen.logical_to_mesh([P("a")], [("a", "tp")]) == [P("tp")]
        [sharding] = self.linen.logical_to_mesh_sharding([P("a")], mesh, [("a", "tp")])
        assert sharding.spec == P("tp")


def calls_in_eformer(call):
    counted = calls_by_file(call)
    return sum(count for file, count in counted.items() if "eformer" in Path(file).parts)


@EFORMER
def test_an_easydel_style_model_runs_ours_without_a_changed_line(mesh):
    """How much faster that is: benchmarks/patching.py."""
    from tests.support.easydel_style import Model

    tree = corpus.manifest("easydel-deepseek-v3").nested(corpus.abstract)
    model = Model(corpus.rules("easydel__deepseek_v3-DeepseekV3Config-v0.2.0"), tree, mesh)
    steps = (model.partition_specs, model.shardings, model.shard_and_gather_fns)
    before = [step() for step in steps]
    with sr.patch("eformer"):
        under = [step() for step in steps]
        # `get_corrected_named_sharding` asks eformer for the mesh, and that is all.
        leaves = len(jax.tree.leaves(tree))
        assert [calls_in_eformer(step) for step in steps] == [0, leaves, leaves]
    assert calls_in_eformer(model.partition_specs) > leaves
    assert under[:2] == before[:2]
    assert jax.tree.structure(under[2]) == jax.tree.structure(before[2])


# Of flax's tests of the functions that ours stand in for, those that replace a private function of flax,
# which ours do not call.
FLAXS_TESTS = {
    "core/core_meta_test.py": set(),
    "linen/linen_meta_test.py": set(),
    "linen/partitioning_test.py": {
        "test_with_sharding_constraint",
        "test_with_sharding_constraint_fallback",
    },
    "nnx/spmd_test.py": set(),
}


@FLAX
@pytest.mark.slow
def test_flaxs_own_tests():
    """Flax's public tests have the same outcomes under the patch, and with the names of compat."""
    try:
        folder = peer_sources.sources("flax") / "tests"
    except OSError as error:
        pytest.skip(str(error))
    for file, mocking in FLAXS_TESTS.items():
        without, under, compat = outcomes_of(folder / file)
        assert (len(without["replaced"]), len(under["replaced"])) == (0, 3)
        assert under["outcomes"] == without["outcomes"]
        assert "passed" in under["outcomes"].values()
        different = {
            name for name, how in without["outcomes"].items() if compat["outcomes"][name] != how
        }
        assert {name.rpartition("::")[2] for name in different} == mocking
        assert compat["replaced"]


def outcomes_of(file):
    """Of a test file as it is, under the patch, and with the names of compat."""
    command = [sys.executable, "-m", "tests.support.peer_runner", "flax", str(file)]
    # The tests ask for devices themselves.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    runs = [
        subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        for flags in ([], ["--patched"], ["--compat"])
    ]
    return [json.loads(run.communicate(timeout=600)[0]) for run in runs]
