"""A fingerprint of who gets which sharding, to compare between processes and over time.

Two processes that decide differently would hang or mix up data later; comparing 32 bytes first
tells. Must not know how a sharding was decided.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from shardrules._mesh import axes_shown
from shardrules._specs import entries_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding


def fingerprint(tree: Any, shardings: Any) -> str:
    """64 hex digits that change with any path, shape, dtype, spec or mesh axis size.

    The same in every process and every run; devices do not count.

    Args:
        tree: A pytree of arrays, abstract arrays or numbers.
        shardings: A tree of the same structure with NamedShardings, as from `named_shardings`; None
            for a leaf that is left alone.

    Raises:
        ValueError: The trees differ in structure.

    Example:
        >>> import jax
        >>> from shardrules import named_shardings
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> fingerprint(tree, named_shardings(tree, [("w", "tp")], {"tp": 2}))[:8]
        '01855b2f'
    """
    from jax import tree_util

    leaves = tree_util.tree_flatten_with_path(tree)[0]
    wanted = tree_util.tree_leaves(shardings, is_leaf=lambda x: x is None)
    if len(leaves) != len(wanted):
        raise ValueError(f"{len(leaves)} leaves, but {len(wanted)} shardings")
    return _digest(
        (tree_util.keystr(path), leaf, sharding)
        for (path, leaf), sharding in zip(leaves, wanted, strict=True)
    )


def check_same_in_all_processes(digest: str, what: str) -> None:
    """Compares the fingerprint with those of all other processes; each must call this.

    Raises:
        RuntimeError: They differ; the message says which process has which.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    mine = np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)
    everyones = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, mine.size)
    digests = [row.tobytes().hex() for row in everyones]
    if len(set(digests)) > 1:
        listed = "\n".join(f"    process {i}: {d[:16]}..." for i, d in enumerate(digests))
        raise RuntimeError(
            f"{what} differs between processes; this is process {jax.process_index()}, and the "
            f"fingerprints are\n{listed}\n"
            "  Make sure that all of them have the same code, rules, mesh and model configuration."
        )


def _digest(rows: Any) -> str:
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
    return " ".join([repr(entries_of(sharding.spec)), *extra, axes_shown(sharding.mesh)])
