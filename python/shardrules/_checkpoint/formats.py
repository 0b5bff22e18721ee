"""Formats of checkpoints: which can be loaded, and how the arrays of each are made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from shardrules._checkpoint.filling import Job, bytes_to_read, fill
from shardrules._checkpoint.reading import Progress, Reader, reported
from shardrules._checkpoint.renames import Rename
from shardrules._files.models import Arrays
from shardrules._files.orbax import SEPARATOR, is_item
from shardrules._io import FileError
from shardrules._text import printable, shown

if TYPE_CHECKING:
    from shardrules._place.processes import Row

# Of one array some bytes each.
_MOST_SAMPLES: Final = 512


class CheckpointFormat(Protocol):
    """Form in which a checkpoint has its arrays; to add one, put it into `FORMATS`.

    `models.FORMATS` has formats that list names, shapes and dtypes.
    """

    rearranges: bool
    """Whether arrays can be transposed, joined, taken apart and scaled as they are read."""

    def claims(self, arrays: Arrays) -> bool:
        """Say whether these arrays, which were listed, can be read."""
        ...

    def samples(self, arrays: Arrays) -> list[Row]:
        """Return what several processes compare before they read, beside names and shapes."""
        ...

    def read(
        self, arrays: Arrays, jobs: list[Job], most_bytes: int, progress: bool | Progress | None
    ) -> list[Any]:
        """Make the arrays of the jobs.

        Args:
            arrays: The arrays that were listed.
            jobs: What to make.
            most_bytes: Maximum bytes in flight.
            progress: As in `load`.

        Raises:
            FileError: A file is damaged or has changed.
        """
        ...


class BytesInFiles:
    """Arrays whose bytes stand in files in row-major order, as in safetensors."""

    rearranges = True

    def claims(self, arrays: Arrays) -> bool:
        return all(leaf.file is not None for leaf in arrays.leaves.values())

    def samples(self, arrays: Arrays) -> list[Row]:
        """Return a digest of some bytes: files of another model may have equal headers."""
        names = list(arrays.leaves)
        if not names:
            return []
        with Reader(arrays.leaves) as reader:
            data = b"".join(map(reader.sample, names[:: -(-len(names) // _MOST_SAMPLES)]))
        return [("the data of the files", hashlib.sha256(data).hexdigest()[:16])]

    def read(
        self, arrays: Arrays, jobs: list[Job], most_bytes: int, progress: bool | Progress | None
    ) -> list[Any]:
        what = printable(f"loading {arrays.name}")
        with reported(progress, what) as report, Reader(arrays.leaves) as reader:
            total = sum(bytes_to_read(job, arrays.leaves) for job in jobs) if report else 0

            def done() -> None:
                if report is not None:
                    report(reader.bytes_read, total)

            return fill(jobs, reader, most_bytes, done)


class RestoredByOrbax:
    """Checkpoints that orbax restores."""

    rearranges = False

    def claims(self, arrays: Arrays) -> bool:
        return is_item(arrays.path)

    def samples(self, arrays: Arrays) -> list[Row]:
        return []

    def read(
        self, arrays: Arrays, jobs: list[Job], most_bytes: int, progress: bool | Progress | None
    ) -> list[Any]:
        from jax import ShapeDtypeStruct

        abstract = {
            job.target.parts[0].source: ShapeDtypeStruct(
                job.target.shape, job.dtype, sharding=job.sharding
            )
            for job in jobs
        }
        restored = _restored(arrays.path, abstract)
        return [restored[job.target.parts[0].source] for job in jobs]


FORMATS: Final[list[CheckpointFormat]] = [BytesInFiles(), RestoredByOrbax()]
"""The formats of checkpoints, in the order in which they are asked."""


def format_of(arrays: Arrays, renames: Sequence[Rename]) -> CheckpointFormat:
    """Find the format that reads these arrays.

    Raises:
        FileError: There are no data; or the format cannot do what a rename says.
    """
    claiming = next((each for each in FORMATS if each.claims(arrays)), None)
    if claiming is None:
        raise FileError(
            f"{arrays.path}: it lists arrays and does not have their data; give a safetensors "
            "file, its index, a directory of them, or an orbax checkpoint"
        )
    for rename in renames:
        if not claiming.rearranges and (rename.dims or rename.scale):
            raise FileError(
                f"{arrays.path}: {shown(rename)} changes how arrays lie, and orbax restores them "
                "as they are; here give records that rename or leave out, and the others to "
                "shardrules.reshard"
            )
    return claiming


def _restored(directory: Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the arrays by their paths in the checkpoint.

    Args:
        directory: A result of `find_checkpoint`, whose names and files have been checked.
        abstract: By path, the ShapeDtypeStruct with its sharding.

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
            treedef, [abstract.get(path, ocp.PLACEHOLDER) for path in paths]
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
    """Return the key of a dict, the index in a list or tuple, or the name of a field."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
