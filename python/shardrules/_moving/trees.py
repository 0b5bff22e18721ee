"""A tree and the arrays that are to fill it: which is which, and what does not fit.

Costs a few look-ups per array. Must not know where the arrays are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shardrules._arguments import check_tree
from shardrules._dtypes import bits_of, given_name, is_plain_float
from shardrules._files.arrays import Arrays, nested
from shardrules._files.leaves import ArraySpec
from shardrules._format import shown
from shardrules._matching.rules import Rules
from shardrules._moving.reading import numpy_dtype
from shardrules._moving.renames import Rename
from shardrules._moving.targets import Problems, Target, targets_of
from shardrules._planning.placing.survey import survey

__all__ = ["checked_sharding", "matched", "paths_of", "shapes_and_dtypes"]

_ANY_PATH: Final = Rules([("", ())])


def matched(
    arrays: Mapping[str, ArraySpec],
    tree: Any,
    renames: Sequence[Rename],
    dtype: str | None,
    problems: Problems,
) -> tuple[Any, list[tuple[str, Target]]]:
    """(the tree of ShapeDtypeStructs, the path and the target of each leaf in order).

    Args:
        arrays: The arrays that there are.
        tree: The tree to make. None: the arrays' names.
        renames: What becomes of the arrays.
        dtype: The dtype of floating arrays; None: the tree's or the arrays'.
        problems: What is wrong already.

    Raises:
        FileError: Something does not fit; everything is listed.
    """
    if tree is None:
        targets = targets_of(arrays, renames, {}, problems)
        problems.raise_all()
        tree = _tree_of(targets)
        paths = paths_of(tree)
        wanted = [(targets[path].shape, targets[path].dtype) for path in paths]
    else:
        check_tree("tree", tree)
        paths, wanted = paths_of(tree), shapes_and_dtypes(tree)
        shapes = {}
        for path, (shape, _) in zip(paths, wanted, strict=True):
            shapes[path] = shapes[path.replace("/", ".")] = shape
        targets = targets_of(arrays, renames, shapes, problems)
        targets = _in_tree(targets, paths, wanted, problems)
    unknown = {dtype for dtype in {own for _, own in wanted} if not _is_known_to_jax(dtype)}
    for path, (_, own) in zip(paths, wanted, strict=True):
        if own in unknown:
            problems.add(f"this version of JAX has no {own}; a Rename to None leaves it out", path)
    problems.raise_all()
    return _abstract(tree, wanted, dtype), [(path, targets[path]) for path in paths]


def _tree_of(targets: Mapping[str, Target]) -> dict[str, Any]:
    """The names as a tree: with levels if there are slashes, as `read_model` has them."""
    leaves = {path: ArraySpec(target.shape, target.dtype) for path, target in targets.items()}
    if not any("/" in path for path in leaves):
        return leaves
    return nested(Arrays("the arrays", leaves, "/"))


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf, in JAX's order."""
    from jax import tree_util

    leaves = survey(tree, _ANY_PATH)
    return [leaves.paths[row] for row in tree_util.tree_leaves(leaves.tree)]


def shapes_and_dtypes(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    from jax import tree_util

    return [
        (tuple(np.shape(leaf)), given_name("a dtype of tree", _dtype_of(leaf)))
        for leaf in tree_util.tree_leaves(tree)
    ]


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None) or np.asarray(leaf).dtype


def _in_tree(
    targets: Mapping[str, Target],
    paths: list[str],
    wanted: list[tuple[tuple[int, ...], str]],
    problems: Problems,
) -> dict[str, Target]:
    """The targets by the tree's paths; notes what is missing, left over, or something else."""
    by_path = {path.replace(".", "/"): target for path, target in targets.items()} | dict(targets)
    found: dict[str, Target] = {}
    unused: list[str] = []
    for path, (shape, dtype) in zip(paths, wanted, strict=True):
        # A box of flax has its array under `value`.
        target = by_path.get(path) or by_path.get(path.replace(".", "/").removesuffix("/value"))
        if target is None:
            problems.add(f"missing: the tree wants {dtype}{list(shape)}", path, unused)
            continue
        found[path] = target
        if target.shape != shape:
            problems.add(
                f"another shape: the tree wants {list(shape)}, and the array has "
                f"{list(target.shape)}",
                path,
            )
        elif not _converts(target.dtype, dtype):
            problems.add(
                f"another kind of dtype: the tree wants {dtype}, and the array has {target.dtype}",
                path,
            )
    taken = {id(target) for target in found.values()}
    left_over = "left over: the tree does not have it; a Rename to None leaves it out"
    for path, target in targets.items():
        if id(target) not in taken:
            problems.add(left_over, path)
            unused.append(path)
    return found


def _converts(of: str, to: str) -> bool:
    """Whether a conversion can be meant: between floats that are no codes of quantization."""
    return (
        of == to
        or (is_plain_float(of) and is_plain_float(to))
        or {_kind(of), _kind(to)}
        in (
            {"i"},
            {"u"},
            {"i", "u"},
            {"c"},
        )
    )


def _kind(dtype: str) -> str:
    return numpy_dtype(dtype).kind if bits_of(dtype) >= 8 else ""


def _is_known_to_jax(dtype: str) -> bool:
    import jax

    if bits_of(dtype) < 8:
        return True  # which is refused for another reason
    try:
        canonical = jax.dtypes.canonicalize_dtype(numpy_dtype(dtype))
        jax.eval_shape(lambda: jax.numpy.zeros((), canonical))
    except TypeError:
        return False
    return True


def _abstract(tree: Any, wanted: list[tuple[tuple[int, ...], str]], dtype: str | None) -> Any:
    """The tree with ShapeDtypeStructs of the dtypes that arrays get on devices."""
    import jax

    def of_leaf(shape: tuple[int, ...], own: str) -> Any:
        to = dtype if dtype is not None and is_plain_float(own) else own
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(numpy_dtype(to)))

    made = {one: of_leaf(*one) for one in set(wanted)}
    treedef = jax.tree_util.tree_structure(tree)
    return jax.tree_util.tree_unflatten(treedef, [made[one] for one in wanted])


def checked_sharding(path: str, sharding: Any) -> Any:
    """The sharding, which has devices to put an array on."""
    from jax.sharding import Mesh

    if sharding is None:
        raise ValueError(f"rules: {path} gets None; each array needs a spec or a sharding")
    if not isinstance(sharding.mesh, Mesh):
        raise TypeError(
            "arrays can be placed on a jax.sharding.Mesh of devices; this mesh is "
            f"{shown(sharding.mesh)}"
        )
    return sharding
