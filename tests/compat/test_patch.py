"""`patch` and `unpatch`: what they replace and restore, what they refuse, and whose errors are seen.

They put the code of compat's functions in a library's place; what that answers beside the library's own,
tests/compat/test_eformer.py and test_flax_linen_spmd.py compare.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pickle
import sys
import types

import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import _patch
from shardrules.compat import eformer as ours


def is_known(library):
    try:
        sr.patch(library)
    except (ModuleNotFoundError, RuntimeError):
        return False
    sr.unpatch()
    return True


def needs(library):
    return pytest.mark.skipif(
        not is_known(library), reason=f"{library} is not installed, or in a version that patch does not know"
    )


EFORMER, FLAX = needs("eformer"), needs("flax")
LIBRARIES = [pytest.param("eformer", marks=EFORMER), pytest.param("flax", marks=FLAX)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch):
    monkeypatch.setattr(_patch, "_replacements", {})
    yield
    sr.unpatch()


@pytest.fixture
def user():
    module = types.ModuleType("a_user_of_it")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def functions_of(library):
    module = importlib.import_module(_patch._LIBRARIES[library][0])
    return module, {name: getattr(module, name) for name in _patch._FUNCTIONS[library].split()}


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
    def test_everywhere_and_back(self, library, user):
        module, originals = functions_of(library)
        of_ours = _patch._LIBRARIES[library][1]
        vars(user).update({f"my_{name}": f for name, f in originals.items()})
        before = globals_of_all_modules()
        patched = sr.patch(library)
        assert patched.replaced == tuple(f"{module.__name__}.{name}" for name in originals)
        for name, original in originals.items():
            new = getattr(module, name)
            assert new is not original
            assert new.__wrapped__ is original
            # Ours itself, with nothing around it that could swallow an error.
            assert new.__code__ is getattr(of_ours, name).__code__
            assert new is getattr(user, f"my_{name}")
            assert inspect.signature(new) == inspect.signature(original)
            assert (new.__name__, new.__doc__) == (name, original.__doc__)
            assert pickle.loads(pickle.dumps(new)) is new
        changed = globals_of_all_modules().items() - before.items()
        assert len(changed) > 2 * len(originals)  # re-exports, such as linen.logical_to_mesh
        sr.unpatch()
        assert globals_of_all_modules() == before

    @FLAX
    def test_a_module_that_imports_it_while_it_is_on(self, user):
        original = functions_of("flax")[1]["logical_to_mesh"]
        with sr.patch("flax"):
            exec("from flax.linen import logical_to_mesh as f", vars(user))
            assert user.f is not original
            with sr.logical_axis_rules([("a", "x")]):  # the rules in force are flax's too
                assert user.f(P("a")) == P("x")
        assert user.f is original

    @FLAX
    def test_lazy_modules_stay_unloaded(self):
        spec = importlib.util.find_spec("this")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        lazy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lazy)
        sys.modules["a_lazy_module"], sys.modules["no_module"] = lazy, object()
        try:
            with sr.patch("flax"):
                assert type(lazy) is not types.ModuleType  # it becomes one when it is loaded
        finally:
            del sys.modules["a_lazy_module"], sys.modules["no_module"]

    @EFORMER
    @FLAX
    def test_contexts(self):
        def patched():
            now = (functions_of(library)[1].values() for library in ("eformer", "flax"))
            return [all(hasattr(f, "__wrapped__") for f in functions) for functions in now]

        before = globals_of_all_modules()
        with sr.patch("eformer"):
            with sr.patch("eformer", "flax", "flax") as inner:
                assert patched() == [True, True]
                assert all(name.startswith("flax.") for name in inner.replaced)
            assert patched() == [True, False]
        assert patched() == [False, False]
        with pytest.raises(KeyError), sr.patch("flax"):
            raise KeyError
        with sr.patch("flax"):
            sr.unpatch()
            sr.unpatch()
            assert patched() == [False, False]
        with sr.patch():
            assert patched() == [False, False]
        assert globals_of_all_modules() == before


class TestRefusals:
    def test_libraries_that_it_does_not_know_or_that_are_not_there(self, monkeypatch):
        with pytest.raises(ValueError, match="'keras'; it knows 'eformer', 'flax'"):
            sr.patch("keras")
        monkeypatch.setitem(_patch._LIBRARIES, "no_such", ("no_such", ours, "0", "1"))
        with pytest.raises(ModuleNotFoundError, match="no_such is not installed") as caught:
            sr.patch("no_such")
        assert caught.value.name == "no_such"

    @FLAX
    @pytest.mark.parametrize("version", ["0.12.2", "0.13", "1.0", "0.13.0rc1"])
    def test_versions_that_nobody_compared(self, monkeypatch, version):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        with pytest.raises(RuntimeError, match=f"flax {version}, but that of 0.12.3 to before 0.13"):
            sr.patch("flax")

    @EFORMER
    @FLAX
    @pytest.mark.parametrize("change", ["wrapped", "other parameters", "other defaults", "gone"])
    def test_functions_that_it_does_not_know(self, monkeypatch, change):
        module, originals = functions_of("flax")
        original = originals["logical_to_mesh"]

        @functools.wraps(original)
        def wrapped(*args):
            return original(*args)

        new = {
            "wrapped": wrapped,
            "other parameters": lambda tree, rules, more=None: None,
            "other defaults": lambda tree, rules=(): None,
            "gone": None,
        }
        monkeypatch.setattr(module, "logical_to_mesh", new[change])
        before = globals_of_all_modules()
        with pytest.raises(RuntimeError, match=r"this logical_to_mesh of flax") as caught:
            sr.patch("eformer", "flax")
        assert "(tree: 'Any', rules:" in str(caught.value)
        assert "import it from shardrules.compat.flax_linen_spmd" in str(caught.value)
        assert globals_of_all_modules() == before
