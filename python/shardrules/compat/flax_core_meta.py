"""`flax.core.meta` of flax 0.12: boxes around parameters that carry logical axis names.

The same signatures and results, without flax, except that

- each library's functions accept the other's boxes, if flax is loaded; `isinstance` too;
- the key of a box's value in paths is `.value`;
- axes that are not named, out of range or named otherwise are errors that say which;
- the mesh of a legacy `with mesh:` counts, and a mesh may be a dict of axis sizes;
- nnx Variables are copied, not changed in place. docs/guides/linen.md has tables of both.

Example:
    >>> box = Partitioned(jax.numpy.ones((4, 8)), ("embed", "mlp"))
    >>> box.add_axis(0, {PARTITION_NAME: "layers"}).names
    ('layers', 'embed', 'mlp')
    >>> specs = get_partition_spec({"w": box, "b": jax.numpy.ones(2), "step": 3})
    >>> specs == {"w": PartitionSpec("embed", "mlp"), "b": PartitionSpec(), "step": None}
    True
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, dataclass_transform

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.text import shown
from shardrules._place.boxes import loaded, variable_sharding, variable_types
from shardrules._place.mesh import AnyMesh, MeshLike, context_mesh, resolve_mesh
from shardrules._rules.resolver import logical_names

if TYPE_CHECKING:
    LogicalNames = tuple[str | None, ...]

__all__ = [
    "PARTITION_NAME", "AxisMetadata", "Partitioned", "PartitioningUnspecifiedError", "add_axis",
    "get_global_mesh", "get_partition_spec", "get_sharding", "global_mesh_defined",
    "is_axis_metadata", "map_axis_meta", "remove_axis", "replace_boxed", "unbox",
    "with_partitioning",
]  # fmt: skip

A = TypeVar("A")

PARTITION_NAME = "partition_name"


class PartitioningUnspecifiedError(Exception):
    """Semantics of flax.errors.PartitioningUnspecifiedError; one of flax's, if flax is loaded."""

    def __init__(self, target: object) -> None:
        Exception.__init__(self, target)

    def __str__(self) -> str:
        return (
            "no name for the axis that a transformation adds to or takes from "
            f"{shown(self.args[0])}: give it metadata_params={{{PARTITION_NAME!r}: 'layers'}}, or "
            "None instead of 'layers' for an axis that is not sharded"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitioningUnspecifiedError, self.args


_apart: dict[Any, bool] = {}
"""Our classes of boxes that are not registered with flax's classes yet."""
_joined: dict[Any, Any] = {}
"""Our classes of boxes that are registered, with flax's classes of the same names."""


def _unspecified() -> type[PartitioningUnspecifiedError]:
    theirs = loaded("flax.errors", "PartitioningUnspecifiedError")
    return PartitioningUnspecifiedError if theirs is None else _of_both(theirs)


@functools.cache
def _of_both(theirs: Any) -> type[PartitioningUnspecifiedError]:
    """Return a class with both as bases, since `except` ignores registered classes."""
    ours = PartitioningUnspecifiedError
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__})


class AxisMetadata(ABC, Generic[A]):
    """Semantics of flax.core.meta.AxisMetadata. Subclasses should be pytree nodes."""

    _in_flax = ("flax.core.meta", "AxisMetadata")

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create a box, and register our classes with flax's, so that flax accepts our boxes."""
        _join_flax()
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_in_flax" in vars(cls):
            _apart[cls] = True

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        """Boxes of flax's class are instances of ours."""
        _join_flax()
        theirs = _joined.get(cls)
        return True if theirs is not None and theirs in subclass.__mro__ else NotImplemented

    @abstractmethod
    def unbox(self) -> A:
        """Return the value in the box, which may be a box itself."""

    @abstractmethod
    def replace_boxed(self, val: Any) -> AxisMetadata[Any]:
        """Return a box of the same kind around another value."""

    @abstractmethod
    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Return the box of a value with one more axis; the inverse of `remove_axis`."""

    @abstractmethod
    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Return the box of a value with one axis less."""


