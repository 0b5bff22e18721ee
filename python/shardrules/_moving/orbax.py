"""Arrays of an orbax checkpoint, restored by orbax itself onto the devices.

orbax reads only what the process's devices hold. Costs orbax's own time. Must not know about other
formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrules._file_error import FileError
from shardrules._files.orbax import SEPARATOR

__all__ = ["restore"]


def restore(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by their paths in the checkpoint.

    Args:
        directory: A result of `find_checkpoint`, whose names and files have been checked.
        wanted: By path, the ShapeDtypeStruct with its sharding.

    Raises:
        FileError: orbax cannot restore the checkpoint.
    """
    import orbax.checkpoint as ocp
    from etils.epath import Path as OrbaxPath
    from jax import tree_util

    handler = ocp.PyTreeCheckpointHandler()
    place = OrbaxPath(directory.absolute())
    try:
        # orbax wants the structure that was saved, with its lists and tuples.
        leaves, treedef = tree_util.tree_flatten_with_path(handler.metadata(place).tree)
        paths = [SEPARATOR.join(map(_key_text, keys)) for keys, _ in leaves]
        # What has no shape, such as a string, is left out.
        item = tree_util.tree_unflatten(
            treedef, [wanted.get(path, ocp.PLACEHOLDER) for path in paths]
        )
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restored = handler.restore(
            place, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        )
    except Exception as error:
        raise FileError(
            f"{directory}: orbax cannot restore the checkpoint ({type(error).__name__}: {error}); "
            "is it whole, and of a version that orbax knows?"
        ) from error
    finally:
        handler.close()
    return dict(zip(paths, tree_util.tree_leaves(restored), strict=True))


def _key_text(key: Any) -> str:
    """The key of a dict, the index in a list or tuple, or the name of a field."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
