"""`fingerprint`: a digest of all leaves' shardings, for comparison between processes and runs."""

from __future__ import annotations

from typing import Any

from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.arguments import check_tree, check_type
from shardrules._base.specs import entries_of, tags_shown
from shardrules._base.text import counted, mesh_shown
from shardrules._place.decider import check_decided
from shardrules._place.memory import memory_apart


def fingerprint(tree: Any, shardings: Any) -> str:
    """Return a digest of the sharding of every leaf, equal in every process and every run.

    It changes with any path, shape, dtype, spec, mesh axis size or memory kind. It does not depend
    on devices.

    Args:
        tree: A pytree of arrays, abstract arrays or numbers.
        shardings: A tree of the same structure with NamedShardings, such as the result of
            `named_shardings`. None stands for a leaf without a sharding.

    Returns:
        64 hex digits.

    Raises:
        ValueError: The trees differ in structure.
        TypeError: A leaf of `shardings` is not a NamedSharding, or `tree` has no arrays.

    Example:
        >>> import jax
        >>> from shardrules import named_shardings
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> fingerprint(tree, named_shardings(tree, [("w", "tp")], {"tp": 2}))[:8]
        '773924b8'
    """
    check_tree("tree", tree)
    check_decided("shardings", shardings, "named_shardings(tree, rules, mesh) or plan.shardings()")
    leaves = tree_util.tree_flatten_with_path(tree)[0]
    of_leaves = tree_util.tree_leaves(shardings, is_leaf=lambda x: x is None)
    if len(leaves) != len(of_leaves):
        raise ValueError(
            f"tree has {counted(len(leaves), 'leaf')}, but shardings has {len(of_leaves):,}"
        )
    for sharding in of_leaves:
        check_type("a leaf of shardings", sharding, NamedSharding | None, "a NamedSharding or None")
    return _digest(
        (tree_util.keystr(path), leaf, sharding)
        for (path, leaf), sharding in zip(leaves, of_leaves, strict=True)
    )


def _digest(rows: Any) -> str:
    import hashlib  # its OpenSSL takes as long to load as the rest of us

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
    return "-" if sharding is None else f"{spec_text(sharding)} {mesh_shown(sharding.mesh.shape)}"


def spec_text(sharding: NamedSharding) -> str:
    """Return the spec as text, with the memory kind if that is not the default."""
    extra = tags_shown(sharding.spec)
    if memory := memory_apart(sharding):
        extra.append(f"memory={memory}")
    return " ".join([repr(entries_of(sharding.spec)), *extra])
