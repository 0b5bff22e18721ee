"""Manifests: the paths, shapes and dtypes of a plan's arrays, as a model for later plans."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardrules._dtypes import given_name
from shardrules._io import write_bytes

if TYPE_CHECKING:
    from shardrules._plan.table import Columns


def manifest_text(columns: Columns, name: str | None = None) -> str:
    """Write the arrays of a plan: paths, shapes, dtypes, and logical axis names if they have them.

    Raises:
        ValueError: The paths are not of keys with "/" between them, two are equal, or a dtype is
            one that files do not have.
    """
    leaves = columns._leaves
    if leaves.paths_dialect.separator != "/":
        raise ValueError(
            f"a manifest has paths such as layers/0/w, not {columns.paths[:1]}: give rules of "
            "another dialect, such as eformer"
        )
    if len(set(columns.paths)) < len(columns.paths):
        raise ValueError("two leaves have one path, and a manifest has each path once")
    kinds = [columns.kinds[number] for number in columns.kind_of]
    arrays = [
        (path, kind)
        for path, kind in zip(columns.paths, kinds, strict=True)
        if kind.shape is not None
    ]
    rows = [
        json.dumps([path, list(kind.shape or ()), given_name(f"the dtype of {path}", kind.dtype)])
        for path, kind in arrays
    ]
    named = {path: kind.names for path, kind in arrays if kind.names is not None}
    model = "" if name is None else f'"model": {json.dumps(name)}, '
    head = f'{{{model}"params": [\n'
    tail = f'\n], "logical_axes": {json.dumps(named)}}}\n' if named else "\n]}\n"
    return head + ",\n".join(rows) + tail


def packed(text: str) -> bytes:
    """Gzip a text; the same text always gives the same bytes."""
    return gzip.compress(text.encode(), mtime=0)


def write_manifest(path: str | Path, text: str) -> None:
    """Write a manifest to a file; gzipped if its name ends with .gz."""
    write_bytes(path, packed(text) if str(path).endswith(".gz") else text.encode())
