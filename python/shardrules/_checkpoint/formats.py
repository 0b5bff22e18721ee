"""Formats of checkpoints: which can be loaded, and how the arrays of each are made."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from jax import ShapeDtypeStruct, tree_util

from shardrules._base.io import FileError
from shardrules._base.text import printable
from shardrules._checkpoint.filling import fill
from shardrules._checkpoint.job import Job, bytes_to_read
from shardrules._checkpoint.programs import ingredients, made
from shardrules._checkpoint.ranges import in_batches
from shardrules._checkpoint.reading import Progress, Reader, reported
from shardrules._place.agreement import Row
from shardrules._plan.align import key_text
from shardrules._plan.files.models import Arrays
from shardrules._plan.files.orbax import SEPARATOR, is_item

# Of one array some bytes each.
_MOST_SAMPLES: Final = 512


class CheckpointFormat(Protocol):
    """Form in which a checkpoint has its arrays; to add one, put it into `FORMATS`.

    `models.FORMATS` has formats that list names, shapes and dtypes.
    """

    rearranges: bool
    """Whether arrays can be transposed, joined, taken apart and scaled as they are read."""
    has_items: bool
    """Whether names are paths of a tree, of which some items may be read alone."""

    def claims(self, arrays: Arrays) -> bool:
        """Say whether these arrays, which were listed, can be read."""
        ...

    def samples(self, arrays: Arrays) -> list[Row]:
        """Return what several processes compare before they read, beside names and shapes."""
        ...

    def read(
        self,
        arrays: Arrays,
        batches: Sequence[Sequence[Job]],
        most_bytes: int,
        progress: bool | Progress | None,
    ) -> Generator[list[Any]]:
        """Yield the arrays of each batch."""
        ...


class BytesInFiles:
    """Arrays whose bytes stand in files in row-major order, as in safetensors."""

    rearranges = True
    has_items = False

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
        self,
        arrays: Arrays,
        batches: Sequence[Sequence[Job]],
        most_bytes: int,
        progress: bool | Progress | None,
    ) -> Generator[list[Any]]:
        what = printable(f"loading {arrays.name}")
        with reported(progress, what) as report, Reader(arrays.leaves) as reader:
            jobs = list(chain.from_iterable(batches))
            total = sum(bytes_to_read(job, arrays.leaves) for job in jobs) if report else 0

            def done() -> None:
                if report is not None:
                    report(reader.bytes_read, total)

            for batch in batches:
                yield fill(batch, reader, most_bytes, done)


class RestoredByOrbax:
    """Checkpoints that orbax restores."""

    rearranges = False
    has_items = True

    def claims(self, arrays: Arrays) -> bool:
        return is_item(arrays.path)

    def samples(self, arrays: Arrays) -> list[Row]:
        return []

    def read(
        self,
        arrays: Arrays,
        batches: Sequence[Sequence[Job]],
        most_bytes: int,
        progress: bool | Progress | None,
    ) -> Generator[list[Any]]:
        for batch in batches:
            abstract = {
                job.target.parts[0].source: ShapeDtypeStruct(
                    job.target.shape, job.dtype, sharding=job.sharding
                )
                for job in batch
            }
            restored = _restored(arrays.path, abstract) if abstract else {}
            yield [restored[job.target.parts[0].source] for job in batch]


FORMATS: Final[list[CheckpointFormat]] = [BytesInFiles(), RestoredByOrbax()]
"""The formats of checkpoints, in the order in which they are asked."""


def format_of(arrays: Arrays) -> CheckpointFormat:
    """Find the format that reads these arrays."""
    claiming = next((each for each in FORMATS if each.claims(arrays)), None)
    if claiming is None:
        raise FileError(
            f"{arrays.path}: it lists arrays and does not have their data; give a safetensors "
            "file, its index, a directory of them, or an orbax checkpoint"
        )
    return claiming


class Batch(NamedTuple):
    """Arrays that are read together, and what is made of them on devices."""

    reads: dict[str, Job]
    makes: list[int]
    """The indices of jobs."""

    @property
    def bytes(self) -> int:
        """Return the bytes of what is read, on all devices."""
        return sum(prod(job.target.shape) * job.dtype.itemsize for job in self.reads.values())


class Reads(NamedTuple):
    """What to read for the jobs of a call."""

    format: CheckpointFormat
    arrays: Arrays
    jobs: list[Job]
    direct: list[int]
    """The indices of jobs that are read themselves."""
    batches: list[Batch]
    """What is made on devices."""

    @property
    def all(self) -> list[Job]:
        """Return all that is read."""
        ingredients_of = (batch.reads.values() for batch in self.batches)
        return [*map(self.jobs.__getitem__, self.direct), *chain.from_iterable(ingredients_of)]

    def read(self, most_bytes: int, progress: bool | Progress | None) -> list[Any]:
        """Read and make the arrays of the jobs."""
        values: list[Any] = [None] * len(self.jobs)
        batches = list(_merged_batches(self.batches, most_bytes))
        reads = [[self.jobs[i] for i in self.direct], *([*b.reads.values()] for b in batches)]
        with closing(self.format.read(self.arrays, reads, most_bytes, progress)) as results:
            for i, array in zip(self.direct, next(results), strict=True):
                values[i] = array
            # To the end, where the files are checked.
            for batch, arrays in zip(batches, results, strict=True):
                live = dict(zip(batch.reads, arrays, strict=True))
                for i in batch.makes:
                    job, leaves = self.jobs[i], self.arrays.leaves
                    values[i] = made(job, live, leaves, arranges=self.format.rearranges)
        return values


def reads_of(checkpoint_format: CheckpointFormat, arrays: Arrays, jobs: list[Job]) -> Reads:
    direct = []
    batch_of: dict[str, Batch] = {}
    for i, job in enumerate(jobs):
        reads = ingredients(job, arrays.leaves, arranges=checkpoint_format.rearranges)
        if not reads:
            direct.append(i)
            continue
        # Those that are made of one array are in one batch.
        batch = Batch(reads, [i])
        for other in {
            id(batch_of[name]): batch_of[name] for name in reads if name in batch_of
        }.values():
            batch = Batch(other.reads | batch.reads, other.makes + batch.makes)
        batch_of |= dict.fromkeys(batch.reads, batch)
    batches = {id(batch): batch for batch in batch_of.values()}
    return Reads(checkpoint_format, arrays, jobs, direct, [*batches.values()])


def _merged_batches(batches: list[Batch], most_bytes: int) -> Iterator[Batch]:
    """Join small batches, which are read faster together."""
    for group in in_batches(batches, most_bytes, lambda batch: batch.bytes):
        reads = dict(chain.from_iterable(batch.reads.items() for batch in group))
        yield Batch(reads, [i for batch in group for i in batch.makes])


def _restored(directory: Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the arrays by their paths in the checkpoint."""
    import orbax.checkpoint as ocp
    from etils.epath import Path as OrbaxPath

    handler = ocp.PyTreeCheckpointHandler()
    place = OrbaxPath(directory.absolute())
    try:
        # orbax wants the structure that was saved, with its lists and tuples.
        leaves, treedef = tree_util.tree_flatten_with_path(handler.metadata(place).tree)
        paths = [SEPARATOR.join(map(key_text, keys)) for keys, _ in leaves]
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
