"""Metadata of an orbax checkpoint, read through orbax: its JSON lacks dtypes and whole shapes.

The files and names of the checkpoint are checked first, because orbax would follow links out of the
directory and wait for a FIFO.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from shardrules._base.dtypes import RANDOM_KEYS
from shardrules._base.io import FileError, parse_json, read_bytes
from shardrules._plan.files.leaves import ArraySpec, ArraySpecs

SEPARATOR: Final = "/"
METADATA: Final = "_METADATA"
# Other files that orbax reads whole.
_READ_WHOLE: Final = frozenset({".zarray", "zarr.json", "_sharding", "manifest.ocdbt"})
# "12", or with a prefix, as in "checkpoint_12"; the name of an unfinished step goes on.
_STEP: Final = re.compile(r"(?:.*_)?(\d+)")


def find_checkpoint(directory: Path) -> Path | None:
    """Find the directory of the tree: this one, its only item, or that of the latest step."""
    item = directory if is_item(directory) else _item_below(directory)
    if item is not None:
        _check_inside(directory, item)
    return item


def _item_below(directory: Path) -> Path | None:
    children = [child for child in directory.iterdir() if child.is_dir()]
    steps = {child: int(step[1]) for child in children if (step := _STEP.fullmatch(child.name))}
    items = [child for child in children if is_item(child) and child not in steps]
    if steps and not items:
        latest = max(steps, key=steps.__getitem__)
        if is_item(latest):
            return latest
        items = [child for child in latest.iterdir() if is_item(child)]
    if len(items) > 1:
        names = ", ".join(sorted(str(item.relative_to(directory)) for item in items))
        raise FileError(
            f"{directory}: the checkpoint has the items {names}; give the directory of one"
        )
    return items[0] if items else None


def is_item(directory: Path) -> bool:
    """Say whether it is the directory of a checkpoint's tree."""
    return (directory / METADATA).is_file()


def read_checkpoint(directory: Path, make: ArraySpecs) -> dict[str, ArraySpec]:
    """Read the arrays and numbers of a checkpoint. Their names are paths in its tree."""
    _check_files(directory)
    _check_names(directory)
    try:
        from etils.epath import Path as OrbaxPath
        from orbax.checkpoint import PyTreeCheckpointHandler
    except ImportError as error:
        raise FileError(
            f"{directory}: this is a checkpoint of orbax, which cannot be imported here ({error}); "
            "pip install orbax-checkpoint"
        ) from error
    handler = PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(OrbaxPath(directory.absolute())).tree
    except Exception as error:
        raise FileError(
            f"{directory}: orbax cannot read the checkpoint's metadata "
            f"({type(error).__name__}: {error}); is it whole, and of a version that orbax knows?"
        ) from error
    finally:
        handler.close()
    keys = _random_keys(directory)
    names, shapes, dtypes = [], [], []
    for path, leaf in _leaves(tree, ()):
        if not hasattr(leaf, "shape"):  # a string
            continue
        key = keys.get(".".join(path))
        names.append(SEPARATOR.join(path))
        # A random key is stored as its words, and orbax makes a key of them again.
        shapes.append(list(leaf.shape) if key is None else list(leaf.shape)[:-1])
        dtypes.append(key or leaf.dtype.name)
    return make.of_columns(directory, names, shapes, dtypes)


def _random_keys(directory: Path) -> dict[str, str]:
    """Return the dtypes of the arrays that are random keys, by their names with dots."""
    dtypes = {}
    for path in directory.glob("array_metadatas/process_*"):
        try:
            for row in parse_json(path, read_bytes(path))["array_metadatas"]:
                array = row["array_metadata"]
                implementation = (array.get("ext_metadata") or {}).get("random_key_impl")
                if implementation in RANDOM_KEYS:
                    dtypes[array["param_name"]] = RANDOM_KEYS[implementation]
        except (AttributeError, LookupError, TypeError) as error:
            raise FileError(
                f"{path}: this does not describe arrays as orbax does ({error!r}); copy or "
                "download the checkpoint again"
            ) from None
    return dtypes


def _check_inside(directory: Path, path: Path) -> None:
    # Path.resolve raises a RuntimeError for a loop of links, up to Python 3.12.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
        raise FileError(
            f"{directory}: {path.relative_to(directory)} is a link that leads out of the "
            "checkpoint; give the directory to which it leads, or put the files there"
        )


def _check_files(directory: Path) -> None:
    """Check that all files are regular and inside, and none that is read whole is too large."""
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(parent, name)
            if path.is_symlink():
                _check_inside(directory, path)
            if not (path.is_file() or path.is_dir()):
                raise FileError(
                    f"{directory}: {path.relative_to(directory)} is not a regular file; "
                    "copy or download the checkpoint again"
                )
            if name in _READ_WHOLE:
                read_bytes(path)


def _check_names(directory: Path) -> None:
    """Check that no array's name leads out, since orbax joins it to the directory."""
    path = directory / METADATA
    content = parse_json(path, read_bytes(path))
    try:
        entries = [entry["key_metadata"] for entry in content["tree_metadata"].values()]
        names = {".".join(key["key"] for key in keys) for keys in entries}
    except (AttributeError, LookupError, TypeError):
        raise FileError(
            f"{path}: there is no tree_metadata with the key_metadata of each array; copy or "
            "download the checkpoint again"
        ) from None
    for name in names:
        if ".." in PurePath(name).parts or PurePath(name).is_absolute():
            raise FileError(f"{path}: array {name!r} leads out of the checkpoint; rename it")


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(node, "_asdict"):
        node = node._asdict()
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list | tuple):
        children = dict(enumerate(node)).items()
    else:
        yield path, node
        return
    for key, child in children:
        yield from _leaves(child, (*path, str(key)))
