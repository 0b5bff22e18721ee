"""Arrays matched with the tree that they are to fill, and problems where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardrules._base.dtypes import bits_of, converts, given_name, is_plain_float, key_dtype
from shardrules._checkpoint.problems import Problems
from shardrules._checkpoint.ranges import numpy_dtype
from shardrules._checkpoint.renames import Rename
from shardrules._checkpoint.selection import Selection
from shardrules._checkpoint.targets import Target, targets_of
from shardrules._place.mesh import check_placeable
from shardrules._place.named_arrays import leaf_paths
from shardrules._plan.align import check_distinct, match_rows
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import Arrays, nested_dicts

_ShapeAndDtype = tuple[tuple[int, ...], str]


def matched(
    arrays: Mapping[str, ArraySpec],
    tree: Any,
    renames: Sequence[Rename],
    dtype: str | None,
    problems: Problems,
    *,
    selection: Selection | None = None,
) -> tuple[Any, list[tuple[str, Target | None]]]:
    """Return (the tree of ShapeDtypeStructs, the path and the target of each leaf in order).

    A leaf has no target if it is not loaded, or made as it is missing.
    """
    selection = selection or Selection()
    if tree is None:
        targets = targets_of(arrays, renames, {}, problems)
        selection.check(list(targets), problems)
        problems.raise_all()
        targets = {path: target for path, target in targets.items() if selection.wants(path)}
        tree = _tree_of(targets)
        paths = leaf_paths(tree)
        tree_specs = [(targets[path].shape, targets[path].dtype) for path in paths]
    else:
        paths = leaf_paths(tree)
        check_distinct(paths, "a leaf finds its array by its path")
        tree_specs = shapes_and_dtypes(tree, paths)
        shapes = {}
        for path, (shape, _) in zip(paths, tree_specs, strict=True):
            for name in (path, _bare(path)):
                shapes[name] = shapes[name.replace("/", ".")] = shape
        targets = targets_of(arrays, renames, shapes, problems)
        selection.check(paths, problems)
        targets = _in_tree(targets, paths, tree_specs, problems, selection)
    unknown = {name for name in {name for _, name in tree_specs} if not _is_known_to_jax(name)}
    for path, (_, name) in zip(paths, tree_specs, strict=True):
        if name in unknown and path in targets:
            problems.add(f"this version of JAX has no {name}; a Rename to None leaves it out", path)
    problems.raise_all()
    in_order = [targets.get(path) for path in paths]
    if dtype is not None:
        tree_specs = _converted(tree_specs, in_order, arrays, dtype)
    return _abstract(tree, tree_specs), list(zip(paths, in_order, strict=True))


def _converted(
    tree_specs: list[_ShapeAndDtype],
    targets: Sequence[Target | None],
    arrays: Mapping[str, ArraySpec],
    dtype: str,
) -> list[_ShapeAndDtype]:
    """Give floating arrays this dtype, unless a record has one for them, or they are scales."""
    scales = scales_in({name: array.dtype for name, array in arrays.items()})

    def of_target(own_dtype: str, target: Target | None) -> str:
        if target is not None and target.has_own_dtype:
            return target.dtype
        is_kept = not is_plain_float(own_dtype) or any(
            part.source in scales for part in (target.parts[:1] if target else ())
        )
        return own_dtype if is_kept else dtype

    return [
        (shape, of_target(own_dtype, target))
        for (shape, own_dtype), target in zip(tree_specs, targets, strict=True)
    ]


def scales_in(dtypes: Mapping[str, str]) -> set[str]:
    """Find arrays of scales: `scale` is in their last word, and codes have the same parent."""
    parents, words = {}, {}
    for name in dtypes:
        parents[name], _, words[name] = _bare(name).rpartition("/")
    with_codes = {
        parents[name] for name, dtype in dtypes.items() if dtype != "bool" and bits_of(dtype) <= 8
    }
    return {name for name in dtypes if "scale" in words[name] and parents[name] in with_codes}


def _bare(path: str) -> str:
    """Return the path with slashes alone, and without the `value` of a box."""
    return _with_slashes(path).removesuffix("/value")


def _of_named_array(path: str) -> str:
    """Return the path without the place of a haliax array in its NamedArray."""
    return _bare(path).removesuffix("/0")


def _tree_of(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Make a tree of the names: with levels if there are slashes, as `read_model` has them."""
    leaves = {path: ArraySpec(target.shape, target.dtype) for path, target in targets.items()}
    if not any("/" in path for path in leaves):
        return leaves
    return nested_dicts(Arrays("the arrays", leaves, "/"))


