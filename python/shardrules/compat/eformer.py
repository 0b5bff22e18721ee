"""`eformer.escale.partition.constraints` of eformer 0.0.95 to 0.1.0: its 17 public functions.

The same signatures and results, without eformer, except that

- the mesh of `jax.set_mesh` counts where there is no `with mesh:`; eformer finds none;
- shard functions place numpy arrays, numbers, and arrays with `P()`; nothing is compiled;
- an invalid regex is an error at once; one error names all leaves that no rule matches;
- a tuple, list, string or None as a spec means the PartitionSpec made of it;
- LOG_SHARDING_MOVE and MIN_SHARDING_SIZE are read from the environment at each access;
- axes in tuples are counted, and errors are not swallowed: docs/guides/eformer.md has each case.

Example:
    >>> rules = [("w", PartitionSpec("tp", "absent")), (".*", PartitionSpec())]
    >>> specs = match_partition_rules(rules, {"w": np.ones((4, 4)), "b": np.ones(4)})
    >>> list(specs), get_names_from_partition_spec(specs)
    (['b', 'w'], ['tp', 'absent'])
    >>> with jax.sharding.Mesh(jax.devices()[:1], ("tp",)):
    ...     tuple(get_corrected_named_sharding((4, 4), specs["w"]).spec)
    ('tp', None)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.api_util import shaped_abstractify
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.rule_specs import LibraryCorrection
from shardrules._base.specs import entries_of, entry_axes, is_partition_spec, is_unconstrained
from shardrules._base.text import shown
from shardrules._place.constraint import is_tracing
from shardrules._place.constraint import with_sharding_constraint as _with_sharding_constraint
from shardrules._place.mesh import AnyMesh, context_mesh, legacy_mesh
from shardrules._place.shard import gather
from shardrules._place.shardings import corrected_sharding, correction_losses
from shardrules._rules.dialects import EFORMER
from shardrules._rules.matcher import checked_min_size, logs_moves
from shardrules._rules.patterns import Pattern
from shardrules._rules.rules import Rules, as_rules, matcher_of, remembered_rules, specs_by_rules

if TYPE_CHECKING:
    AxisNames = str | list[str] | tuple[str, ...]

__all__ = [
    "LOG_SHARDING_MOVE", "MIN_SHARDING_SIZE", "analyze_sharding_strategy",
    "create_pattern_based_partition_spec", "extract_sharding_structure", "extract_shardings",
    "get_axes_size_in_mesh", "get_corrected_named_sharding", "get_incontext_mesh",
    "get_mesh_axis_names", "get_mesh_axis_size", "get_names_from_partition_spec",
    "get_partition_spec", "get_shardings_with_structure", "get_submesh_device_index",
    "make_shard_and_gather_fns", "match_partition_rules", "names_in_current_mesh",
    "with_sharding_constraint",
]  # fmt: skip

MIN_SHARDING_SIZE: int
LOG_SHARDING_MOVE: bool
_SETTINGS: Final[dict[str, Callable[[], int | bool]]] = {
    "MIN_SHARDING_SIZE": lambda: checked_min_size(None),
    "LOG_SHARDING_MOVE": logs_moves,
}

# eformer turns UNCONSTRAINED into None.
_CORRECTION: Final = LibraryCorrection(absent="drop", unconstrained="drop")


def __getattr__(name: str) -> int | bool:
    """Return the two settings, from the environment at each access; eformer reads it at import."""
    if name not in _SETTINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _SETTINGS[name]()


def names_in_current_mesh(*names: str) -> bool:
    """Return whether all names are axes of the context's mesh."""
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