_apart[AxisMetadata] = True


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class _PytreeDataclass:
    """Makes subclasses frozen dataclasses and pytree nodes; class arguments are the dataclass's.

    A field with pytree_node=False in its metadata is static.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(**{"frozen": True, **options})(cls)
        names: dict[bool, list[str]] = {True: [], False: []}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            names[field.metadata.get("pytree_node", True)].append(field.name)
        jax.tree_util.register_dataclass(cls, names[True], names[False])

    def replace(self, **updates: Any) -> Self:
        """Return a copy with some fields replaced."""
        return dataclasses.replace(self, **updates)  # type: ignore[type-var]


class Partitioned(_PytreeDataclass, AxisMetadata[A]):
    """Semantics of flax.core.meta.Partitioned. Subclasses are pytree nodes, too."""

    _in_flax = ("flax.core.meta", "Partitioned")

    value: Any
    names: LogicalNames = dataclasses.field(metadata={"pytree_node": False})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"pytree_node": False})

    def unbox(self, apply_constraint: bool = True) -> A:
        """Return the value; if there is a mesh, with a sharding constraint to the names."""
        if not (apply_constraint and self._has_mesh()):
            return self.value  # type: ignore[no-any-return]
        sharding: Any = self.get_partition_spec()
        if self.mesh is not None:
            sharding = NamedSharding(self.mesh, sharding)
        return jax.lax.with_sharding_constraint(self.value, sharding)  # type: ignore[no-any-return]

    def replace_boxed(self, val: Any) -> Partitioned[Any]:
        """Return the same box around another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Return the box with the name params[PARTITION_NAME], after None for missing names."""
        name = self._get_partition_name(params)
        names: list[Any] = list(logical_names(self.names))
        names += [None] * (index - len(names))
        names.insert(index, name)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Return the box without the name params[PARTITION_NAME], which must be at that index."""
        expected = self._get_partition_name(params)
        names = list(logical_names(self.names))
        if not -len(names) <= index < len(names):
            raise IndexError(f"no axis {index} to remove: the names are {self.names}")
        removed = names.pop(index)
        if removed != expected:
            raise AssertionError(
                f"axis {index} of {self.names} is {removed!r}; {PARTITION_NAME!r} says that it is "
                f"{expected!r}"
            )
        return self.replace(names=tuple(names))

    def get_partition_spec(self) -> PartitionSpec:
        """Return the names as a PartitionSpec."""
        return PartitionSpec(*logical_names(self.names))

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """Return the names as a NamedSharding on the mesh."""
        return NamedSharding(mesh, self.get_partition_spec())

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Return the fields as metadata of an nnx.Variable, with `names` as `out_sharding`."""
        metadata = dict(vars(self))
        metadata["out_sharding"] = metadata.pop("names")
        return metadata

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Self:
        """Return the box with this metadata of `to_nnx_metadata`; other keys are ignored."""
        fields = {field.name for field in dataclasses.fields(cls)}
        own_fields = {**metadata, "names": metadata["out_sharding"]}
        return cls(**{key: value for key, value in own_fields.items() if key in fields})

    def _has_mesh(self) -> bool:
        return self.mesh is not None or global_mesh_defined()

    def _get_partition_name(self, params: dict[Any, Any]) -> Any:
        if PARTITION_NAME not in params:
            raise _unspecified()(self)
        return params[PARTITION_NAME]


def with_partitioning(
    fn: Callable[..., Any], names: LogicalNames, mesh: Mesh | None = None
) -> Callable[..., Partitioned[Any]]:
    """Semantics of flax.core.meta.with_partitioning."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Partitioned[Any]:
        return Partitioned(fn(*args, **kwargs), names, mesh=mesh)

    return wrapper


def is_axis_metadata(val: Any) -> bool:
    """Semantics of flax.core.meta.is_axis_metadata, for boxes of both libraries."""
    return isinstance(val, _box_type())


def map_axis_meta(fn: Callable[[AxisMetadata[Any]], Any], tree: Any) -> Any:
    """Semantics of flax.core.meta.map_axis_meta."""
    boxes = _box_type()
    return jax.tree_util.tree_map(
        lambda node: fn(node) if isinstance(node, boxes) else node,
        tree,
        is_leaf=lambda node: isinstance(node, boxes),
    )


def add_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Semantics of flax.core.meta.add_axis; for nnx Variables of flax.nnx.spmd, on copies."""
    return _with_axis_changed("add_axis", tree, index, params)


def remove_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Semantics of flax.core.meta.remove_axis; for nnx Variables as in `add_axis`."""
    return _with_axis_changed("remove_axis", tree, index, params)


