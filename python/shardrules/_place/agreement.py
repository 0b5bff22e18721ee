"""Rows on which processes agree: what a call is to do with each leaf, as text."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any, Final

import jax
from jax import tree_util
from jax.sharding import NamedSharding, Sharding

from shardrules._base.specs import entries_of, tags_shown
from shardrules._base.text import mesh_shown
from shardrules._place.memory import memory_apart
from shardrules._place.mesh import AnyMesh, axes_of_type, has_devices
from shardrules._place.transfers import canonical_dtype, check_reachable, crosses, is_spread

Row = tuple[str, str]
"""(path, dtype, shape and shardings as text)"""
DEVICES: Final = "the order of the mesh's devices"
"""In the place of a path, the last row of a call."""
_CONTEXT_CHARS: Final = 200
_MARK_CHARS: Final = 8


def rows_of(
    tree: Any,
    shardings: Sequence[NamedSharding | None] | Mapping[int, NamedSharding],
    options: str = "",
) -> list[Row]:
    """Return a row for each leaf, or for those of these indices, and one for all devices.

    Args:
        tree: The tree, from whose leaves arrays with shardings are made.
        shardings: The sharding of each leaf, or of some; None for a leaf that stays.
        options: The other arguments on which the processes agree, as text.

    Raises:
        ValueError: JAX does not move a leaf to its sharding.
    """
    texts, paths = _Texts(), tree_util.tree_flatten_with_path(tree)[0]
    rows = [("the options", options)] if options else []
    for index, to in shardings.items() if isinstance(shardings, Mapping) else enumerate(shardings):
        path, leaf = tree_util.keystr(paths[index][0]) or "(the tree)", paths[index][1]
        if to is not None:
            check_reachable(path, leaf, to)
        rows.append((path, texts.leaf(leaf, to)))
    return [*rows, (DEVICES, texts.devices())]


def digest(rows: list[Row]) -> str:
    """Return 64 hex digits that differ if any row differs."""
    import hashlib  # its OpenSSL takes as long to load as the rest of us

    return hashlib.sha256(repr(rows).encode()).hexdigest()


def marks_of(rows: list[Row]) -> str:
    """Return eight hex digits for each row, by which another process finds what differs."""
    return "".join(f"{zlib.crc32(repr(row).encode()):08x}" for row in rows)


def first_difference(marks: str, others: str) -> int:
    """Return the index of the first row that differs; -1 for the last one, of the devices."""
    leaves = (re.findall("." * _MARK_CHARS, each[:-_MARK_CHARS]) for each in (marks, others))
    pairs = enumerate(zip_longest(*leaves))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), -1)


def row_at(rows: list[Row], index: int) -> Row | None:
    """Return the row that `first_difference` means; None if there is no such leaf."""
    return rows[index] if index < len(rows) - 1 else None  # that of the devices is at -1


def difference_shown(index: int, row: Row | None, peer: Row | None, names: Sequence[str]) -> str:
    """Return what differs in the rows of this index, with the text of each process."""
    if row and peer and row[0] == peer[0]:
        where, texts = row[0], (row[1], peer[1])
    else:
        where = f"leaf {index} of the tree"
        texts = tuple(" ".join(each) if each else "no such leaf" for each in (row, peer))  # type: ignore[assignment]
    same = len(commonprefix(texts))  # noqa: RUF071 these are no paths of files
    start = max(0, same - _CONTEXT_CHARS // 2) if max(map(len, texts)) > _CONTEXT_CHARS else 0
    parts = (f"{name} has {_excerpt(text, start)}" for name, text in zip(names, texts, strict=True))
    return f"{where}: {', and '.join(parts)}"


def _excerpt(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + _CONTEXT_CHARS else ""
    return f"{before}{text[start : start + _CONTEXT_CHARS]}{after}"


class _Texts:
    """Texts of leaves and shardings. The text of each distinct sharding is made once."""

    def __init__(self) -> None:
        # Holds the sharding too, so that no other object gets its id.
        self._texts: dict[int, tuple[Sharding, str]] = {}
        self._meshes: dict[AnyMesh, int] = {}

    def leaf(self, leaf: Any, to: NamedSharding | None) -> str:
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if to is not None and not isinstance(leaf, jax.Array):
            dtype = canonical_dtype(leaf)
        text = f"{_name(dtype)}{list(getattr(leaf, 'shape', ()))}"
        if to is not None and getattr(leaf, "weak_type", type(leaf) in (int, float, complex)):
            text += " weakly typed"
        if is_spread(leaf) or (to is not None and crosses(leaf, to)):
            text += f" {'deleted' if leaf.is_deleted() else 'spread'} as {self._of(leaf.sharding)}"
        return f"{text}, which stays" if to is None else f"{text} for {self._of(to)}"

    def devices(self) -> str:
        """Return the ids of the devices of all meshes, in order."""
        meshes = filter(has_devices, self._meshes)
        return "; ".join(
            " ".join(str(device.id) for device in mesh.devices.flat) for mesh in meshes
        )

    def _of(self, sharding: Sharding) -> str:
        entry = self._texts.get(id(sharding))
        if entry is None:
            entry = self._texts[id(sharding)] = (sharding, self._made(sharding))
        return entry[1]

    def _made(self, sharding: Any) -> str:
        if not isinstance(sharding, NamedSharding):
            return str(sharding)
        mesh = sharding.mesh
        number = self._meshes.setdefault(mesh, len(self._meshes))
        kinds = {kind: axes_of_type(mesh, kind) for kind in ("Explicit", "Manual")}
        types = [f"{kind}={','.join(sorted(axes))}" for kind, axes in kinds.items() if axes]
        which = [f"(mesh {number})"] if number else []
        tags = tags_shown(sharding.spec)
        if memory := memory_apart(sharding):
            tags.append(f"memory={memory}")
        spec = " ".join([f"P{entries_of(sharding.spec)!r}", *tags])
        return " ".join([f"{spec} on {mesh_shown(mesh.shape)}", *types, *which])


_name = functools.lru_cache(maxsize=256)(str)  # numpy takes 10 microseconds to name a dtype
