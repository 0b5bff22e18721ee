"""A row of text for each leaf of a joint call, which processes compare.

A row has a leaf's path and everything that changes the program or the data: dtype on the device,
shape, current sharding and new sharding. Costs microseconds per leaf. Must not know how processes
communicate.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from shardrules._format import mesh_shown
from shardrules._sharding.fingerprint import spec_text
from shardrules._sharding.mesh import axes_of_type

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, Sharding

    from shardrules._sharding.mesh import AnyMesh

__all__ = [
    "DEVICES",
    "Row",
    "canonical_dtype",
    "digest",
    "first_difference",
    "is_spread",
    "rows_of",
]

Row = tuple[str, str]
"""(path, dtype, shape and shardings as text)"""

DEVICES: Final = "the order of the mesh's devices"
"""In the place of a path, the last row of a call."""
_SHOWN: Final = 200


def rows_of(tree: Any, wanted: Mapping[int, NamedSharding | None]) -> list[Row]:
    """A row for each of these leaves, and one for the devices of all meshes.

    Args:
        tree: A pytree.
        wanted: The new sharding by the leaf's index. None for a leaf that stays.
    """
    from jax import tree_util

    texts, paths = _Texts(), tree_util.tree_flatten_with_path(tree)[0]
    rows = [
        (tree_util.keystr(paths[index][0]) or "(the tree)", texts.leaf(paths[index][1], to))
        for index, to in wanted.items()
    ]
    return [*rows, (DEVICES, texts.devices())]


def digest(rows: list[Row]) -> str:
    """64 hex digits that differ if any row differs."""
    import hashlib

    return hashlib.sha256(repr(rows).encode()).hexdigest()


def first_difference(one: list[Row], other: list[Row], names: tuple[str, str]) -> str:
    """The first row that differs between two processes, with the text of each process."""
    *leaves, devices = one
    *other_leaves, other_devices = other
    pairs = [*zip_longest(leaves, other_leaves), (devices, other_devices)]
    place, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    if a and b and a[0] == b[0]:
        where, texts = a[0], (a[1], b[1])
    else:
        where = f"leaf {place} of the tree"
        ends = "no such leaf"
        texts = (" ".join(a) if a else ends, " ".join(b) if b else ends)
    start = max(0, _common(*texts) - _SHOWN // 2) if max(map(len, texts)) > _SHOWN else 0
    said = [f"{name} has {_cut(text, start)}" for name, text in zip(names, texts, strict=True)]
    return f"{where}: {', and '.join(said)}"


def is_spread(leaf: Any) -> bool:
    """Whether other processes hold parts of this array."""
    import jax

    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def canonical_dtype(leaf: Any) -> Any:
    """The dtype of a numpy array or a number on devices, which depends on jax_enable_x64."""
    import jax
    import numpy as np

    return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


class _Texts:
    """Texts of leaves and shardings. The text of each distinct sharding is made once."""

    def __init__(self) -> None:
        # Holds the sharding too, so that no other object gets its id.
        self._texts: dict[int, tuple[Sharding, str]] = {}
        self._meshes: dict[AnyMesh, int] = {}

    def leaf(self, leaf: Any, to: NamedSharding | None) -> str:
        import jax

        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if to is not None and not isinstance(leaf, jax.Array):
            dtype = canonical_dtype(leaf)
        text = f"{_name(dtype)}{list(getattr(leaf, 'shape', ()))}"
        if to is not None and getattr(leaf, "weak_type", type(leaf) in (int, float, complex)):
            text += " weakly typed"
        if is_spread(leaf):
            text += f" {'deleted' if leaf.is_deleted() else 'spread'} as {self._of(leaf.sharding)}"
        return f"{text}, which stays" if to is None else f"{text} for {self._of(to)}"

    def devices(self) -> str:
        """The ids of the devices of all meshes, in order."""
        meshes = [getattr(mesh, "devices", None) for mesh in self._meshes]
        return "; ".join(
            " ".join(str(device.id) for device in devices.flat)
            for devices in meshes
            if devices is not None
        )

    def _of(self, sharding: Sharding) -> str:
        known = self._texts.get(id(sharding))
        if known is None:
            known = self._texts[id(sharding)] = (sharding, self._made(sharding))
        return known[1]

    def _made(self, sharding: Any) -> str:
        from jax.sharding import NamedSharding

        if not isinstance(sharding, NamedSharding):
            return str(sharding)
        mesh = sharding.mesh
        number = self._meshes.setdefault(mesh, len(self._meshes))
        kinds = {kind: axes_of_type(mesh, kind) for kind in ("Explicit", "Manual")}
        types = [f"{kind}={','.join(sorted(axes))}" for kind, axes in kinds.items() if axes]
        which = [f"(mesh {number})"] if number else []
        spec, axes = spec_text(sharding), mesh_shown(mesh.shape)
        return " ".join([f"P{spec} on {axes}", *types, *which])


_name = functools.lru_cache(maxsize=256)(str)  # numpy takes 10 microseconds to name a dtype


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def _cut(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + _SHOWN else ""
    return f"{before}{text[start : start + _SHOWN]}{after}"
