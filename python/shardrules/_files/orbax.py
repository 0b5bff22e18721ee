"""The metadata of an orbax checkpoint, read through orbax itself.

Its JSON files have names but neither dtypes nor whole shapes; those are in the arrays' stores. So
orbax is imported, and JAX with it, when a checkpoint is read and not before; of the arrays only
metadata are read. Must not know about other formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardrules._files.errors import FileError
from shardrules._files.leaves import ArraySpec, Leaves

__all__ = ["SEPARATOR", "find_checkpoint", "read_checkpoint"]

SEPARATOR: Final = "/"
_METADATA: Final = "_METADATA"
# "12", or with a prefix, as in "checkpoint_12"; the name of an unfinished step goes on.
_STEP: Final = re.compile(r"(?:.*_)?(\d+)")


def find_checkpoint(directory: Path) -> Path | None:
    """Where the tree is: here, in the only item, or in that of the latest step; None if nowhere.

    Raises:
        FileError: There are several items.
    """
    if _is_item(directory):
        return directory
    children = [child for child in directory.iterdir() if child.is_dir()]
    steps = {child: int(step[1]) for child in children if (step := _STEP.fullmatch(child.name))}
    items = [child for child in children if _is_item(child) and child not in steps]
    if steps and not items:
        latest = max(steps, key=steps.__getitem__)
        if _is_item(latest):
            return latest
        items = [child for child in latest.iterdir() if _is_item(child)]
    if len(items) > 1:
        names = ", ".join(sorted(str(item.relative_to(directory)) for item in items))
        raise FileError(
            f"{directory}: the checkpoint has the items {names}; give the directory of one"
        )
    return items[0] if items else None


def _is_item(directory: Path) -> bool:
    return (directory / _METADATA).is_file()


def read_checkpoint(directory: Path, make: Leaves) -> dict[str, ArraySpec]:
    """The arrays and numbers of a checkpoint; their names are paths in its tree.

    Args:
        directory: As `find_checkpoint` has found it.
        make: What makes the leaves.

    Raises:
        FileError: orbax is not installed, or cannot read the checkpoint.
    """
    try:
        from etils.epath import Path as OrbaxPath
        from orbax.checkpoint import PyTreeCheckpointHandler
    except ImportError as error:
        raise FileError(
            f"{directory}: this is a checkpoint of orbax, which cannot be imported here ({error}); "
            "pip install 'shardrules[orbax]'"
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
    # Strings are leaves, too, but have no shape.
    found = [(path, leaf) for path, leaf in _leaves(tree, ()) if hasattr(leaf, "shape")]
    return make.of_columns(
        directory,
        [SEPARATOR.join(path) for path, _ in found],
        [list(leaf.shape) for _, leaf in found],
        [leaf.dtype.name for _, leaf in found],
    )


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
