"""Types that are read and rebuilt without their registered functions: nothing may show that."""

from __future__ import annotations

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
    return tree_util.tree_map_with_path(
        lambda path, _: P("tp") if "kernel" in tree_util.keystr(path) else P(), tree
    )


def record_of(node):
    return registration(type(node), node)[1]


@tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(metadata={"static": True}, default="plain")


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    bias: Any
    kernel: Any


@tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slots:
    kernel: Any


@dataclasses.dataclass
class Derived:
    kernel: Any
    count: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.count = 7


tree_util.register_dataclass(Derived, data_fields=["kernel"], meta_fields=[])


class Meta(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.by_meta = True
        return made


@tree_util.register_dataclass
@dataclasses.dataclass
class WithMetaclass(metaclass=Meta):
    kernel: Any


@tree_util.register_dataclass
@dataclasses.dataclass
class WithNew:
    kernel: Any

    def __new__(cls, **_):
        made = object.__new__(cls)
        made.by_new = True
        return made


@tree_util.register_dataclass
@dataclasses.dataclass
class ManyFields:
    a: Any
    b: Any
    kernel: Any
    d: Any
    e: Any
    f: Any


@tree_util.register_dataclass
@dataclasses.dataclass
class MetaFirst:
    name: str = dataclasses.field(metadata={"static": True})
    kernel: Any


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenWithPostInit:
    kernel: Any

    def __post_init__(self):
        object.__setattr__(self, "by_post_init", True)


@tree_util.register_dataclass
@dataclasses.dataclass
class WithSetattr:
    kernel: Any

    def __setattr__(self, name, value):
        object.__setattr__(self, "set_before", name)
        object.__setattr__(self, name, value)


@tree_util.register_dataclass
@dataclasses.dataclass
class WithProperty:
    kernel: Any

    @property
    def bias(self):
        return self.made_by_property

    @bias.setter
    def bias(self, value):
        self.made_by_property = value


WithProperty = tree_util.register_dataclass(
    dataclasses.make_dataclass("WithBias", [("bias", Any)], bases=(WithProperty,))
)


@dataclasses.dataclass
class WithFactory:
    kernel: Any = dataclasses.field(default_factory=list)


tree_util.register_dataclass(WithFactory, data_fields=["kernel"], meta_fields=[])


class SetsAttributes:
    def __init__(self, kernel, bias):
        self.kernel = kernel
        self.bias = bias

    def __eq__(self, other):
        return vars(self) == vars(other)


tree_util.register_dataclass(SetsAttributes, data_fields=["kernel", "bias"], meta_fields=[])


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


for takes_keywords in (TakesKeywords, NewTakesKeywords):
    tree_util.register_dataclass(
        takes_keywords, data_fields=["kernel", "bias"], meta_fields=["name", "size"]
    )


DATACLASSES = [
    (TakesKeywords(bias=LEAF, kernel=LEAF, size=2, name="kept"), RecordLayout.CALL),
    (NewTakesKeywords(bias=LEAF, kernel=LEAF, size=2, name="kept"), RecordLayout.CALL),
    (Plain(LEAF, [LEAF, LEAF], name="kept"), RecordLayout.CALL),
    (Frozen(LEAF, {"x": LEAF}), RecordLayout.CALL),
    (Slots(LEAF), RecordLayout.CALL),
    (ManyFields(*[LEAF] * 6), RecordLayout.CALL),
    (Plain(Plain(LEAF, Frozen(LEAF, LEAF)), None, name="outer"), RecordLayout.CALL),
    (WithProperty(LEAF, LEAF), RecordLayout.CALL),
    (SetsAttributes(LEAF, LEAF), RecordLayout.CALL),
    (Derived(LEAF), RecordLayout.CALL),
    (WithMetaclass(LEAF), RecordLayout.CALL),
    (WithNew(kernel=LEAF), RecordLayout.CALL),
    (MetaFirst("kept", LEAF), RecordLayout.CALL),
    (FrozenWithPostInit(LEAF), RecordLayout.CALL),
    (WithSetattr(LEAF), RecordLayout.CALL),
    (WithFactory(LEAF), RecordLayout.CALL),
]


@pytest.mark.parametrize(("tree", "layout"), DATACLASSES, ids=lambda case: type(case).__name__)
def test_dataclasses(tree, layout):
    assert record_of(tree).layout is layout
    ours, theirs = match([tree, tree]), match_by_jax([tree, tree])
    assert ours == theirs
    for made, expected in zip(ours, theirs, strict=True):
        assert type(made) is type(tree)
        by_name = getattr(made, "__dict__", {})
        assert list(by_name.items()) == list(getattr(expected, "__dict__", {}).items())


def test_a_layout_that_the_core_does_not_know(monkeypatch):
    known = registration(Plain, Plain(LEAF, LEAF))
    for layout in (-1, len(RecordLayout)):
        made = known[0], known[1]._replace(layout=layout)
        monkeypatch.setattr("shardrules._base.node_types.registration", lambda *_, made=made: made)
        with pytest.raises(ValueError, match=f"records have no layout {layout}"):
            match(Plain(LEAF, LEAF))


def test_a_constructor_that_is_replaced_after_the_first_walk():
    @tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Changed:
        kernel: Any

    tree = Changed(LEAF)
    assert match(tree) == match_by_jax(tree)

    def init(self, kernel):
        object.__setattr__(self, "kernel", [kernel])

    Changed.__init__ = init
    assert record_of(tree).layout is RecordLayout.CALL
    assert match(tree).kernel == match_by_jax(tree).kernel == [P("tp")]


def test_a_constructor_that_returns_something():
    @tree_util.register_dataclass
    @dataclasses.dataclass(init=False)
    class Bad:
        kernel: Any

        def __init__(self, kernel):
            self.kernel = kernel
            return 1 if isinstance(kernel, P) else None

    with pytest.raises(TypeError, match="should return None"):
        match_by_jax(Bad(LEAF))
    with pytest.raises(TypeError, match="should return None"):
        match(Bad(LEAF))


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


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


def test_equinox_modules(eqx):
    class Block(eqx.Module):
        linear: Any
        kernel: Any
        width: int = eqx.field(static=True)
        name: str = eqx.field(static=True, default="block")

    block = Block(eqx.nn.Linear(3, 4, key=jax.random.key(0)), LEAF, width=3)
    for tree in (block, eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(1))):
        ours, theirs = match(tree), match_by_jax(tree)
        assert_same_modules(ours, theirs)