def unbox(tree: Any) -> Any:
    """Semantics of flax.core.meta.unbox."""
    return map_axis_meta(lambda box: unbox(box.unbox()), tree)


def replace_boxed(tree: Any, updates: Any) -> Any:
    """Semantics of flax.core.meta.replace_boxed."""

    def updated(old: Any, new: Any) -> Any:
        if is_axis_metadata(old):
            return old.replace_boxed(replace_boxed(old.unbox(), new))
        return new

    return jax.tree_util.tree_map(updated, tree, updates, is_leaf=is_axis_metadata)


def get_partition_spec(tree: Any) -> Any:
    """Semantics of flax.core.meta.get_partition_spec; a Variable of nnx holds its spec."""

    def spec(node: Any) -> Any:
        if hasattr(node, "get_partition_spec"):
            return node.get_partition_spec()
        return PartitionSpec() if hasattr(node, "shape") else None

    return _map_sharded(spec, _variable_spec, tree)


def get_sharding(tree: Any, mesh: MeshLike) -> Any:
    """Semantics of flax.core.meta.get_sharding; the mesh may be a dict of axis sizes, too."""
    on_mesh: Any = resolve_mesh(mesh)
    replicated = NamedSharding(on_mesh, PartitionSpec())

    def sharding(node: Any) -> Any:
        if hasattr(node, "get_sharding"):
            return node.get_sharding(on_mesh)
        if hasattr(node, "get_partition_spec"):
            return NamedSharding(on_mesh, node.get_partition_spec())
        return replicated if hasattr(node, "shape") else None

    def sharding_of_variable(variable: Any) -> Any:
        spec = _variable_spec(variable)
        return jax.tree_util.tree_map(lambda inner: NamedSharding(on_mesh, inner), spec)

    return _map_sharded(sharding, sharding_of_variable, tree)


def get_global_mesh() -> AnyMesh | None:
    """Semantics of flax.core.meta.get_global_mesh, and also the mesh of a legacy `with mesh:`."""
    return context_mesh()


def global_mesh_defined() -> bool:
    """Semantics of flax.core.meta.global_mesh_defined."""
    return get_global_mesh() is not None


def _variable_spec(variable: Any) -> Any:
    return loaded("flax.nnx.spmd", "get_partition_spec")(variable)


def _with_axis_changed(change: str, tree: Any, index: int, params: dict[Any, Any]) -> Any:
    boxes = _box_type()

    def of_variable(variable: Any) -> Any:
        # flax changes Variables in place; a mapped Variable is a new one.
        copy = jax.tree_util.tree_map(lambda x: x, variable)
        return loaded("flax.nnx.spmd", change)(copy, index, params)

    return _map_sharded(
        lambda node: getattr(node, change)(index, params) if isinstance(node, boxes) else node,
        of_variable,
        tree,
    )


def _map_sharded(
    on_node: Callable[[Any], Any], on_variable: Callable[[Any], Any], tree: Any
) -> Any:
    """Map a tree: `on_node` gets boxes and leaves, `on_variable` sharded Variables."""
    boxes, variables = _box_type(), variable_types()

    # issubclass is slow for abstract classes and those of nnx.
    kind: Callable[[Any], tuple[bool, bool]] = functools.cache(
        lambda type_: (issubclass(type_, boxes), issubclass(type_, variables))
    )

    def is_leaf(node: Any) -> bool:
        is_box, is_variable = kind(type(node))
        return is_box or (is_variable and bool(variable_sharding(node)))

    def mapped(node: Any) -> Any:
        is_variable = kind(type(node))[1]
        return on_variable(node) if is_variable and variable_sharding(node) else on_node(node)

    return jax.tree_util.tree_map(mapped, tree, is_leaf=is_leaf)


def _box_type() -> Any:
    """Return the base class of all boxes: flax's, if flax is loaded."""
    _join_flax()
    return _joined.get(AxisMetadata, AxisMetadata)


def _join_flax() -> None:
    """Register our classes of boxes with flax's, if flax is loaded."""
    for ours in tuple(_apart):
        theirs = loaded(*ours._in_flax)
        if theirs is not None and _apart.pop(ours, False):
            # The reverse would be a cycle; __subclasshook__ handles it.
            theirs.register(ours)
            _joined[ours] = theirs
