"""Arrays matched with the tree that they are to fill: all, or a part; and where they do not fit."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.arguments import boolean, check_type
from shardrules._base.dtypes import BITS, converts, given_name, is_plain_float, key_dtype
from shardrules._base.text import counted, shown
from shardrules._checkpoint.conversion import cast, check_kept, dtype_on_devices
from shardrules._checkpoint.layouts import Shape
from shardrules._checkpoint.names import DirectedRename
from shardrules._checkpoint.targets import Problems, Target, targets_of
from shardrules._place.mesh import check_placeable
from shardrules._place.spec_trees import leaf_paths
from shardrules._plan.align import check_distinct, match_rows
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import Arrays, nested_dicts
from shardrules._plan.fold import fold_paths

_LOG: Final = logging.getLogger("shardrules")
_ShapeAndDtype = tuple[Shape, str]


class Selection:
    """What is loaded of a checkpoint; by default all, and into a tree that it fills.

    Args:
        strict: Whether arrays that the tree does not have are an error.
        only: A regex that the paths of arrays to load have in them. None: all.
        missing: A tree of values for leaves that the checkpoint lacks.

    Attributes:
        left_out: The arrays that the tree does not have.
        made: The values of leaves that are made, by path.
    """

    def __init__(self, strict: Any = True, only: Any = None, missing: Any = None) -> None:
        self.strict = boolean("strict", strict)
        check_type("only", only, str | re.Pattern | None, "a regex, or None")
        try:
            self._only = re.compile("" if only is None else only)
        except re.error as error:
            raise ValueError(f"only: {only!r} is not a regex: {error}") from None
        paths = [_with_slashes(path) for path in leaf_paths(missing)]
        self._missing = dict(zip(paths, tree_util.tree_leaves(missing), strict=True))
        for path, value in self._missing.items():
            if not callable(value) and not isinstance(value, _VALUES):
                raise TypeError(
                    f"missing: {path or 'it'} is {shown(value)}; give a tree of numbers, arrays, "
                    "and functions of shape and dtype such as jax.numpy.zeros"
                )
        self.left_out: list[str] = []
        self.made: dict[str, Any] = {}

    def options(self) -> str:
        """Return what several processes compare."""
        missing = {path: _identity(value) for path, value in self._missing.items()}
        return f"strict={self.strict}, only={self._only.pattern!r}, missing={missing}"

    def wants(self, path: str) -> bool:
        """Return whether the array at this path is loaded."""
        return self._only.search(path) is not None

    def makes(self, path: str) -> bool:
        """Return whether a leaf that the checkpoint lacks is made; it is noted then."""
        at = next((at for at in _prefixes(path) if at in self._missing), None)
        if at is not None:
            self.made[path] = self._missing[at]
        return at is not None

    def leaves_out(self, name: str) -> bool:
        """Return whether an array that the tree does not have is left out; it is noted then."""
        if not self.strict:
            self.left_out.append(name)
        return not self.strict or not self.wants(name)

    def check(self, paths: Sequence[str], problems: Problems) -> None:
        """Note what finds none of the paths."""
        if paths and not any(map(self.wants, paths)):
            problems.add("only finds no such path; correct the pattern", self._only.pattern)
        there = {at for path in paths if self._missing for at in _prefixes(path)}
        for path in self._missing.keys() - there:
            problems.add("missing: the tree has no such path", path, paths)

    def tell(self, name: str) -> None:
        """Log what is left out and what is made."""
        for what, paths in (("left out", self.left_out), ("made", list(self.made))):
            if paths and jax.process_index() == 0:
                count, patterns = counted(len(paths), "array"), ", ".join(fold_paths(paths))
                _LOG.warning("load: %s: %s %s: %s", name, count, what, patterns)


_VALUES: Final = (int, float, complex, np.ndarray, np.generic, jax.Array)


def _prefixes(path: str) -> Iterator[str]:
    """Yield the path and those of the nodes above it."""
    path = _with_slashes(path)
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _identity(value: Any) -> str:
    """Return a text that is the same in all processes for equal values."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def initial(path: str, value: Any, spec: Any, sharding: NamedSharding) -> Any:
    """Make a leaf on its devices."""
    if callable(value):
        shape = jax.eval_shape(lambda: jax.numpy.asarray(value(spec.shape, spec.dtype))).shape
    else:
        shape = np.shape(value)
    if shape != spec.shape and (shape or callable(value)):
        raise ValueError(
            f"missing: the value of {path}: its shape is {list(shape)}; the tree wants "
            f"{list(spec.shape)}"
        )
    if callable(value):
        return _init_program(value, spec.shape, spec.dtype, sharding)()
    array, loss = cast(np.asarray(value), np.dtype(spec.dtype))
    check_kept(f"missing: the value of {path}", loss)
    array = np.broadcast_to(array, spec.shape)
    return jax.make_array_from_callback(spec.shape, sharding, array.__getitem__)


