"""What the libraries' own functions do, restated plainly: the oracles of the dialects' tests."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

SEVERAL = "several"


def find_first(patterns: Sequence[Any], matches: Callable[[Any], object]) -> int | None:
    return next((i for i, pattern in enumerate(patterns) if matches(pattern)), None)


def by_search(patterns, path):
    return find_first(patterns, lambda pattern: re.search(pattern, path))


def by_fullmatch(patterns, path):
    return find_first(patterns, lambda pattern: re.fullmatch(pattern, path))


def by_layout_map(patterns, path):
    if path in patterns:
        return patterns.index(path)
    matching = [i for i, pattern in enumerate(patterns) if re.fullmatch(pattern, path)]
    return SEVERAL if len(matching) > 1 else next(iter(matching), None)


CHOSEN_BY = {
    "EASYLM": by_search,
    "SPECTRAX": by_search,
    "KEYSTR": by_search,
    "KERAS": by_layout_map,
    "BIG_VISION": by_fullmatch,
}


def key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def joined(separator: str) -> Callable[[Any], str]:
    return lambda path: separator.join(map(key_text, path))


def specs_of(tree: Any, spec: Callable[[Any, Any], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(spec, tree)


SLASHED = joined("/")


def easylm(rules, tree, path_text=SLASHED):
    def spec(path, leaf):
        if len(leaf.shape) == 0 or np.prod(leaf.shape) == 1:
            return P()
        return rules[by_search([p for p, _ in rules], path_text(path))][1]

    return specs_of(tree, spec)


def jaxseq(rules, tree):
    return easylm(rules, tree, jax.tree_util.keystr)


def spectrax(rules, tree, min_size=None, strict=True):
    def spec(path, leaf):
        if strict and (not hasattr(leaf, "shape") or len(leaf.shape) == 0):
            return P()
        if min_size is not None and hasattr(leaf, "shape") and np.prod(leaf.shape) < min_size:
            return P()
        found = rules[by_search([p for p, _ in rules], SLASHED(path))][1]
        return P(*found[: leaf.ndim]) if strict and len(found) > leaf.ndim else found

    return specs_of(tree, spec)


def fsdp_dim(shape, parts, free):
    """The dimension that big_vision, Kauldron and openpi cut; on equal sizes numpy's argsort is stable."""
    by_size = np.argsort(np.array(shape, np.int64), kind="stable")[::-1].tolist()
    return next((dim for dim in by_size if dim in free and shape[dim] % parts == 0), None)


def bytes_of(leaf):
    return int(np.prod(leaf.shape, dtype=object)) * np.dtype(leaf.dtype).itemsize


def big_vision_fsdp(leaf, sizes, axis, min_mb=4, spec=None):
    """One leaf's spec after the tactic: above min_mb MiB, a dimension that `spec` leaves free."""
    entries = list(spec or (None,) * len(leaf.shape))
    axes = (axis,) if isinstance(axis, str) else axis
    if bytes_of(leaf) > min_mb * 2**20:
        free = {dim for dim, entry in enumerate(entries) if entry is None}
        dim = fsdp_dim(leaf.shape, int(np.prod([sizes[one] for one in axes])), free)
        if dim is not None:
            entries[dim] = axis
    return P(*entries)


def openpi_fsdp(leaf, sizes, min_mb=4):
    """One leaf's spec: from min_mb MiB on, if it has two dimensions and the axis several devices."""
    too_small = len(getattr(leaf, "shape", ())) < 2 or bytes_of(leaf) < min_mb * 2**20
    if sizes["fsdp"] == 1 or too_small:
        return P()
    dim = fsdp_dim(leaf.shape, sizes["fsdp"], set(range(len(leaf.shape))))
    return P() if dim is None else P(*["fsdp" if i == dim else None for i in range(len(leaf.shape))])