def test_equinox_modules_that_are_not_as_declared(eqx):
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


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


def test_nnx_variables(nnx):
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
    if not isinstance(ours["kernel"], nnx.Variable):
        return  # flax before 0.11: a Variable is a leaf
    pairs = [(ours["kernel"], theirs["kernel"]), (ours["key"], theirs["key"])]
    pairs += [(ours["b"][k], theirs["b"][k]) for k in ("kernel", "stats")]
    for a, b in pairs:
        assert type(a) is type(b)
        for slot in getattr(nnx.Variable, "__slots__", ()):
            assert getattr(a, slot) == getattr(b, slot)
        assert list(a.get_metadata().items()) == list(b.get_metadata().items())
    ours["kernel"].set_metadata(changed=True)
    assert "changed" not in state["kernel"].get_metadata()


def test_which_library_types_are_known(eqx, nnx):
    """Fails when a library's new version has to be looked at; the result stays right anyway."""
    if jax.__version_info__ < (0, 8):
        pytest.skip("equinox and flax of this JAX's time go through the registry")
    module = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    assert record_of(module).layout is RecordLayout.ATTRIBUTES
    assert record_of(nnx.Param(LEAF)).layout is RecordLayout.VARIABLE
    assert record_of(nnx.Param(LEAF)) is record_of(nnx.Param(LEAF))


@tree_util.register_dataclass
@dataclasses.dataclass
class StaticInit:
    kernel: Any

    @staticmethod
    def __init__(**given):
        assert list(given) == ["kernel"]


def test_a_dataclass_with_a_staticmethod_for_init():
    tree = object.__new__(StaticInit)
    tree.kernel = LEAF
    assert vars(match(tree)) == vars(match_by_jax(tree)) == {}
