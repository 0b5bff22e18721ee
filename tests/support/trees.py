"""Trees of every kind of pytree node, Python's, JAX's and other libraries'."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax import tree_util

Pair = namedtuple("Pair", ["first", "second"])


class Empty(NamedTuple):
    pass


@tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, *children, note="x"):
        self.children, self.note = children, note

    def tree_flatten(self):
        return self.children, self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(*children, note=note)


@tree_util.register_pytree_with_keys_class
class WithKeys(WithoutKeys):
    def tree_flatten_with_keys(self):
        return [(f"<{i}>", child) for i, child in enumerate(self.children)], self.note


@tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(metadata={"static": True}, default="block")


class RegisteredPair(NamedTuple):
    a: Any
    b: Any


tree_util.register_pytree_with_keys(
    RegisteredPair,
    lambda p: (((tree_util.GetAttrKey("z"), p.b),), p.a),
    lambda a, children: RegisteredPair(a, children[0]),
)


class DictSubclass(dict):
    """No pytree node: a leaf to JAX."""


def paths_of(tree, path=""):
    """{path: leaf} of dicts in dicts."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        found: leaf
        for key, child in tree.items()
        for found, leaf in paths_of(child, f"{path}/{key}" if path else key).items()
    }


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# Those with None alone, or a type that JAX does not know, which functions that want arrays refuse.
WITHOUT_ARRAYS = {"none", "empty containers", "dict subclass"}


def kinds_of_trees():
    leaf = array(4, 8)
    return {
        "leaf": leaf,
        "none": None,
        "dict": {"b": leaf, "a": {"c": leaf}},
        "empty containers": {"a": {}, "b": [], "c": (), "d": None, "e": Empty()},
        "OrderedDict": OrderedDict([("b", leaf), ("a", leaf)]),
        "defaultdict": {"x": defaultdict(list, {"b": leaf, "a": [leaf]})},
        "list": [leaf, [leaf, None], {"k": leaf}],
        "long list": [leaf] * 120,
        "tuple": (leaf, (leaf,), ()),
        "namedtuple": Pair(leaf, Pair({"k": leaf}, 3)),
        "registered namedtuple": [RegisteredPair(1, leaf), Pair(leaf, leaf)],
        "without keys": {"n": WithoutKeys(leaf, {"k": leaf}, note="kept")},
        "with keys": [WithKeys(leaf, [leaf], note="kept")],
        "dataclass": {"block": Block(leaf, array(8), name="kept")},
        "int keys": {2: leaf, 10: {1: leaf}},
        "tuple keys": {(1, "a"): leaf, (0, "b"): leaf},
        "float and bool keys": {1.5: leaf, True: leaf},
        "bytes keys": {b"x": leaf},
        "odd text keys": {"a/b": {"": leaf, "\n": leaf, "é": leaf, "\U0001f600": leaf}},
        "dict subclass": {"leaf": DictSubclass(a=leaf)},
        "leaves": [np.zeros((2, 3)), np.float32(1), 1, 2.5, "text", jax.numpy.ones(3), object],
    }


@cache
def trees_of_libraries():
    trees = {}
    leaf = array(4, 8)
    flax = pytest.importorskip("flax")
    from flax import nnx

    trees["FrozenDict"] = flax.core.freeze({"b": leaf, "a": {"c": leaf}})

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)

    trees["nnx.State"] = nnx.state(Model(nnx.Rngs(0)))
    trees["nnx pure dict"] = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(0))))

    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    trees["equinox Module"] = mlp
    trees["equinox arrays"] = eqx.filter(mlp, eqx.is_array)

    optax = pytest.importorskip("optax")
    params = {"w": {"kernel": np.zeros((4, 8), np.float32)}, "b": np.zeros(3, np.float32)}
    adam = optax.adam(1e-3)
    trees["optax Adam"] = adam.init(params)
    trees["optax MultiSteps"] = optax.MultiSteps(adam, 2).init(params)
    trees["optax masked"] = optax.masked(adam, {"w": True, "b": False}).init(params)
    trees["optax chain"] = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    return trees
