"""A model of each family in docs/evidence.md's table, and models of any size."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import equinox
import flax.core
import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

LEAF: Final = jax.ShapeDtypeStruct((8, 8), "int8")
ATTENTION: Final = ("wq", "wk", "wv", "wo")
ATTENTION_RULES: Final = [
    (r"attn/(wq|wk|wv)/kernel", P("fsdp", "tp")), ("wo/kernel", P("tp")), (".*", P()),
]  # fmt: skip
MakeType = Callable[[str, tuple[str, ...]], Any]


def attention_layers(leaves: int) -> dict[str, Any]:
    """Return layers of eight leaves, each with its own dicts, as in a model."""
    return {
        "layers": {
            str(i): {"attn": {n: {"kernel": LEAF, "bias": LEAF} for n in ATTENTION}}
            for i in range(leaves // 8)
        }
    }


def families(nested: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dict of arrays as trees of other nodes, by name."""
    count: Any = jax.ShapeDtypeStruct((), "int32")
    moments = (nested, jax.tree_util.tree_map(lambda leaf: leaf, nested))
    return {
        "FrozenDict": flax.core.freeze(nested),
        "nnx.State of Params": nnx.State(_variables(nested)),
        "optax Adam state": (optax.ScaleByAdamState(count, *moments), optax.EmptyState()),
        "equinox modules": _modules(nested, _equinox_module, {}),
        "dataclasses": _modules(nested, partial(_dataclass, frozen=False), {}),
        "frozen dataclasses": _modules(nested, partial(_dataclass, frozen=True), {}),
        "namedtuples": _modules(nested, collections.namedtuple, {}),
    }


def _variables(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _variables(child) for key, child in tree.items()}
    return nnx.Param(tree)


def _modules(tree: Any, make: MakeType, types: dict[tuple[str, ...], Any]) -> Any:
    """Turn dicts of names into nodes with these fields, and numbered ones into lists."""
    if not isinstance(tree, dict):
        return tree
    children = {key: _modules(child, make, types) for key, child in tree.items()}
    if all(key.isdigit() for key in children):
        return list(children.values())
    names = tuple(children)
    if names not in types:
        types[names] = make(f"Block{len(types)}", names)
    return types[names](**children)


def _equinox_module(name: str, fields: tuple[str, ...]) -> Any:
    return type(name, (equinox.Module,), {"__annotations__": dict.fromkeys(fields, object)})


def _dataclass(name: str, fields: tuple[str, ...], *, frozen: bool) -> Any:
    node_type = dataclasses.make_dataclass(name, [(f, object) for f in fields], frozen=frozen)
    return jax.tree_util.register_dataclass(node_type)
