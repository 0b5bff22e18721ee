"""`load`: the arrays of a checkpoint, straight into sharded arrays."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.arguments import as_tuple, byte_size, check_items, check_type
from shardrules._base.dtypes import RANDOM_KEYS, bits_of, given_float, key_dtype
from shardrules._base.io import FileError, collector_paused, memory_within
from shardrules._base.mistakes import in_order
from shardrules._base.text import shown
from shardrules._checkpoint.names import A_RENAME, Rename, forwards
from shardrules._checkpoint.targets import Problems, Target, plain_target
from shardrules._checkpoint.trees import Selection, checked_sharding, initial, matched
from shardrules._checkpoint.units import DEFAULT_IN_FLIGHT, Job, Reader, bytes_to_read, fill
from shardrules._place.decider import RulesLike
from shardrules._place.mesh import MeshLike
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall, Row, rows_of
from shardrules._plan.files.leaves import ArraySpec, ArraySpecs
from shardrules._plan.files.models import Arrays, read_arrays
from shardrules._plan.files.safetensors import is_part
from shardrules._plan.plan import Plan

_LOG: Final = logging.getLogger("shardrules")
_NO_DATA: Final = (
    "it lists arrays and does not have their data; give a safetensors file, its index or a "
    "directory of them; orbax restores its own checkpoints, onto plan.abstract()"
)
# Of one array some bytes each.
_MOST_SAMPLES: Final = 512
_IMPLEMENTATIONS: Final = {dtype: name for name, dtype in RANDOM_KEYS.items()}

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


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
            one: numbers, arrays, and functions of shape and dtype such as `jax.numpy.zeros`. A
            value stands for all leaves below its path, too. The log lists what is made. Default: a
            missing leaf is an error.
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
        followed = check_items("renames", as_tuple("renames", renames, "Renames"), Rename, A_RENAME)
        wanted_dtype = None if dtype is None else given_float("dtype", dtype)
        most = byte_size("max_bytes_in_flight", max_bytes_in_flight)
        selection = Selection(strict, only, missing)
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
        stored = {name: _as_in_file(leaf) for name, leaf in arrays.leaves.items()}
        abstract, targets = matched(
            arrays.leaves,
            tree,
            forwards(followed),
            wanted_dtype,
            Problems(arrays.name),
            selection=selection,
        )
        leaves, treedef, shardings = requested_shardings(abstract, rules, mesh)
        jobs = [
            _job(path, target, leaf, checked_sharding(path, sharding), stored)
            for (path, target), leaf, sharding in zip(targets, leaves, shardings, strict=True)
            if target is not None
        ]
        call.agree(
            lambda: [
                *_samples(stored),
                *rows_of(abstract, shardings, f"{selection.options()}, renames={followed}"),
            ]
        )
    with JointCall("load", "while it was reading") as call, collector_paused():
        if not is_joint:
            call.alone()
        total = sum(bytes_to_read(job, stored) for job in jobs) if progress else 0
        with Reader(stored) as reader:

            def done() -> None:
                if progress is not None:
                    progress(reader.bytes_read, total)

            read = iter(fill(jobs, reader, most, done))
        values = leaves if tree is None else tree_util.tree_leaves(tree)
        for i, ((path, target), spec) in enumerate(zip(targets, leaves, strict=True)):
            if target is not None:
                values[i] = _as_keys(next(read), spec, shardings[i])
            elif path in selection.made:
                sharding = checked_sharding(path, shardings[i])
                values[i] = initial(path, selection.made[path], spec, sharding)
        selection.tell(arrays.name)
        call.agree(lambda: [("the arrays", "read")])
    return treedef.unflatten(values)


def _arrays_of(source: str) -> Arrays:
    """Read the headers of a checkpoint."""
    with memory_within(DEFAULT_IN_FLIGHT):
        arrays = read_arrays(source, ArraySpecs(keeps_places=True))
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
    path: str, target: Target, leaf: Any, sharding: NamedSharding, stored: Mapping[str, ArraySpec]
) -> Job:
    """Return what is to be made; of random keys, their words."""
    if key_dtype(target.dtype) is None:
        return Job(path, target, leaf.dtype, sharding)
    if not target.is_plain:
        raise ValueError(f"{path}: random keys can be renamed, and not be rearranged, by load")
    name = target.parts[0].source
    return Job(path, plain_target(name, stored[name]), np.dtype("uint32"), sharding)


def _as_keys(array: Any, spec: Any, sharding: Any) -> Any:
    """Return random keys of their words; any other array as it is."""
    implementation = _IMPLEMENTATIONS.get(str(spec.dtype))
    return array if implementation is None else _key_program(implementation, sharding)(array)


@lru_cache(maxsize=64)
def _key_program(implementation: str, sharding: NamedSharding) -> Any:
    return jax.jit(partial(jax.random.wrap_key_data, impl=implementation), out_shardings=sharding)


def _samples(arrays: Mapping[str, ArraySpec]) -> list[Row]:
    """Return a digest of some bytes: files of another model may have equal headers."""
    names = list(arrays)[:: max(1, -(-len(arrays) // _MOST_SAMPLES))]
    with Reader(arrays) as reader:
        data = b"".join(map(reader.sample, names))
    return [("the data of the files", hashlib.sha256(data).hexdigest()[:16])]
