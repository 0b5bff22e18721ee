"""Types that are read and rebuilt without their registered functions: nothing may show that."""

import dataclasses
from collections import namedtuple
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import pytest
from jax import tree_util
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.node_types import registration
from shardrules._core import RecordLayout

LEAF = jax.ShapeDtypeStruct((4, 8), "float32")


def match(tree):
    return sr.match_partition_rules([("kernel", P("tp")), (".*", P())], tree)


def match_by_jax(tree):
    return tree_util.tree_map_with_path(lambda path, _: P("tp") if "kernel" in tree_util.keystr(path) else P(), tree)


def record_of(node):
    return registration(type(node), node)[1]


def record(name, fields="kernel", meta="", **options):
    made = dataclasses.make_dataclass(name, [*fields.split(), *meta.split()], **options)
    return tree_util.register_dataclass(made, fields.split(), meta.split())


def sets(name):
    return lambda self, *_: vars(self).update({name: True})


class Meta(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.by_meta = True
        return made


class WithMeta(metaclass=Meta):
    pass


class WithNew:
    def __new__(cls, **_):
        made = object.__new__(cls)
        made.by_new = True
        return made


class WithSetattr:
    def __setattr__(self, name, value):
        vars(self).update({"set_before": name, name: value})


class WithProperty:
    bias = property(lambda self: self.made, lambda self, value: vars(self).update(made=value))


class TakesKeywords:
    """Shows the order in which it gets its fields."""

    def __init__(self, **keywords):
        vars(self).update(keywords)

    def __eq__(self, other):
        return vars(self) == vars(other)


class NewTakesKeywords(TakesKeywords):
    def __new__(cls, **keywords):
        made = super().__new__(cls)
        made.order = list(keywords)
        return made


class SetsAttributes(TakesKeywords):
    def __init__(self, kernel, bias):
        self.kernel = kernel
        self.bias = bias


for keywords in (TakesKeywords, NewTakesKeywords):
    tree_util.register_dataclass(keywords, ["kernel", "bias"], ["name", "size"])
tree_util.register_dataclass(SetsAttributes, ["kernel", "bias"], [])

Plain = record("Plain", "kernel bias", "name")
Frozen = record("Frozen", "bias kernel", frozen=True)
MetaFirst = dataclasses.make_dataclass("MetaFirst", ["name", "kernel"])
tree_util.register_dataclass(MetaFirst, ["kernel"], ["name"])
Derived = dataclasses.make_dataclass(
    "Derived", ["kernel", ("count", int, dataclasses.field(default=0, init=False))],
    namespace={"__post_init__": lambda self: vars(self).update(count=7)},
)  # fmt: skip
tree_util.register_dataclass(Derived, ["kernel"], [])
Factory = dataclasses.make_dataclass("Factory", [("kernel", Any, dataclasses.field(default_factory=list))])
tree_util.register_dataclass(Factory, ["kernel"], [])
KEYWORDS = {"bias": LEAF, "kernel": LEAF, "size": 2, "name": "kept"}
DATACLASSES = {
    "keywords": TakesKeywords(**KEYWORDS),
    "keywords for __new__": NewTakesKeywords(**KEYWORDS),
    "plain": Plain(LEAF, [LEAF, LEAF], "kept"),
    "frozen": Frozen(LEAF, {"x": LEAF}),
    "slots": record("Slots", slots=True)(LEAF),
    "many fields": record("ManyFields", "a b kernel d e f")(*[LEAF] * 6),
    "nested": Plain(Plain(LEAF, Frozen(LEAF, LEAF), "inner"), None, "outer"),
    "property": record("Property", "kernel bias", bases=(WithProperty,))(LEAF, LEAF),
    "own init": SetsAttributes(LEAF, LEAF),
    "a field that init makes": Derived(LEAF),
    "metaclass": record("OfMeta", bases=(WithMeta,))(LEAF),
    "__new__": record("New", bases=(WithNew,))(kernel=LEAF),
    "meta first": MetaFirst("kept", LEAF),
    "frozen, __post_init__": record("PostInit", frozen=True, namespace={"__post_init__": sets("by_post_init")})(LEAF),
    "__setattr__": record("Setattr", bases=(WithSetattr,))(LEAF),
    "factory": Factory(LEAF),
}


# Their constructors do nothing but set the fields.
PLAIN = {"plain", "frozen", "slots", "many fields", "nested", "property", "own init"}


@pytest.mark.parametrize("kind", DATACLASSES)
def test_dataclasses(kind):
    tree = DATACLASSES[kind]
    expected = RecordLayout.FIELDS if kind in PLAIN else RecordLayout.CALL
    assert record_of(tree).layout is expected
    ours, theirs = match([tree, tree]), match_by_jax([tree, tree])
    assert ours == theirs
    for made, by_jax in zip(ours, theirs, strict=True):
        assert type(made) is type(tree)
        by_name = getattr(made, "__dict__", {})
        assert list(by_name.items()) == list(getattr(by_jax, "__dict__", {}).items())


def test_a_constructor_that_is_replaced_after_the_first_walk():
    Changed = record("Changed", frozen=True)
    tree = Changed(LEAF)
    assert match(tree) == match_by_jax(tree)

    Changed.__init__ = lambda self, kernel: vars(self).update(kernel=[kernel])
    assert record_of(tree).layout is RecordLayout.CALL
    assert match(tree).kernel == match_by_jax(tree).kernel == [P("tp")]


def test_a_constructor_that_returns_something():
    def init(self, kernel):
        self.kernel = kernel
        return 1 if isinstance(kernel, P) else None

    bad = record("Bad", init=False, namespace={"__init__": init})(LEAF)
    for walk in (match_by_jax, match):
        with pytest.raises(TypeError, match="should return None"):
            walk(bad)


class Overridden(namedtuple("Overridden", "kernel bias")):
    made = 0

    def __new__(cls, *items):
        cls.made += 1
        return super().__new__(cls, *items)


class WithInit(namedtuple("WithInit", "kernel bias")):
    def __init__(self, *_):
        self.initialised = True


T = TypeVar("T")


class Typed(NamedTuple, Generic[T]):
    kernel: T
    bias: Any = None


@pytest.mark.parametrize("cls", [Overridden, WithInit, Typed, namedtuple("Bare", "kernel bias")])
def test_namedtuples(cls):
    tree = cls({"x": LEAF}, cls(LEAF, None))
    ours, theirs = match(tree), match_by_jax(tree)
    assert ours == theirs
    assert type(ours.bias) is cls
    assert getattr(ours, "__dict__", None) == getattr(theirs, "__dict__", None)


def test_the_constructor_of_a_namedtuple_runs_if_it_is_the_users():
    tree = Overridden(LEAF, LEAF)
    before = Overridden.made
    match(tree)
    assert Overridden.made == before + 1


def test_equinox_modules_that_are_not_as_declared():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        kernel: Any
        bias: Any
        width: int = eqx.field(static=True)

    whole = Block(LEAF, LEAF, 2)
    partial = object.__new__(Block)
    object.__setattr__(partial, "kernel", LEAF)
    wrapped = Block(LEAF, LEAF, 2)
    wrapped.__dict__["__name__"] = "wrapped"
    for trees in ([whole, partial, wrapped], [partial, whole], [wrapped, whole]):
        ours, theirs = match(trees), match_by_jax(trees)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_modules(a, b)


def assert_same_modules(ours, theirs):
    assert type(ours) is type(theirs)
    if not dataclasses.is_dataclass(ours):
        assert tree_util.tree_flatten(ours) == tree_util.tree_flatten(theirs)
        return
    assert list(ours.__dict__) == list(theirs.__dict__)
    for name, value in ours.__dict__.items():
        assert_same_modules(value, theirs.__dict__[name])


def test_nnx_variables():
    nnx = pytest.importorskip("flax.nnx")

    class Custom(nnx.Variable):
        pass

    state = nnx.State(
        {
            "kernel": nnx.Param(LEAF, zz=1, aa=2),
            "b": {"kernel": Custom({"x": LEAF, "y": [LEAF]}), "stats": nnx.BatchStat(LEAF)},
            "key": nnx.Param(np.zeros(3)),
        }
    )
    ours, theirs = match(state), match_by_jax(state)
    assert type(ours) is nnx.State
    assert tree_util.tree_structure(ours) == tree_util.tree_structure(theirs)
    pairs = [(ours["kernel"], theirs["kernel"]), (ours["key"], theirs["key"])]
    pairs += [(ours["b"][k], theirs["b"][k]) for k in ("kernel", "stats")]
    for a, b in pairs:
        assert type(a) is type(b)
        for slot in getattr(nnx.Variable, "__slots__", ()):
            assert getattr(a, slot) == getattr(b, slot)
        assert list(a.get_metadata().items()) == list(b.get_metadata().items())
    ours["kernel"].set_metadata(changed=True)
    assert "changed" not in state["kernel"].get_metadata()


def test_which_library_types_are_known():
    """Fails when a library's new version has to be looked at; the result stays right anyway."""
    eqx = pytest.importorskip("equinox")
    nnx = pytest.importorskip("flax.nnx")
    if jax.__version_info__ < (0, 8):
        pytest.skip("equinox and flax of this JAX's time go through the registry")
    module = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    assert record_of(module).layout is RecordLayout.ATTRIBUTES
    assert record_of(nnx.Param(LEAF)).layout is RecordLayout.VARIABLE
    assert record_of(nnx.Param(LEAF)) is record_of(nnx.Param(LEAF))


def test_a_dataclass_with_a_staticmethod_for_init():
    def init(**given):
        assert list(given) == ["kernel"]

    cls = record("StaticInit", init=False, namespace={"__init__": staticmethod(init)})
    tree = object.__new__(cls)
    tree.kernel = LEAF
    assert vars(match(tree)) == vars(match_by_jax(tree)) == {}