@lru_cache(maxsize=256)
def _init_program(
    init: Callable[..., Any], shape: Shape, dtype: Any, sharding: NamedSharding
) -> Callable[[], Any]:
    def make() -> Any:
        return jax.numpy.asarray(init(shape, dtype)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def matched(
    arrays: Mapping[str, ArraySpec],
    tree: Any,
    records: Sequence[DirectedRename],
    dtype: str | None,
    problems: Problems,
    *,
    selection: Selection | None = None,
) -> tuple[Any, list[tuple[str, Target | None]]]:
    """Return (the tree of ShapeDtypeStructs, the path and the target of each leaf in order).

    A leaf has no target if it is not loaded, or made as it is missing.
    """
    selection = selection or Selection()
    paths = leaf_paths(tree)
    check_distinct(paths, "a leaf finds its array by its path")
    tree_specs = shapes_and_dtypes(tree, paths)
    targets = targets_of(arrays, records, problems).by_path
    selection.check(list(targets) if tree is None else paths, problems)
    if tree is None:
        tree = _tree_of({path: each for path, each in targets.items() if selection.wants(path)})
        paths = leaf_paths(tree)
        tree_specs = [(targets[path].shape, targets[path].dtype) for path in paths]
    targets = _in_tree(targets, paths, tree_specs, problems, selection)
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
    """Give weights this dtype, unless a record has one for them."""
    scales = scales_in({name: array.dtype for name, array in arrays.items()})
    specs = []
    for (shape, before), target in zip(tree_specs, targets, strict=True):
        if target is not None and target.has_own_dtype:
            specs.append((shape, target.dtype))
        elif is_plain_float(before) and not (target and target.parts[0].source in scales):
            specs.append((shape, dtype))
        else:
            specs.append((shape, before))
    return specs


def scales_in(dtypes: Mapping[str, str]) -> set[str]:
    """Find arrays of scales: `scale` is in their last word, and codes have the same parent."""
    words = {name: _bare(name).rpartition("/") for name in dtypes}
    with_codes = {
        words[name][0]
        for name, dtype in dtypes.items()
        if dtype in BITS and dtype != "bool" and BITS[dtype] <= 8
    }
    return {
        name
        for name, (parent, _, word) in words.items()
        if "scale" in word and parent in with_codes
    }


def _bare(path: str) -> str:
    """Return the path with slashes alone, and without the `value` of a box, or haliax's `0`."""
    return _with_slashes(path).removesuffix("/value").removesuffix("/0")


def _with_slashes(path: str) -> str:
    return path.replace(".", "/")


def _tree_of(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Make a tree of the names: with levels if there are slashes, as `read_model` has them."""
    leaves = {path: ArraySpec(target.shape, target.dtype) for path, target in targets.items()}
    if not any("/" in path for path in leaves):
        return leaves
    return nested_dicts(Arrays("the arrays", leaves, "/"))


def shapes_and_dtypes(tree: Any, paths: list[str]) -> list[_ShapeAndDtype]:
    return [
        (
            tuple(np.shape(leaf)),
            given_name(
                f"tree: the dtype of {path}", getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
            ),
        )
        for path, leaf in zip(paths, tree_util.tree_leaves(tree), strict=True)
    ]


def _in_tree(
    targets: Mapping[str, Target],
    paths: list[str],
    in_tree: list[_ShapeAndDtype],
    problems: Problems,
    selection: Selection,
) -> dict[str, Target]:
    """Return the targets by the tree's paths; note what is missing, left over, or differs."""
    names = list(targets)
    rows = match_rows(paths, names, _with_slashes, _bare)
    taken = set(rows)
    unused = [name for row, name in enumerate(names) if row not in taken]
    aligned: dict[str, Target] = {}
    for path, row, (shape, dtype) in zip(paths, rows, in_tree, strict=True):
        if not selection.wants(path):
            continue
        if row < 0:
            if selection.makes(path):
                continue
            embeddings = [
                name for name in targets if targets[name].shape == shape and "embed" in name
            ]
            tied = (
                f"; if {embeddings[0]} is it, too: Rename({embeddings[0]!r}, {path!r}, shared=True)"
                if embeddings and ("head" in path or "output" in path)
                else ""
            )
            problems.add(f"missing: the tree wants {dtype}{list(shape)}{tied}", path, unused)
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


def _fits(source: str, target: str) -> bool:
    """Say whether an array of one dtype can become another; floats of 8 bits are codes."""
    return source == target or (converts(source, target) and "float8" not in source + target)


def _abstract(tree: Any, tree_specs: list[_ShapeAndDtype]) -> Any:
    """Return the tree with ShapeDtypeStructs of the dtypes that arrays get on devices."""
    structs = {
        (shape, name): jax.ShapeDtypeStruct(shape, key_dtype(name) or dtype_on_devices(name))
        for shape, name in set(tree_specs)
    }
    treedef: Any = tree_util.tree_structure(tree)
    return treedef.unflatten(map(structs.__getitem__, tree_specs))


def checked_sharding(path: str, sharding: Any) -> Any:
    """Check that a sharding has devices to put an array on."""
    if sharding is None:
        raise ValueError(f"rules: {path} gets None; each array needs a spec or a sharding")
    check_placeable(sharding, lambda: path)
    return sharding
