"""`load`: the arrays of a checkpoint, straight into sharded arrays."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.arguments import boolean, byte_size, check_type
from shardrules._base.dtypes import (
    BITS,
    RANDOM_KEYS,
    as_dtype_name,
    as_float_name,
    bits_of,
    converts,
    is_plain_float,
    key_dtype,
)
from shardrules._base.io import FileError, collector_paused, memory_within
from shardrules._base.mistakes import in_order
from shardrules._base.text import counted, shown
from shardrules._checkpoint.conversion import cast, check_kept, numpy_dtype
from shardrules._checkpoint.layouts import Shape
from shardrules._checkpoint.names import DirectedRename, Rename, checked_renames, forwards
from shardrules._checkpoint.targets import Problems, Target, plain_target, targets_of
from shardrules._checkpoint.units import DEFAULT_IN_FLIGHT, Job, Progress, Reader, digest, fill
from shardrules._place.decider import RulesLike
from shardrules._place.mesh import MeshLike, check_placeable
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall, rows_of
from shardrules._place.spec_trees import leaf_paths
from shardrules._plan.align import check_distinct, match_rows
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import Arrays, nested_dicts, read_arrays
from shardrules._plan.files.safetensors import is_part
from shardrules._plan.fold import fold_paths
from shardrules._plan.plan import Plan

_LOG: Final = logging.getLogger("shardrules")
_VALUES: Final = (int, float, complex, np.ndarray, np.generic, jax.Array)
_ShapeAndDtype = tuple[Shape, str]
_NO_DATA: Final = (
    "it lists arrays and does not have their data; give a safetensors file, its index or a "
    "directory of them; orbax restores its own checkpoints, onto plan.abstract()"
)
_IMPLEMENTATIONS: Final = {dtype: name for name, dtype in RANDOM_KEYS.items()}


@in_order("path", "rules", "mesh")
def load(
    source: str | os.PathLike[str],
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    tree: Any = None,
    renames: Iterable[Rename] = (),
    dtype: Any = None,
    strict: bool = True,
    only: str | re.Pattern[str] | None = None,
    missing: Any = None,
    progress: Progress | None = None,
    max_bytes_in_flight: int | str = DEFAULT_IN_FLIGHT,
) -> Any:
    """Load a checkpoint of safetensors files into sharded arrays.

    Each process reads only the bytes that its own devices hold, and short gaps between them.
    Several processes agree on the call first, as in `shard`; one that fails makes all fail.

    Args:
        source: A safetensors file, the index of several, or a directory of them, here or by the URL
            of a store, such as gs:// or s3://.
        rules: A `Plan`; `Rules` or (pattern, spec) pairs; `LogicalRules`; or specs or shardings, as
            in `shard`.
        mesh: The Mesh for rules and PartitionSpecs. Default: the context's, or the plan's.
        tree: A pytree of abstract arrays, whose structure, shapes and dtypes the result gets.
            Arrays are found by their paths; `.` in a name counts as `/`. Default: the plan's tree,
            or the checkpoint's names, as in `read_model`; with levels if paths have slashes.
        renames: `Rename` templates for arrays that have other names in the tree, or lie otherwise.
        dtype: The dtype of all floating arrays of 16 bits or more, a float; but not of scales
            beside FP8 or int8 codes, nor where a `Rename` has its own. Default: the tree's dtypes,
            or the checkpoint's.
        strict: Whether arrays that the tree does not have are an error. False leaves them out, and
            the log "shardrules" lists them. Default: True.
        only: A regex: load only arrays whose paths in the tree it finds. If there is a `tree`, its
            other leaves stay in the result as they are. Default: all.
        missing: A tree of values for leaves of the tree that the checkpoint lacks, or a part of
            one: numbers, and arrays that each process has whole. A value stands for all leaves
            below its path, too. The log lists what is made. Default: a missing leaf is an error.
        progress: A function that is called with the bytes read so far and those that this process
            will read. Default: None.
        max_bytes_in_flight: Maximum bytes of the host's memory for what has been read and is not on
            devices yet, such as "1GB"; an array's part on one device that takes more goes
            alone. Default: 2 GiB.

    Returns:
        The tree of jax.Arrays. As on devices, 64-bit numbers are 32-bit without `jax_enable_x64`.
        On CPUs an array may use the memory into which it was read, which a donating jit then
        copies.

    Raises:
        FileError: There is no such checkpoint; it is damaged; it changes while it is read; or it
            does not fit the tree: all arrays that are missing, left over or of another shape are
            listed; or its new dtype lacks a finite value. A ValueError.
        ValueError: As `named_shardings`.
        TypeError: The mesh has no devices.
        RuntimeError: In several processes: their calls differ, or a process has failed or is late.

    Example:
        >>> import os, tempfile
        >>> import jax, numpy as np
        >>> import safetensors.numpy
        >>> import shardrules as sr
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("tp",))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = os.path.join(directory, "model.safetensors")
        ...     safetensors.numpy.save_file({"wq": np.ones((4, 8), "float32")}, file)
        ...     params = sr.load(file, [("wq", (None, "tp"))], mesh)
        >>> tuple(params["wq"].sharding.spec), params["wq"].shape
        ((None, 'tp'), (4, 8))
    """
    check_type("source", source, str | os.PathLike, "the path of a checkpoint")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {shown(progress)}; it must be a function of two numbers")
    # What is made here has no cycles, and is much to visit.
    with JointCall("load") as call, collector_paused():
        renames = checked_renames(renames)
        dtype_name = None if dtype is None else as_float_name("dtype", dtype)
        most = byte_size("max_bytes_in_flight", max_bytes_in_flight)
        selection = _Selection(strict, only, missing)
        if isinstance(rules, Plan):
            plan = rules if mesh is None else rules.on_mesh(mesh)
            tree = plan.abstract() if tree is None else tree
            rules, mesh = plan.shardings(), None
        if tree is None and (missing or not selection.strict):
            raise ValueError(
                "missing and strict=False are for a tree to fill: give tree, or a plan as rules"
            )
        if call.joint and only_process(rules, mesh) is not None:
            call.alone()
        is_joint = call.joint
        arrays = _arrays_of(os.fspath(source))
        in_files = {name: _as_in_file(leaf) for name, leaf in arrays.leaves.items()}
        abstract, targets = match_tree(
            arrays.leaves,
            tree,
            forwards(renames),
            dtype_name,
            Problems(arrays.name),
            selection=selection,
        )
        leaves, treedef, shardings = requested_shardings(abstract, rules, mesh)
        rows = list(zip(targets, leaves, shardings, strict=True))
        # Many leaves share a sharding, which is checked once.
        distinct = {
            id(to): (path, to)
            for (path, target), _, to in rows
            if target is not None or path in selection.initial
        }
        for path, sharding in distinct.values():
            checked_sharding(path, sharding)
        jobs = [
            _job(path, target, leaf, sharding, in_files)
            for (path, target), leaf, sharding in rows
            if target is not None
        ]
        call.agree(
            lambda: [
                ("the data of the files", digest(in_files)),
                *rows_of(abstract, shardings, f"{selection.options()}, renames={renames}"),
            ]
        )
    with JointCall("load", "while it was reading") as call, collector_paused():
        if not is_joint:
            call.alone()
        with Reader(in_files) as reader:
            arrays_of_jobs = fill(jobs, reader, most, progress)
        values = leaves if tree is None else tree_util.tree_leaves(tree)
        for i, ((path, target), spec, sharding) in enumerate(rows):
            if target is not None:
                values[i] = _as_keys(next(arrays_of_jobs), target.dtype, sharding)
            elif path in selection.initial:
                values[i] = _initial(path, selection.initial[path], spec, sharding)
        selection.tell(arrays.name)
        call.agree(lambda: [("the arrays", "read")])
    return treedef.unflatten(values)


def _arrays_of(source: str) -> Arrays:
    """Read the headers of a checkpoint."""
    with memory_within(DEFAULT_IN_FLIGHT):
        arrays = read_arrays(source, keeps_places=True)
    if any(leaf.file is None for leaf in arrays.leaves.values()):
        raise FileError(f"{arrays.path}: {_NO_DATA}")
    if jax.process_index() == 0 and is_part(str(arrays.path)):
        _LOG.warning("load: %s is a part of a model; its directory has all", arrays.path)
    for name, leaf in arrays.leaves.items():
        if bits_of(leaf.dtype) < 8:
            raise FileError(
                f"{arrays.name}: {name}: {leaf.dtype} is packed, and numpy cannot unpack it: write "
                "it as U8, two in a byte, and unpack it in a jit of your own"
            )
    return arrays


def _as_in_file(array: ArraySpec) -> ArraySpec:
    """Return what is in the file: of random keys, their words."""
    if key_dtype(array.dtype) is None:
        return array
    shape = (*array.shape, bits_of(array.dtype) // 32)
    return ArraySpec(shape, "uint32", array.file, array.begin)


def _job(
    path: str, target: Target, leaf: Any, sharding: Any, in_files: Mapping[str, ArraySpec]
) -> Job:
    """Return what is to be made; of random keys, their words."""
    if key_dtype(target.dtype) is None:
        return Job(path, target, leaf.dtype, sharding)
    if not target.is_plain:
        raise ValueError(f"{path}: random keys can be renamed, and not be rearranged, by load")
    name = target.parts[0].source
    return Job(path, plain_target(name, in_files[name]), np.dtype("uint32"), sharding)


def _as_keys(array: Any, dtype: str, sharding: Any) -> Any:
    """Return random keys of their words; any other array as it is."""
    implementation = _IMPLEMENTATIONS.get(dtype)
    return array if implementation is None else _key_program(implementation, sharding)(array)


@lru_cache(maxsize=64)
def _key_program(implementation: str, sharding: NamedSharding) -> Any:
    return jax.jit(partial(jax.random.wrap_key_data, impl=implementation), out_shardings=sharding)


class _Selection:
    """What is loaded of a checkpoint, as `load` says; by default all, into a tree that it fills."""

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
            if not isinstance(value, _VALUES):
                raise TypeError(
                    f"missing: {path or 'it'} is {shown(value)}; give a tree of numbers and "
                    "arrays, such as what an init of yours makes"
                )
        # Arrays that the tree does not have; and the values of leaves that are made, by path.
        self.left_out: list[str] = []
        self.initial: dict[str, Any] = {}

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
            self.initial[path] = self._missing[at]
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
        for what, paths in (("left out", self.left_out), ("made", list(self.initial))):
            if paths and jax.process_index() == 0:
                count, patterns = counted(len(paths), "array"), ", ".join(fold_paths(paths))
                _LOG.warning("load: %s: %s %s: %s", name, count, what, patterns)


def _prefixes(path: str) -> Iterator[str]:
    """Yield the path and those of the nodes above it."""
    path = _with_slashes(path)
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _identity(value: Any) -> str:
    """Return a text that is the same in all processes for equal values."""
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _initial(path: str, value: Any, spec: Any, sharding: Any) -> Any:
    """Return a leaf that the checkpoint lacks, on its devices."""
    if np.shape(value) not in ((), spec.shape):
        raise ValueError(
            f"missing: the value of {path}: its shape is {list(np.shape(value))}; the tree wants "
            f"{list(spec.shape)}"
        )
    array, loss = cast(np.asarray(value), np.dtype(spec.dtype))
    check_kept(f"missing: the value of {path}", loss)
    array = np.broadcast_to(array, spec.shape)
    return jax.make_array_from_callback(spec.shape, sharding, array.__getitem__)


def match_tree(
    arrays: Mapping[str, ArraySpec],
    tree: Any,
    records: Sequence[DirectedRename],
    dtype: str | None,
    problems: Problems,
    *,
    selection: _Selection | None = None,
) -> tuple[Any, list[tuple[str, Target | None]]]:
    """Return (the tree of ShapeDtypeStructs, the path and the target of each leaf in order).

    A leaf has no target if it is not loaded, or if it is missing and made.
    """
    selection = selection or _Selection()
    paths = leaf_paths(tree)
    check_distinct(paths, "a leaf finds its array by its path")
    tree_specs = shapes_and_dtypes(tree, paths)
    targets = targets_of(arrays, records, problems).by_path
    selection.check(list(targets) if tree is None else paths, problems)
    if tree is None:
        tree = _tree_of({path: each for path, each in targets.items() if selection.wants(path)})
        paths = leaf_paths(tree)
        tree_specs = [(targets[path].shape, targets[path].dtype) for path in paths]
    targets = _by_path_in_tree(targets, paths, tree_specs, problems, selection)
    problems.raise_all()
    of_leaves = [targets.get(path) for path in paths]
    if dtype is not None:
        tree_specs = _with_dtype(tree_specs, of_leaves, arrays, dtype)
    return _abstract(tree, tree_specs), list(zip(paths, of_leaves, strict=True))


def _with_dtype(
    tree_specs: list[_ShapeAndDtype],
    targets: Sequence[Target | None],
    arrays: Mapping[str, ArraySpec],
    dtype: str,
) -> list[_ShapeAndDtype]:
    """Return the specs with this dtype for weights, unless a record has one for them."""
    weights = weights_in({name: array.dtype for name, array in arrays.items()})
    specs = []
    for (shape, before), target in zip(tree_specs, targets, strict=True):
        is_weight = is_plain_float(before) and (not target or target.parts[0].source in weights)
        if target and target.has_own_dtype:
            specs.append((shape, target.dtype))
        else:
            specs.append((shape, dtype if is_weight else before))
    return specs


def weights_in(dtypes: Mapping[str, str]) -> set[str]:
    """Return the names of floats, but of scales: `scale` in the last word, and codes beside it."""
    words = {name: _bare(name).rpartition("/") for name in dtypes}
    with_codes = {
        words[name][0]
        for name, dtype in dtypes.items()
        if dtype in BITS and dtype != "bool" and BITS[dtype] <= 8
    }
    return {
        name
        for name, (parent, _, word) in words.items()
        if is_plain_float(dtypes[name]) and not ("scale" in word and parent in with_codes)
    }


def _bare(path: str) -> str:
    """Return the path with slashes alone, and without the `value` of a box, or haliax's `0`."""
    return _with_slashes(path).removesuffix("/value").removesuffix("/0")


