"""A fingerprint of who gets which sharding, to compare between processes and over time.

Two processes that decide differently would hang or mix up data later; comparing 32 bytes first
tells. Must not know how a sharding was decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardrules._arguments import check_tree, check_type
from shardrules._sharding.memory import memory_apart
from shardrules._specs import entries_of
from shardrules._words import mesh_shown

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

__all__ = ["check_same_in_all_processes", "fingerprint", "tell_of_failure"]

# Of SHA-256; hashlib is imported when it is needed: its OpenSSL takes as long as the rest of us.
_BYTES: Final = 32
# In place of the two digests of a process that has none.
_FAILED: Final = bytes(2 * _BYTES)


def fingerprint(tree: Any, shardings: Any) -> str:
    """64 hex digits that change with any path, shape, dtype, spec, mesh axis size or memory kind.

    The same in every process and every run; devices do not count.

    Args:
        tree: A pytree of arrays, abstract arrays or numbers.
        shardings: A tree of the same structure with NamedShardings, as from `named_shardings`; None
            for a leaf that is left alone.

    Raises:
        ValueError: The trees differ in structure.
        TypeError: A leaf of shardings is no NamedSharding, or the tree is none.

    Example:
        >>> import jax
        >>> from shardrules import named_shardings
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> fingerprint(tree, named_shardings(tree, [("w", "tp")], {"tp": 2}))[:8]
        '773924b8'
    """
    from jax import tree_util
    from jax.sharding import NamedSharding

    check_tree("tree", tree)
    leaves = tree_util.tree_flatten_with_path(tree)[0]
    wanted = tree_util.tree_leaves(shardings, is_leaf=lambda x: x is None)
    if len(leaves) != len(wanted):
        raise ValueError(f"tree has {len(leaves)} leaves, but shardings has {len(wanted)}")
    for sharding in wanted:
        check_type("a leaf of shardings", sharding, NamedSharding | None, "a NamedSharding or None")
    return _digest(
        (tree_util.keystr(path), leaf, sharding)
        for (path, leaf), sharding in zip(leaves, wanted, strict=True)
    )


def check_same_in_all_processes(tree: Any, shardings: list[NamedSharding | None]) -> None:
    """Compares the fingerprint and the order of devices between all processes.

    Each must call this, or `tell_of_failure`.

    Raises:
        RuntimeError: They differ, and the message says which process has which; or a process has
            failed.
    """
    import jax

    mine = bytes.fromhex(fingerprint(tree, shardings)) + _device_order(shardings)
    rows = _of_all_processes(mine)
    this = f"this is process {jax.process_index()}"
    failed = [str(i) for i, row in enumerate(rows) if row == _FAILED]
    if failed:
        raise RuntimeError(
            f"process {', '.join(failed)} failed before anything was placed; see the error there; "
            f"{this}"
        )
    plans, orders = ([row[:_BYTES] for row in rows], [row[_BYTES:] for row in rows])
    for what, digests in (("the plan", plans), ("the order of the mesh's devices", orders)):
        if len(set(digests)) > 1:
            listed = "\n".join(f"    process {i}: {d.hex()[:16]}..." for i, d in enumerate(digests))
            raise RuntimeError(
                f"{what} differs between processes; {this}, and the fingerprints are\n{listed}\n"
                "  Make sure that all of them have the same code, rules, mesh and model "
                "configuration."
            )


def tell_of_failure() -> None:
    """Makes `check_same_in_all_processes` raise in the other processes."""
    _of_all_processes(_FAILED)


def _of_all_processes(mine: bytes) -> list[bytes]:
    import numpy as np
    from jax.experimental import multihost_utils

    row = np.frombuffer(mine, dtype=np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row)).reshape(-1, row.size)
    return [everyones.tobytes() for everyones in rows]


def _device_order(shardings: list[NamedSharding | None]) -> bytes:
    import hashlib

    meshes = dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None)
    ids = [
        [device.id for device in mesh.devices.flat]  # pyright: ignore[reportOptionalMemberAccess]
        for mesh in meshes
    ]
    return hashlib.sha256(repr(ids).encode()).digest()


def _digest(rows: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    for path, leaf, sharding in rows:
        shape, dtype = (
            tuple(getattr(leaf, "shape", ())),
            getattr(leaf, "dtype", type(leaf).__name__),
        )
        row = (path, shape, str(dtype), _sharding_text(sharding))
        digest.update(repr(row).encode())
    return digest.hexdigest()


def _sharding_text(sharding: NamedSharding | None) -> str:
    if sharding is None:
        return "-"
    extra = [
        f"{name}={sorted(getattr(sharding.spec, name))}"
        for name in ("unreduced", "reduced")
        if getattr(sharding.spec, name, None)
    ]
    if memory := memory_apart(sharding):
        extra.append(f"memory={memory}")
    return " ".join([repr(entries_of(sharding.spec)), *extra, mesh_shown(sharding.mesh.shape)])