def shapes_and_dtypes(tree: Any, paths: list[str]) -> list[_ShapeAndDtype]:
    from jax import tree_util

    return [
        (tuple(np.shape(leaf)), given_name(f"tree: the dtype of {path}", _dtype_of(leaf)))
        for path, leaf in zip(paths, tree_util.tree_leaves(tree), strict=True)
    ]


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None) or np.asarray(leaf).dtype


def _in_tree(
    targets: Mapping[str, Target],
    paths: list[str],
    in_tree: list[_ShapeAndDtype],
    problems: Problems,
    selection: Selection,
) -> dict[str, Target]:
    """Return the targets by the tree's paths; note what is missing, left over, or differs."""
    names = list(targets)
    rows = match_rows(paths, names, _with_slashes, _bare, _of_named_array)
    taken = set(rows)
    unused = [name for row, name in enumerate(names) if row not in taken]
    aligned: dict[str, Target] = {}
    for path, row, (shape, dtype) in zip(paths, rows, in_tree, strict=True):
        if not selection.wants(path):
            continue
        if row < 0:
            if selection.makes(path):
                continue
            problems.add(f"missing: the tree wants {dtype}{list(shape)}", path, unused)
            continue
        target = aligned[path] = targets[names[row]]
        if target.shape != shape:
            problems.add(
                f"another shape: the tree wants {list(shape)}, and the array has "
                f"{list(target.shape)}",
                path,
            )
        elif not _fits(target.dtype, dtype):
            problems.add(
                f"another kind of dtype: the tree wants {dtype}, and the array has {target.dtype}",
                path,
            )
    for name in unused:
        if not selection.leaves_out(name):
            problems.add(
                "left over: the tree does not have it; a Rename to None leaves it out", name
            )
    return aligned


def _with_slashes(path: str) -> str:
    return path.replace(".", "/")


def _fits(source: str, target: str) -> bool:
    """Say whether an array of one dtype can become another; floats of 8 bits are codes."""
    return source == target or (converts(source, target) and "float8" not in source + target)


def _is_known_to_jax(dtype: str) -> bool:
    import jax

    if bits_of(dtype) < 8 or key_dtype(dtype) is not None:
        return True  # the former is refused for another reason
    try:
        canonical = jax.dtypes.canonicalize_dtype(numpy_dtype(dtype))
        jax.eval_shape(lambda: jax.numpy.zeros((), canonical))
    except TypeError:
        return False
    return True


def _abstract(tree: Any, tree_specs: list[_ShapeAndDtype]) -> Any:
    """Return the tree with ShapeDtypeStructs of the dtypes that arrays get on devices."""
    import jax

    def of_leaf(shape: tuple[int, ...], name: str) -> Any:
        dtype = key_dtype(name)
        if dtype is None:
            dtype = jax.dtypes.canonicalize_dtype(numpy_dtype(name))
        return jax.ShapeDtypeStruct(shape, dtype)

    structs = {spec: of_leaf(*spec) for spec in set(tree_specs)}
    treedef = jax.tree_util.tree_structure(tree)
    return jax.tree_util.tree_unflatten(treedef, [structs[spec] for spec in tree_specs])


def checked_sharding(path: str, sharding: Any) -> Any:
    """Check that a sharding has devices to put an array on."""
    if sharding is None:
        raise ValueError(f"rules: {path} gets None; each array needs a spec or a sharding")
    check_placeable(sharding, lambda: path)
    return sharding