def _with_slashes(path: str) -> str:
    return path.replace(".", "/")


def _tree_of(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Return a tree of the names: with levels if there are slashes, as `read_model` has them."""
    leaves = {path: ArraySpec(target.shape, target.dtype) for path, target in targets.items()}
    return nested_dicts(Arrays("the arrays", leaves, "/"))


def shapes_and_dtypes(tree: Any, paths: list[str]) -> list[_ShapeAndDtype]:
    """Return the shape and the name of the dtype of each leaf, which has this path."""
    return [
        (
            tuple(np.shape(leaf)),
            as_dtype_name(
                f"tree: the dtype of {path}", getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
            ),
        )
        for path, leaf in zip(paths, tree_util.tree_leaves(tree), strict=True)
    ]


def _by_path_in_tree(
    targets: Mapping[str, Target],
    paths: list[str],
    tree_specs: list[_ShapeAndDtype],
    problems: Problems,
    selection: _Selection,
) -> dict[str, Target]:
    """Return the targets by the tree's paths; note what is missing, left over, or differs."""
    names = list(targets)
    rows = match_rows(paths, names, _with_slashes, _bare)
    taken = set(rows)
    unused = [name for row, name in enumerate(names) if row not in taken]
    aligned: dict[str, Target] = {}
    for path, row, (shape, dtype) in zip(paths, rows, tree_specs, strict=True):
        if not selection.wants(path):
            continue
        if row < 0:
            if selection.makes(path):
                continue
            tied = next((name for name in names if "embed" in name), None)
            hint = (
                f"; if {tied} is it, too: Rename({tied!r}, {path!r}, shared=True)"
                if tied and targets[tied].shape == shape and ("head" in path or "output" in path)
                else ""
            )
            problems.add(f"missing: the tree wants {dtype}{list(shape)}{hint}", path, unused)
            continue
        target = aligned[path] = targets[names[row]]
        if target.shape != shape or not _fits(target.dtype, dtype):
            problems.add(
                f"unlike the tree, which wants {dtype}{list(shape)}: the array is "
                f"{target.dtype}{list(target.shape)}",
                path,
            )
    for name in unused:
        if not selection.leaves_out(name):
            problems.add(
                "left over: the tree does not have it; a Rename to None leaves it out", name
            )
    return aligned


def _fits(source: str, target: str) -> bool:
    """Return whether an array of one dtype can become another; floats of 8 bits are codes."""
    return source == target or (converts(source, target) and "float8" not in source + target)


def _abstract(tree: Any, tree_specs: list[_ShapeAndDtype]) -> Any:
    """Return the tree with ShapeDtypeStructs of the dtypes that arrays get on devices."""
    structs = {
        (shape, name): jax.ShapeDtypeStruct(
            shape, key_dtype(name) or jax.dtypes.canonicalize_dtype(numpy_dtype(name))
        )
        for shape, name in set(tree_specs)
    }
    treedef: Any = tree_util.tree_structure(tree)
    return treedef.unflatten(map(structs.__getitem__, tree_specs))


def checked_sharding(path: str, sharding: Any) -> Any:
    """Return the sharding; an error if there is none, or it has no devices to put an array on."""
    if sharding is None:
        raise ValueError(f"rules: {path} gets None; each array needs a spec or a sharding")
    check_placeable(sharding, lambda: path)
    return sharding
