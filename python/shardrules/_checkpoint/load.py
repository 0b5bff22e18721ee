"""`load`: the arrays of a checkpoint, straight into sharded arrays."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jax import tree_util

from shardrules._base.arguments import as_tuple, check_items, check_type, integer
from shardrules._base.dtypes import bits_of, given_float
from shardrules._base.io import FileError
from shardrules._base.mistakes import in_order
from shardrules._base.text import printable
from shardrules._checkpoint.filling import fill
from shardrules._checkpoint.job import Job, bytes_in_flight, bytes_to_read
from shardrules._checkpoint.problems import Problems
from shardrules._checkpoint.reading import Progress, Reader, checked_progress, reported
from shardrules._checkpoint.renames import A_RENAME, Rename
from shardrules._checkpoint.selection import Selection, initial
from shardrules._checkpoint.targets import Target
from shardrules._checkpoint.trees import checked_sharding, matched
from shardrules._place.agreement import Row, rows_of
from shardrules._place.decider import RulesLike
from shardrules._place.mesh import MeshLike
from shardrules._place.named_shardings import only_process, requested_shardings
from shardrules._place.processes import JointCall
from shardrules._plan.files.leaves import ArraySpecs
from shardrules._plan.files.models import Arrays, read_arrays
from shardrules._plan.plan import Plan

_NO_DATA: Final = (
    "it lists arrays and does not have their data; give a safetensors file, its index or a "
    "directory of them; orbax restores its own checkpoints, onto plan.abstract()"
)
# Of one array some bytes each.
_MOST_SAMPLES: Final = 512


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
    missing: Mapping[str, Any] | None = None,
    progress: bool | Progress | None = None,
    max_bytes_in_flight: int | None = None,
) -> Any:
    """Load a checkpoint of safetensors files into sharded arrays.

    Each process reads only the bytes that its own devices hold, each of them once, and gaps of at
    most 4 KiB between them. Several processes agree on the call first, as in `shard`; one that
    fails makes all fail.

    Args:
        source: A safetensors file, the index of several, or a directory of them, here or by the URL
            of a store, such as gs:// or s3://.
        rules: A `Plan`; `Rules` or (pattern, spec) pairs; `LogicalRules`; or specs or shardings, as
            in `shard`.
        mesh: The Mesh for rules and PartitionSpecs. Default: the context's, or the plan's.
        tree: A pytree of abstract arrays, whose structure, shapes and dtypes the result gets.
            Arrays are found by their paths; `.` in a name counts as `/`. Default: the plan's tree,
            or the checkpoint's names, as in `read_model`.
        renames: `Rename` records for arrays that have other names in the tree, or lie otherwise.
        dtype: The dtype of all floating arrays of 16 bits or more, a float; but not of scales
            beside FP8 or int8 arrays, nor where a `Rename` has its own. Default: the tree's dtypes,
            or the checkpoint's.
        strict: Whether arrays that the tree does not have are an error. False leaves them out, and
            the log "shardrules" lists them. Default: True.
        only: A regex: load only arrays whose paths in the tree it finds. If there is a `tree`, its
            other leaves stay in the result as they are. Default: all.
        missing: {regex: init} for leaves of the tree that the checkpoint lacks. The first that
            finds the path makes the leaf, on its devices: a number, an array, or a function of
            shape and dtype such as `jax.numpy.zeros`. The log lists them. Default: a missing leaf
            is an error.
        progress: True for a bar, which needs `shardrules[cli]`; or a function, which is called with
            the bytes read so far and those that this process will read. Default: neither.
        max_bytes_in_flight: Maximum bytes of the host's memory for what has been read and is not on
            devices yet. Default: 2 GiB, or more if an array's part on one device takes more.

    Returns:
        The tree of jax.Arrays. As on devices, 64-bit numbers are 32-bit without `jax_enable_x64`.

    Raises:
        FileError: There is no such checkpoint; it is damaged; it changes while it is read; or it
            does not fit the tree: all arrays that are missing, left over or of another shape are
            listed; or a finite value would become infinite in its new dtype. A ValueError.
        ValueError: As `named_shardings`; or an array's part on one device takes more than
            `max_bytes_in_flight`.
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
    reports = checked_progress(progress)
    with JointCall("load") as call:
        followed = check_items("renames", as_tuple("renames", renames, "Renames"), Rename, A_RENAME)
        wanted_dtype = None if dtype is None else given_float("dtype", dtype)
        bound = max_bytes_in_flight
        if bound is not None:
            bound = integer("max_bytes_in_flight", bound, 1, what="a number of bytes")
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
        arrays = read_arrays(os.fspath(source), ArraySpecs(keeps_places=True))
        if any(leaf.file is None for leaf in arrays.leaves.values()):
            raise FileError(f"{arrays.path}: {_NO_DATA}")
        problems = Problems(arrays.name)
        _check_dtypes(arrays, problems)
        abstract, targets = matched(
            arrays.leaves,
            tree,
            followed,
            wanted_dtype,
            problems,
            selection=selection,
        )
        leaves, treedef, shardings = requested_shardings(abstract, rules, mesh)
        jobs = _jobs_of(targets, leaves, shardings)
        most = bytes_in_flight(jobs, bound)
        call.agree(lambda: [*_samples(arrays), *rows_of(abstract, shardings, selection.options)])
    with JointCall("load", "while it was reading") as call:
        if not is_joint:
            call.alone()
        read = iter(_read(arrays, jobs, most, reports))
        kept = leaves if tree is None else tree_util.tree_leaves(tree)
        rows = zip(targets, leaves, kept, shardings, strict=True)
        values = [
            next(read)
            if target is not None
            else _value_instead(selection, path, like, leaf, sharding)
            for (path, target), like, leaf, sharding in rows
        ]
        selection.tell(arrays.name)
        call.agree(lambda: [("the arrays", "read")])
    return treedef.unflatten(values)


