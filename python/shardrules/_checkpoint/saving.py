"""`save`: the arrays of a tree, into sharded safetensors files with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import jax
import numpy as np
from jax import tree_util

from shardrules._base.arguments import byte_size, check_type
from shardrules._base.dtypes import RANDOM_KEYS, SAFETENSORS, as_dtype_name, bits_of, key_dtype
from shardrules._base.io import FileError, path_of, sync_directory
from shardrules._base.mistakes import in_order
from shardrules._base.text import with_article
from shardrules._checkpoint.conversion import make_target
from shardrules._checkpoint.layouts import (
    Box,
    Shape,
    block_of,
    box_of,
    box_shape,
    join,
    plain_form,
    tiled_hull,
    whole_box,
)
from shardrules._checkpoint.names import Rename, backwards, checked_renames, forwards
from shardrules._checkpoint.targets import Problems, Target, targets_of
from shardrules._checkpoint.units import in_batches
from shardrules._place.processes import JointCall
from shardrules._place.spec_trees import leaf_paths
from shardrules._plan.align import check_distinct
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.safetensors import KEYS

_CODES: Final = {numpy_name: code for code, numpy_name in SAFETENSORS.items()}
_IMPLEMENTATIONS: Final = {dtype: name for name, dtype in RANDOM_KEYS.items()}
_INDEX: Final = "model.safetensors.index.json"
# No reader takes a file of this suffix for a checkpoint.
_PART: Final = ".part"
# Bytes of boxes that are joined on the host.
_MOST_JOINED: Final = 1 << 30


class _Entry(NamedTuple):
    """An array to write."""

    name: str
    shape: Shape
    dtype: str
    make: Callable[[], Any]
    """Returns it; one that renames rearrange is made then, to be written and forgotten."""
    key: str = ""
    """The dtype of the random keys of which it has the words."""

    @property
    def size(self) -> int:
        return prod(self.shape) * bits_of(self.dtype) // 8


@in_order("tree", "path")
def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    renames: Iterable[Rename] = (),
    shard_bytes: int | str = 5_000_000_000,
) -> None:
    """Save the arrays of a tree as safetensors files with an index, in a new directory.

    Each process writes the boxes that its own devices hold, a replica once, to their places in the
    files, without a gather; so several processes need a directory that all of them see. They write
    into `.NAME.saving` beside it, which gets its name when all is on the disk. An error removes
    that; a killed process leaves it, and it loads only if all arrays are in it.

    Args:
        tree: A pytree of arrays. Their names are their paths. Of random keys the words are saved,
            and `load` makes keys of them.
        path: The directory, which must not exist.
        renames: The `Rename` templates of `load`, which `save` follows backwards: from the tree's
            paths to the checkpoint's names. All arrays must be found. An array that is rearranged
            is made on the devices, one at a time.
        shard_bytes: Maximum bytes of the arrays in one file, such as "5GB". A larger array has
            its own file.

    Raises:
        FileError: The directory, or that of another save to it, exists; or it cannot be written.
        ValueError: The tree has no arrays, a name twice, or a dtype that safetensors lacks; or the
            renames do not find all of its arrays, do not fit them, or cannot go back.
        RuntimeError: In several processes: their calls differ, or a process has failed or is late.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> import shardrules as sr
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     sr.save({"wq": jnp.ones((4, 8))}, os.path.join(directory, "model"))
        ...     sorted(os.listdir(os.path.join(directory, "model")))
        ['model-00001-of-00001.safetensors', 'model.safetensors.index.json']
    """
    check_type("path", path, str | os.PathLike, "the path of a directory")
    target = path_of(path).absolute()
    if "://" in os.fspath(path) or not target.name or target.suffix == ".safetensors":
        raise ValueError(
            f"path: {path}; save makes a directory of files of this machine: write "
            f"{target.stem or 'model'!r}"
        )
    folder = target.with_name(f".{target.name}.saving")
    first, owns_folder = jax.process_index() == 0, False
    try:
        with JointCall("save") as call:
            renames = checked_renames(renames)
            most = byte_size("shard_bytes", shard_bytes)
            parts = list(in_batches(_entries(tree, renames), most, lambda entry: entry.size))
            files = [
                _File(f"model-{i:05}-of-{len(parts):05}.safetensors", part)
                for i, part in enumerate(parts, 1)
            ]
            if first:
                _check_absent(target)
                _check_absent(folder)
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
                owns_folder = True
                for file in files:
                    file.make(folder)
            call.agree(
                lambda: [
                    ("the path", str(target)),
                    ("renames", str(renames)),
                    *(
                        (entry.name, f"{entry.dtype}{list(entry.shape)} {file.name}")
                        for file in files
                        for entry in file.entries
                    ),
                ]
            )
        with JointCall("save", "while it was writing") as call:
            if not first:
                _check_shared(folder)
            for file in files:
                file.write(folder, first)
            call.agree(lambda: [("the arrays", "written")])
        with JointCall("save", "while it was ending") as call:
            if first:
                _publish(folder, target, files)
                # The next save may have a folder of this name.
                owns_folder = False
            call.agree(lambda: [("the directory", "named")])
    except OSError as error:
        raise FileError(f"{target}: {error.strerror or error}; nothing was saved") from error
    finally:
        if owns_folder:
            shutil.rmtree(folder, ignore_errors=True)


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise FileError(
            f"{folder.parent}: save needs one directory that all processes see; process "
            f"{jax.process_index()} does not see {folder.name}, which process 0 has made"
        )


def _check_absent(path: Path) -> None:
    if os.path.lexists(path):
        raise FileError(
            f"{path} exists; remove it if no other process is saving, or save elsewhere"
        )


def _entries(tree: Any, renames: Sequence[Rename]) -> list[_Entry]:
    """Return the arrays to write, in order."""
    names, leaves = leaf_paths(tree), tree_util.tree_leaves(tree)
    if not names:
        raise ValueError("tree has no arrays")
    check_distinct(names, "a file has each name once")
    records = backwards(renames)
    live: dict[str, Any] = {}
    specs = {}
    for path, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "__array__"):
            raise ValueError(
                f"tree: {path or 'it'} is {with_article(type(leaf).__name__)}, and no array; give "
                "arrays, such as those of jax.jit(init, out_shardings=...), of a number "
                "jax.numpy.asarray(3), or leave it out"
            )
        # Templates find a path also without the `value` of a box.
        name = path.removesuffix("/value")
        is_found = any(record.values(path) is not None for record in records)
        name = path if not renames or is_found or name in live else name
        live[name] = leaf
        dtype = as_dtype_name(f"tree: the dtype of {path}", leaf.dtype)
        specs[name] = ArraySpec(tuple(leaf.shape), dtype)
    problems = Problems("the tree")
    targets = targets_of(specs, records, problems)
    for name in targets.unmatched if renames else ():
        problems.add(
            "left over: no Rename finds it; Rename('{name*}', '{name*}') at the end saves the rest "
            "under their own names",
            name,
        )
    problems.raise_all()
    if renames:
        _check_forth(targets.by_path, renames, problems)
    for name, double in targets.doubles:
        _check_double(name, double, targets.by_path[name], live)
    return [_entry_of(name, target, live) for name, target in targets.by_path.items()]


def _check_forth(
    saved: Mapping[str, Target], renames: Sequence[Rename], problems: Problems
) -> None:
    """Check that `load` would make the same paths of what is saved."""
    specs = {name: ArraySpec(target.shape, target.dtype) for name, target in saved.items()}
    again = targets_of(specs, forwards(renames), problems).by_path
    pairs = {(part.source, path) for path, target in again.items() for part in target.parts}
    for name, target in saved.items():
        for part in target.parts:
            if (name, part.source) not in pairs:
                what = f"it would become {name!r}, which these renames turn into another path"
                problems.add(what, part.source)
    problems.raise_all()


def _entry_of(name: str, target: Target, live: Mapping[str, Any]) -> _Entry:
    """Return an array to write; of random keys, their words."""

    def make() -> Any:
        return make_target(target, live)[0]

    entry = _Entry(name, target.shape, target.dtype, make)
    if key_dtype(target.dtype) is not None:
        shape = (*target.shape, bits_of(target.dtype) // 32)
        entry = _Entry(name, shape, "uint32", lambda: jax.random.key_data(make()), target.dtype)
    if entry.dtype not in _CODES or bits_of(entry.dtype) < 8 or name == "__metadata__":
        what = " under this name" if name == "__metadata__" else "; convert it to another dtype"
        raise ValueError(f"tree: {name} is {target.dtype}, which no safetensors file has{what}")
    return entry


def _check_double(name: str, double: Target, target: Target, live: Mapping[str, Any]) -> None:
    """Check that what a `shared` record made is still a copy."""
    copy, saved = (make_target(each, live)[0] for each in (double, target))
    if copy.shape != saved.shape or not jax.numpy.array_equal(copy, saved, equal_nan=True):
        raise ValueError(
            f"renames: {double.parts[0].source} is no copy of {name} any more, as shared=True "
            "says; give a Rename without shared, so that both are saved"
        )


class _File:
    """A file of the checkpoint, which has another name until all is written."""

    def __init__(self, name: str, entries: Sequence[_Entry]) -> None:
        self.name, self.entries = name, entries
        ends = [*accumulate((entry.size for entry in entries), initial=0)]
        keys = {entry.name: _IMPLEMENTATIONS[entry.key] for entry in entries if entry.key}
        metadata = {"format": "pt", **({KEYS: json.dumps(keys)} if keys else {})}
        header: dict[str, Any] = {"__metadata__": metadata}
        for entry, offsets in zip(entries, pairwise(ends), strict=True):
            code, shape = _CODES[entry.dtype], list(entry.shape)
            header[entry.name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._ends = [len(self._header) + end for end in ends]

    def make(self, folder: Path) -> None:
        """Write the header, and reserve the place of the data."""
        with open(folder / (self.name + _PART), "xb") as file:
            file.write(self._header)
            file.truncate(self._ends[-1])

    def write(self, folder: Path, first: bool) -> None:
        """Write this process's parts of the arrays."""
        with open(folder / (self.name + _PART), "r+b") as file:
            for entry, begin in zip(self.entries, self._ends, strict=False):
                for box, values in _own_boxes(entry.make(), first):
                    _write_box(file, begin, entry.shape, box, values)
            file.flush()
            os.fsync(file.fileno())


