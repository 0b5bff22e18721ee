"""`save`: the arrays of a tree, into sharded safetensors files with an index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import tree_util

from shardrules._base.arguments import as_tuple, check_items, check_type, integer
from shardrules._base.atomic_write import sync_directory
from shardrules._base.dtypes import RANDOM_KEYS, SAFETENSORS, bits_of, given_name, key_dtype
from shardrules._base.io import FileError, path_of
from shardrules._base.mistakes import in_order
from shardrules._base.text import with_article
from shardrules._checkpoint.conversion import dtype_on_devices
from shardrules._checkpoint.names import A_RENAME, DirectedRename, Rename, backwards, forwards
from shardrules._checkpoint.programs import made_of, made_on_host, spread_over
from shardrules._checkpoint.targets import Problems, Target, targets_of
from shardrules._place.named_arrays import leaf_paths
from shardrules._place.processes import JointCall
from shardrules._plan.align import check_distinct
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.safetensors import KEYS

_CODES: Final = {numpy_name: code for code, numpy_name in SAFETENSORS.items()}
_IMPLEMENTATIONS: Final = {dtype: name for name, dtype in RANDOM_KEYS.items()}
_INDEX: Final = "model.safetensors.index.json"
# No reader takes a file of this suffix for a checkpoint.
_PART: Final = ".part"
# Bytes of neighbours that are joined on the host.
_MOST_JOINED: Final = 1 << 30


class _FilePlace(NamedTuple):
    """An array, and where it begins in which file."""

    name: str
    make: Callable[[], Any]
    """Returns it; one that renames rearrange is made then, to be written and forgotten."""
    shape: tuple[int, ...]
    dtype: str
    file: int
    offset: int
    key: str

    @property
    def size(self) -> int:
        return prod(self.shape) * bits_of(self.dtype) // 8


@in_order("tree", "path")
def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    renames: Iterable[Rename] = (),
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Save the arrays of a tree as safetensors files with an index, in a new directory.

    Each process writes the boxes that its own devices hold, a replica once, to their places in the
    files, without a gather; so several processes need a directory that all of them see. They write
    into `.NAME.saving` beside it, which gets its name when all is on the disk. An error removes
    that; a killed process leaves it, and it loads only if all arrays
    are in it.

    Args:
        tree: A pytree of arrays. Their names are their paths. Of random keys the words are saved,
            and `load` makes keys of them.
        path: The directory, which must not exist.
        renames: The `Rename` templates of `load`, which `save` follows backwards: from the tree's
            paths to the checkpoint's names. All arrays must be found. An array that is rearranged
            is made on the devices, one at a time.
        shard_bytes: Maximum bytes of the arrays in one file. A larger array has its own file.

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
    if "://" in os.fspath(path):
        raise ValueError(f"path: {path} is a URL, and save writes files of this machine")
    target = path_of(path).absolute()
    if not target.name:
        raise ValueError(f"path: {path} has no name; write that of a new directory")
    if target.suffix == ".safetensors":
        raise ValueError(
            f"path: {target.name} is the name of a file, and save makes a directory of files; "
            f"write {target.stem!r}"
        )
    folder = target.with_name(f".{target.name}.saving")
    first, made = jax.process_index() == 0, False
    starts: list[int] = []
    try:
        with JointCall("save") as call:
            followed = check_items(
                "renames", as_tuple("renames", renames, "Renames"), Rename, A_RENAME
            )
            most = integer("shard_bytes", shard_bytes, 1, what="a number of bytes")
            entries = _file_places(_arrays_to_write(tree, followed), most)
            files = [
                f"model-{i + 1:05}-of-{entries[-1].file + 1:05}.safetensors"
                for i in range(entries[-1].file + 1)
            ]
            if first:
                _check_absent(target)
                _check_absent(folder)
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
                made = True
                starts = [_make_file(folder / file, entries, i) for i, file in enumerate(files)]
            call.agree(
                lambda: [
                    ("the path", str(target)),
                    ("renames", str(followed)),
                    *((e.name, f"{e.dtype}{list(e.shape)} {e.file}") for e in entries),
                ]
            )
        with JointCall("save", "while it was writing") as call:
            if not first:
                _check_shared(folder)
                starts = [_data_start(folder / (file + _PART)) for file in files]
            for i, file in enumerate(files):
                _write_file(folder / (file + _PART), starts[i], entries, i, first)
            call.agree(lambda: [("the arrays", "written")])
        with JointCall("save", "while it was ending") as call:
            if first:
                _publish(folder, target, files, entries)
                # The next save may have a folder of this name.
                made = False
            call.agree(lambda: [("the directory", "named")])
    except OSError as error:
        raise FileError(f"{target}: {error.strerror or error}; nothing was saved") from error
    finally:
        if made:
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


class _Array(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], Any]
    key: str = ""
    """The dtype of the random keys of which it has the words."""


def _arrays_to_write(tree: Any, renames: Sequence[Rename]) -> list[_Array]:
    """Return the arrays to write, in order."""
    names, leaves = leaf_paths(tree), tree_util.tree_leaves(tree)
    check_distinct(names, "a file has each name once")
    arrays = []
    for name, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "__array__"):
            raise ValueError(
                f"tree: {name or 'it'} is {with_article(type(leaf).__name__)}, and no array; give "
                "arrays, such as those of jax.jit(init, out_shardings=...), of a number "
                "jax.numpy.asarray(3), or leave it out"
            )
        dtype = given_name(f"tree: the dtype of {name}", leaf.dtype)
        arrays.append(_array_of(name, tuple(leaf.shape), dtype, partial(_unchanged, leaf)))
    if not renames:
        return arrays
    problems = Problems("the tree", in_file=False)
    records = backwards(renames)
    live = {_found_name(name, records): leaf for name, leaf in zip(names, leaves, strict=True)}
    specs = {
        name: ArraySpec(tuple(leaf.shape), given_name(name, leaf.dtype))
        for name, leaf in live.items()
    }
    targets = targets_of(specs, records, problems, forwards(renames))
    for name in targets.left:
        problems.add(
            "left over: no Rename finds it; Rename('{name*}', '{name*}') at the end saves the rest "
            "under their own names",
            name,
        )
    problems.raise_all()
    for name, double in targets.doubles:
        _check_double(name, double, targets.by_path[name], live)
    return [_target_array(name, target, live) for name, target in targets.by_path.items()]


def _found_name(name: str, records: Sequence[DirectedRename]) -> str:
    """Return the path of a leaf as templates have it: it may be without the `value` of a box."""
    is_found = any(record.values(name) is not None for record in records)
    return name if is_found else name.removesuffix("/value")


def _unchanged(leaf: Any) -> Any:
    return leaf


def _array_of(name: str, shape: tuple[int, ...], dtype: str, make: Callable[[], Any]) -> _Array:
    """Return an array to write; of random keys, their words."""
    if key_dtype(dtype) is None:
        return _Array(name, shape, dtype, make)
    words = bits_of(dtype) // 32
    return _Array(name, (*shape, words), "uint32", lambda: jax.random.key_data(make()), dtype)


def _target_array(name: str, target: Target, live: Mapping[str, Any]) -> _Array:
    first = live[target.parts[0].source]
    if target.is_plain:
        return _array_of(name, target.shape, target.dtype, partial(_unchanged, first))
    return _array_of(name, target.shape, target.dtype, partial(_made, target, live))


def _made(target: Target, live: Mapping[str, Any]) -> Any:
    """Make an array that renames rearrange: on the host, or spread over the devices of a part."""
    sources = [live[part.source] for part in target.parts]
    if not any(isinstance(source, jax.Array) for source in sources):
        return made_on_host(target, live)
    mesh = getattr(getattr(sources[0], "sharding", None), "mesh", None)
    sharding = None if mesh is None else spread_over(mesh, target.shape)
    dtype = key_dtype(target.dtype) or dtype_on_devices(target.dtype)
    return made_of(target, live, dtype, sharding)[0]


def _check_double(name: str, double: Target, target: Target, live: Mapping[str, Any]) -> None:
    """Check that what a `shared` record made is still a copy."""
    copy, own = (_made(each, live) for each in (double, target))
    if copy.shape != own.shape or not jax.numpy.array_equal(copy, own, equal_nan=True):
        raise ValueError(
            f"renames: {double.parts[0].source} is no copy of {name} any more, as shared=True "
            "says; give a Rename without shared, so that both are saved"
        )


def _file_places(arrays: list[_Array], shard_bytes: int) -> list[_FilePlace]:
    entries: dict[str, _FilePlace] = {}
    file = offset = 0
    for name, shape, dtype, make, key in arrays:
        if dtype not in _CODES or bits_of(dtype) < 8:
            raise ValueError(f"tree: {name} is {dtype}, which safetensors files cannot hold here")
        if name in entries or name == "__metadata__":
            raise ValueError(f"tree: {name!r} is no name for one array; rename it")
        entry = _FilePlace(name, make, shape, dtype, file, offset, key)
        if offset and offset + entry.size > shard_bytes:
            file, offset = file + 1, 0
            entry = entry._replace(file=file, offset=0)
        entries[name] = entry
        offset += entry.size
    if not entries:
        raise ValueError("tree has no arrays")
    return list(entries.values())


def _make_file(path: Path, entries: list[_FilePlace], index: int) -> int:
    """Write the header, reserve the place of the data, and return where that begins."""
    own = [entry for entry in entries if entry.file == index]
    keys = {entry.name: _IMPLEMENTATIONS[entry.key] for entry in own if entry.key}
    metadata = {"format": "pt", **({KEYS: json.dumps(keys)} if keys else {})}
    header: dict[str, Any] = {"__metadata__": metadata}
    for e in own:
        ends = [e.offset, e.offset + e.size]
        header[e.name] = {"dtype": _CODES[e.dtype], "shape": list(e.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with open(path.with_name(path.name + _PART), "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + own[-1].offset + own[-1].size)
    return start


def _data_start(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _write_file(path: Path, start: int, entries: list[_FilePlace], index: int, first: bool) -> None:
    with open(path, "r+b") as file:
        for entry in entries:
            if entry.file == index:
                for box, values in _joined_rows(entry.shape, _own_boxes(entry.make(), first)):
                    _write_box(file.fileno(), start + entry.offset, entry.shape, box, values)
        os.fsync(file.fileno())


_Values = tuple[tuple[slice, ...], Any]
"""A box of an array, and its values."""


def _joined_rows(shape: tuple[int, ...], boxes: Iterable[_Values]) -> Iterator[_Values]:
    """Join neighbours of the same rows, up to a bound, so that rows are written whole."""
    pending: list[_Values] = []
    for box, values in boxes:
        size = sum(each.nbytes for _, each in pending) + values.nbytes
        if pending and (pending[0][0][:1] != box[:1] or size > _MOST_JOINED):
            yield from _tiled(shape, pending)
            pending = []
        pending.append((box, values))
    yield from _tiled(shape, pending)


def _tiled(shape: tuple[int, ...], boxes: list[_Values]) -> list[_Values]:
    """Make one box of those that tile one; else they stay."""
    if len(boxes) < 2:
        return boxes
    places = [
        [cut.indices(size)[:2] for cut, size in zip(box, shape, strict=True)] for box, _ in boxes
    ]
    hull = [
        (min(begin for begin, _ in dim), max(end for _, end in dim))
        for dim in zip(*places, strict=True)
    ]
    if prod(end - begin for begin, end in hull) != sum(values.size for _, values in boxes):
        return boxes
    whole = np.empty([end - begin for begin, end in hull], boxes[0][1].dtype)
    for place, (_, values) in zip(places, boxes, strict=True):
        at = zip(place, hull, strict=True)
        whole[tuple(slice(begin - low, end - low) for (begin, end), (low, _) in at)] = values
    return [(tuple(slice(*bounds) for bounds in hull), whole)]


def _own_boxes(leaf: Any, first: bool) -> Iterator[_Values]:
    if isinstance(leaf, jax.Array):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                # A copy of the shard alone: `np.asarray(shard.data)` would stay with the array.
                yield shard.index, np.array(shard.data, order="C")
    elif first:
        # Files have the least byte first.
        values = np.array(leaf, order="C")
        yield (slice(None),) * leaf.ndim, values.astype(values.dtype.newbyteorder("<"), copy=False)


def _write_box(
    file: int, start: int, shape: tuple[int, ...], box: tuple[slice, ...], values: Any
) -> None:
    """Write each run of neighbours to its place."""
    if not values.size:
        return
    begins = [cut.indices(size)[0] for cut, size in zip(box, shape, strict=True)]
    # The dimensions from here on are whole, but for the first of them.
    dim = len(shape)
    while dim and (dim == len(shape) or values.shape[dim] == shape[dim]):
        dim -= 1
    strides = [prod(shape[i + 1 :]) * values.itemsize for i in range(len(shape))]
    origin = start + sum(b * stride for b, stride in zip(begins, strides, strict=True))
    data = memoryview(values.reshape(-1).view(np.uint8))
    run = prod(values.shape[dim:]) * values.itemsize
    for number, at in enumerate(product(*map(range, values.shape[:dim]))):
        place = origin + sum(i * stride for i, stride in zip(at, strides, strict=False))
        _write_all(file, data[number * run : (number + 1) * run], place)


def _write_all(file: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def _publish(folder: Path, target: Path, files: list[str], entries: list[_FilePlace]) -> None:
    for file in files:
        os.rename(folder / (file + _PART), folder / file)
    index = {
        "metadata": {"total_size": sum(entry.size for entry in entries)},
        "weight_map": {entry.name: files[entry.file] for entry in entries},
    }
    with open(folder / _INDEX, "x", encoding="utf-8") as opened:
        json.dump(index, opened, indent=2)
        opened.flush()
        os.fsync(opened.fileno())
    sync_directory(folder)
    os.rename(folder, target)
    sync_directory(target.parent)
