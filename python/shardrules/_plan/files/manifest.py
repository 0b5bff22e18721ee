"""`write_manifest`: the paths, shapes and dtypes of arrays, as a model for later plans."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

from shardrules._base.arguments import check_type
from shardrules._base.atomic_write import write_bytes
from shardrules._base.dtypes import given_name
from shardrules._base.mistakes import in_order
from shardrules._plan.align import check_distinct
from shardrules._plan.leaves import has_names
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._rules.dialects import EFORMER, LINEN, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules


def manifest_text(columns: Plan, name: str | None = None) -> str:
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
    check_distinct(columns.paths, "a manifest has each path once")
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


def write_packed(path: str | os.PathLike[str], text: str) -> None:
    """Write a manifest to a file; gzipped if its name ends with .gz."""
    write_bytes(path, packed(text) if os.fspath(path).endswith(".gz") else text.encode())


def arrays_of(
    tree: Any, dialect: Dialect | LogicalDialect | None = None, names: Any = None
) -> Plan:
    """Plan a tree without rules, on any mesh; `names` are logical axis names beside it."""
    if dialect is None:
        dialect = EFORMER if names is None and not has_names(tree) else LINEN
    make: Any = LogicalRules if isinstance(dialect, LogicalDialect) else Rules
    return plan(tree, make((), dialect), {"devices": 1}, names=names)


@in_order("tree", "path")
def write_manifest(tree: Any, path: str | os.PathLike[str]) -> None:
    """Write the paths, shapes and dtypes of a tree's arrays as JSON: a model for `read_model`.

    It stands for the model in places without its code, such as CI. Logical axis names in boxes and
    of a plan are written too. The file is replaced atomically.

    Args:
        tree: A pytree of arrays or abstract arrays, or a plan, whose rules are ignored.
        path: The file, such as model.json; gzipped if its name ends with .gz.

    Raises:
        ValueError: The tree has no arrays, the paths do not consist of keys with "/" between
            them, two are equal, or a dtype is one that files do not have.
        OSError: The file cannot be written.

    Example:
        >>> import jax, os, tempfile
        >>> import shardrules as sr
        >>> tree = {"layers": [{"wq": jax.ShapeDtypeStruct((8, 8), "bfloat16")}]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = os.path.join(directory, "model.json.gz")
        ...     sr.write_manifest(tree, file)
        ...     sr.read_model(file)
        {'layers': {'0': {'wq': ShapeDtypeStruct(shape=(8, 8), dtype=bfloat16)}}}
    """
    check_type("path", path, str | os.PathLike, "the path of a file")
    arrays = tree if isinstance(tree, Plan) else arrays_of(tree)
    if not len(arrays):
        raise ValueError("the tree has no arrays: give that of a model")
    write_packed(path, manifest_text(arrays))