def _own_boxes(leaf: Any, first: bool) -> Iterator[tuple[Box, Any]]:
    """Yield (box, values) of what this process writes; one box if so rows are written whole."""
    if not isinstance(leaf, jax.Array):
        if first:
            # Files have the least byte first.
            values = np.array(leaf, order="C")
            yield whole_box(leaf.shape), values.astype(values.dtype.newbyteorder("<"), copy=False)
        return
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    boxes = [box_of(shard.index, leaf.shape) for shard in shards]
    # A copy of the shard alone: `np.asarray(shard.data)` would stay with the array.
    parts = (
        (box, np.array(shard.data, order="C")) for box, shard in zip(boxes, shards, strict=True)
    )
    hull = tiled_hull(boxes)
    if (
        hull is None
        or all(box[1:] == hull[1:] for box in boxes)
        or prod(box_shape(hull)) * leaf.dtype.itemsize > _MOST_JOINED
    ):
        yield from parts
    else:
        yield hull, join(hull, leaf.dtype, parts)


def _write_box(file: BinaryIO, start: int, shape: Shape, box: Box, values: Any) -> None:
    """Write each run of neighbours to its place."""
    if values.size:
        begins, size, *_ = block_of(plain_form(shape), box, values.itemsize)
        data = memoryview(values.reshape(-1).view(np.uint8))
        for number, begin in enumerate(begins.tolist()):
            file.seek(start + begin)
            file.write(data[number * size : (number + 1) * size])


def _publish(folder: Path, target: Path, files: list[_File]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        os.rename(folder / (file.name + _PART), folder / file.name)
        weight_map |= {entry.name: file.name for entry in file.entries}
        total += sum(entry.size for entry in file.entries)
    with open(folder / _INDEX, "x", encoding="utf-8") as opened:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, opened, indent=2)
        opened.flush()
        os.fsync(opened.fileno())
    sync_directory(folder)
    os.rename(folder, target)
    sync_directory(target.parent)