def match_partition_rules(
    rules: Rules | Iterable[tuple[Pattern, Any]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
) -> Any:
    """`shardrules.match_partition_rules`, but the result's dicts have sorted keys, as eformer's."""
    matched = specs_by_rules(matcher_of(as_rules("rules", rules)), tree, min_size, strict)
    specs, treedef = jax.tree_util.tree_flatten(matched)
    return jax.tree_util.tree_unflatten(treedef, specs)


def make_shard_and_gather_fns(partition_specs: Any, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """Return two trees of functions: one to place an array on the mesh, one to fetch it.

    For a whole tree, `shardrules.shard` and `shardrules.gather` are faster.
    """
    on_mesh = get_incontext_mesh() if mesh is None else mesh
    replicated = NamedSharding(on_mesh, PartitionSpec())

    def shard_fn(spec: PartitionSpec) -> Callable[[Any], Any]:
        sharding = NamedSharding(on_mesh, spec)  # refuses axes that are not there

        def placed(arrays: list[Any]) -> Any:
            return _with_sharding_constraint(arrays, sharding, correction=_CORRECTION)

        return lambda tensor: _with_arrays(tensor, _placeable_array, placed)

    def gather_fn(tensor: Any) -> Any:
        array = jax.numpy.asarray(tensor)
        if is_tracing([array]):
            return _with_sharding_constraint(array, replicated)
        return gather(array)

    return (
        jax.tree_util.tree_map(shard_fn, partition_specs, is_leaf=is_partition_spec),
        jax.tree_util.tree_map(lambda _: gather_fn, partition_specs, is_leaf=is_partition_spec),
    )


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Return the distinct mesh axes of specs, in the order of their first appearance."""
    items = partition_specs.values() if isinstance(partition_specs, Mapping) else partition_specs
    names: dict[str, None] = {}
    for item in entries_of(items) if is_partition_spec(items) else items:
        if isinstance(item, str):
            names[item] = None
        elif isinstance(item, Iterable):
            names.update(dict.fromkeys(get_names_from_partition_spec(item)))
    return list(names)


def with_sharding_constraint(arr: Any, sharding: PartitionSpec | NamedSharding) -> Any:
    """Constrain each jax.Array of a tree to the sharding, corrected to its shape."""
    if isinstance(sharding, NamedSharding):
        spec, mesh = sharding.spec, sharding.mesh
    elif isinstance(sharding, PartitionSpec):
        spec, mesh = sharding, get_incontext_mesh(raise_error=False)
    else:
        raise TypeError(f"Unsupported sharding type: {type(sharding)}")
    if mesh.empty:
        if logs_moves():
            warnings.warn("A sharding constraint without a mesh: ignored.", stacklevel=2)
        return arr
    if len(spec) == 0:
        return arr

    def constrained(arrays: list[Any]) -> Any:
        for array in arrays:
            _warn_of_losses(array.shape, spec, mesh, stacklevel=5)
        return _with_sharding_constraint(arrays, spec, mesh, correction=_CORRECTION)

    return _with_arrays(
        arr, lambda leaf: leaf if isinstance(leaf, jax.Array) else None, constrained
    )


def get_corrected_named_sharding(
    shape: tuple[int, ...], partition_spec: Any, raise_mesh_error: bool = True
) -> NamedSharding:
    """Return the NamedSharding of an array on the context's mesh, corrected to its shape."""
    mesh = get_incontext_mesh(raise_error=raise_mesh_error)
    if mesh.empty:
        warnings.warn("Active mesh is empty. Returning replicated NamedSharding.", stacklevel=2)
        return NamedSharding(mesh, PartitionSpec())
    spec = _as_spec(partition_spec)
    if len(spec) == 0:
        return NamedSharding(mesh, PartitionSpec())
    _warn_of_losses(shape, spec, mesh, stacklevel=3)
    return corrected_sharding(spec, tuple(shape), mesh, _CORRECTION)


def analyze_sharding_strategy(
    pytree: Any, partition_specs: Any, mesh: AnyMesh | None = None
) -> dict[str, Any]:
    """Return statistics of the distribution of a tree over the devices.

    Beside eformer's totals, in Python's ints: "memory_per_device" (bytes by device, or by index on
    an AbstractMesh), "balance_score" (their mean divided by their maximum), and "partition_stats"
    (leaves, parameters and bytes by spec).
    """
    from shardrules._plan.compare import DevicesOfMesh
    from shardrules._plan.compare import elements as elements_of

    on_mesh = get_incontext_mesh() if mesh is None else mesh
    axis_sizes = dict(on_mesh.shape)
    of_mesh = DevicesOfMesh(axis_sizes)
    total = sharded = 0
    bytes_held = np.zeros(of_mesh.count, np.int64)
    stats: dict[str, dict[str, int]] = {}

    def add(leaf: Any, spec: PartitionSpec) -> None:
        nonlocal total, sharded, bytes_held
        elements = int(np.prod(leaf.shape, dtype=object))
        total += elements
        sharded += elements if spec != PartitionSpec() else 0
        absent = [a for entry in entries_of(spec) for a in entry_axes(entry) if a not in axis_sizes]
        if absent:
            raise KeyError(f"{absent[0]!r} of {spec} is no axis of the mesh {axis_sizes}")
        bytes_held += elements_of(of_mesh.shards(leaf.shape, spec)) * leaf.dtype.itemsize
        of_spec = stats.setdefault(str(spec), {"leaves": 0, "parameters": 0, "bytes": 0})
        of_spec["leaves"] += 1
        of_spec["parameters"] += elements
        of_spec["bytes"] += elements * leaf.dtype.itemsize

    jax.tree_util.tree_map(add, pytree, partition_specs)
    devices = on_mesh.devices.ravel() if isinstance(on_mesh, Mesh) else range(of_mesh.count)
    return {
        "total_parameters": total,
        "sharded_parameters": sharded,
        "memory_per_device": {
            str(device): int(n) for device, n in zip(devices, bytes_held, strict=True)
        },
        "balance_score": float(bytes_held.mean() / bytes_held.max()) if bytes_held.max() else 1.0,
        "partition_stats": stats,
    }


def create_pattern_based_partition_spec(
    pattern: str, mesh: AnyMesh | None = None, default_spec: PartitionSpec | None = None
) -> Callable[[str, Any], PartitionSpec]:
    """Return a function (name, array) -> PartitionSpec of rules "regex|regex->axis.axis,..."."""
    if mesh is None:
        get_incontext_mesh()
    default = PartitionSpec() if default_spec is None else default_spec
    pairs: list[tuple[str, PartitionSpec]] = []
    for rule in pattern.split(","):
        if "->" not in rule:
            continue
        if rule.count("->") > 1:
            raise ValueError(f"the rule {rule!r} has more than one '->'; separate rules by commas")
        regexes, axes = rule.split("->")
        spec = PartitionSpec(*axes.split("."))
        pairs.extend((regex, spec) for regex in regexes.split("|"))
    rules = remembered_rules(pairs, EFORMER)

    def get_partition_spec(name: str, array: Any) -> PartitionSpec:
        if pairs and not isinstance(name, str):
            raise TypeError(f"the name is {shown(name)}; it must be a string")
        index = rules.first_match(name) if pairs else None
        return default if index is None else pairs[index][1]

    return get_partition_spec


def extract_sharding_structure(pytree: Any) -> Any:
    """Replace each leaf by its NamedSharding, or by None if it has none."""

    def of_leaf(leaf: Any) -> NamedSharding | None:
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        return sharding if isinstance(sharding, NamedSharding) else None

    return jax.tree_util.tree_map(of_leaf, pytree)


get_shardings_with_structure = extract_sharding_structure


def get_incontext_mesh(raise_error: bool = True) -> Any:
    """Return the mesh of `with mesh:`, or else that of `jax.set_mesh` or `use_abstract_mesh`."""
    mesh = _context_mesh()
    if mesh is None and raise_error:
        raise AssertionError("No mesh found under this context manager.")
    return Mesh(np.empty((), dtype=object), ()) if mesh is None else mesh


def get_axes_size_in_mesh(axis_names: AxisNames, mesh: AnyMesh | None = None) -> int:
    """Return the number of devices along axes; KeyError if the mesh lacks one."""
    sizes = (get_incontext_mesh() if mesh is None else mesh).shape
    return prod(sizes[axis] for axis in _names_tuple(axis_names))


def get_mesh_axis_names(mesh: AnyMesh | None = None) -> list[str]:
    """Return the axis names of the mesh. Default: the context's mesh."""
    return list((get_incontext_mesh() if mesh is None else mesh).shape)


def get_mesh_axis_size(axis_names: AxisNames) -> Any:
    """Count the devices along axes that a function is mapped over (shard_map, vmap, pmap)."""
    return prod(jax.lax.psum(1, axis_name=axis) for axis in _names_tuple(axis_names))


def get_submesh_device_index(axis_names: AxisNames) -> Any:
    """Return the device's position along the axes, in row-major order, inside a mapped function."""
    index: Any = 0
    for axis in _names_tuple(axis_names):
        index = index * jax.lax.psum(1, axis_name=axis) + jax.lax.axis_index(axis)
    return index


def extract_shardings(tree: Any, mesh: AnyMesh | None = None) -> Any:
    """Replace each leaf by the NamedSharding of its `.sharding`; ValueError if one needs a mesh."""
    on_mesh = _context_mesh() if mesh is None else mesh

    def of_leaf(leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, PartitionSpec):
            if on_mesh is None:
                raise ValueError("Mesh can not be None (use function under with `mesh`).")
            return NamedSharding(on_mesh, sharding)
        return sharding if isinstance(sharding, NamedSharding) else None

    return jax.tree_util.tree_map(of_leaf, tree)


def get_partition_spec(tree: Any) -> Any:
    """Replace each jax.Array by its PartitionSpec, and each Python number by PartitionSpec()."""

    def of_leaf(leaf: Any) -> PartitionSpec:
        if isinstance(leaf, jax.Array):
            sharding: Any = leaf.sharding
            if not hasattr(sharding, "spec"):
                raise AttributeError(
                    f"an array of shape {leaf.shape} has a {type(sharding).__name__}, which has no "
                    "spec: place it on a mesh first"
                )
            return sharding.spec  # type: ignore[no-any-return]
        if isinstance(leaf, (int, float)):
            return PartitionSpec()
        raise ValueError(f"Unsupported leaf type for get_partition_spec: {type(leaf)}")

    return jax.tree_util.tree_map(of_leaf, tree)


def _context_mesh() -> AnyMesh | None:
    # Code for eformer needs a mesh with devices, also inside shard_map.
    return legacy_mesh() or context_mesh()


def _as_spec(spec: Any) -> PartitionSpec:
    if is_partition_spec(spec):
        return spec
    entries = () if spec is None else (spec,) if isinstance(spec, str) else spec
    return PartitionSpec(*entries)


def _with_arrays(
    tree: Any, array_of: Callable[[Any], Any], change: Callable[[list[Any]], list[Any]]
) -> Any:
    """Return the tree with `change` called once on the arrays that `array_of` finds in leaves."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    arrays = {i: array for i, leaf in enumerate(leaves) if (array := array_of(leaf)) is not None}
    for index, array in zip(arrays, change(list(arrays.values())), strict=True):
        leaves[index] = array
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _placeable_array(leaf: Any) -> Any:
    """Return the leaf as a jax or numpy array; None if JAX cannot hold it."""
    if isinstance(leaf, jax.Array):
        return leaf
    is_numpy = isinstance(leaf, (np.ndarray, np.generic))
    if not is_numpy and not isinstance(leaf, (int, float, complex)):
        return None
    array = np.asanyarray(leaf) if is_numpy else leaf
    try:
        shaped_abstractify(array)
    except (TypeError, ValueError, OverflowError):  # text, the other byte order, a mask, 2**40
        return None
    return array if is_numpy else jax.numpy.asarray(array)  # a number's type is weak


def _names_tuple(axis_names: Any) -> Iterable[str]:
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    if not isinstance(names, (list, tuple)):
        raise TypeError(f"axis_names must be a string or a list or tuple of them, not {names!r}")
    return names


def _warn_of_losses(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh, stacklevel: int
) -> None:
    """With LOG_SHARDING_MOVE, one warning for each correction, as in eformer."""
    if not logs_moves():
        return
    reasons = [
        (loss.dim, f"{loss.kind}: {', '.join(loss.axes)}" if loss.axes else loss.kind)
        for loss in correction_losses(spec, tuple(shape), mesh, _CORRECTION)
    ]
    reasons += [
        (dim, "UNCONSTRAINED")
        for dim, entry in enumerate(entries_of(spec)[: len(shape)])
        if is_unconstrained(entry)
    ]
    for dim, reason in reasons:
        warnings.warn(
            f"{spec} for an array of shape {shape} on a mesh of {dict(mesh.shape)}: dimension "
            f"{dim} is corrected to None ({reason})",
            stacklevel=stacklevel,
        )