def _jobs_of(
    targets: Sequence[tuple[str, Target | None]],
    leaves: Sequence[Any],
    shardings: Sequence[Any],
) -> list[Job]:
    """Return what is to be made of the arrays."""
    rows = zip(targets, leaves, shardings, strict=True)
    return [
        Job(path, target, leaf.dtype, checked_sharding(path, sharding))
        for (path, target), leaf, sharding in rows
        if target is not None
    ]


def _samples(arrays: Arrays) -> list[Row]:
    """Return a digest of some bytes: files of another model may have equal headers."""
    names = list(arrays.leaves)
    if not names:
        return []
    with Reader(arrays.leaves) as reader:
        data = b"".join(map(reader.sample, names[:: -(-len(names) // _MOST_SAMPLES)]))
    return [("the data of the files", hashlib.sha256(data).hexdigest()[:16])]


def _read(
    arrays: Arrays, jobs: Sequence[Job], most_bytes: int, progress: bool | Progress | None
) -> list[Any]:
    what = printable(f"loading {arrays.name}")
    with reported(progress, what) as report, Reader(arrays.leaves) as reader:
        total = sum(bytes_to_read(job, arrays.leaves) for job in jobs) if report else 0

        def done() -> None:
            if report is not None:
                report(reader.bytes_read, total)

        return fill(jobs, reader, most_bytes, done)


def _value_instead(selection: Selection, path: str, like: Any, leaf: Any, sharding: Any) -> Any:
    """Return what stands in the place of an array that is not loaded: made anew, or the tree's."""
    if path not in selection.made:
        return leaf
    return initial(path, selection.made[path], like, checked_sharding(path, sharding))


def _check_dtypes(arrays: Arrays, problems: Problems) -> None:
    for name, leaf in arrays.leaves.items():
        if bits_of(leaf.dtype) < 8:
            problems.add(f"{leaf.dtype} is packed, and numpy cannot unpack it", name)
