"""Formats of models: names, shapes and dtypes of their arrays, and manifests of these."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import boolean, check_type
from shardrules._base.dtypes import as_dtype_name, key_dtype
from shardrules._base.io import (
    FileError,
    collector_paused,
    max_memory,
    parse_json,
    path_of,
    read_bytes,
    unreadable,
    write_bytes,
)
from shardrules._base.mistakes import in_order
from shardrules._base.text import near_shown, shown
from shardrules._plan.align import check_distinct
from shardrules._plan.files.leaves import ArraySpec, converted, leaves_of
from shardrules._plan.files.modules import file_name
from shardrules._plan.files.remote import RemotePath
from shardrules._plan.files.safetensors import (
    INDEX_SUFFIX,
    SUFFIX,
    read_files,
    read_header,
    read_index,
)
from shardrules._plan.leaves import has_names
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._rules.dialects import EFORMER, LINEN, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

# A dict with one key, and the key. No tree is walked deeper than about 1,000 levels.
_BYTES_OF_NODE: Final = 320
_MOST_LEVELS: Final = 1000
# `Path` makes one slash of two.
_URL: Final = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+):/")
_REPOSITORY: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)(?<!\.gz)(?<!\.safetensors)")
_NOT_READ: Final = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".gguf", ".msgpack", ".h5")
_SAFETENSORS: Final = (SUFFIX, INDEX_SUFFIX)
_FORMS: Final = (
    "a *.safetensors file, its *.index.json, a directory of them, or JSON (also gzipped) as "
    '{"params": [["name", [4096, 128], "BF16"], ...]}'
)


class Arrays(NamedTuple):
    """Arrays of a model."""

    name: str
    """The model's name, or else the file's."""
    leaves: dict[str, ArraySpec]
    """{name: leaf} in the order of the file. Equal leaves are one object."""
    separator: str
    """The separator of the components of the names: "/" or "."."""
    logical_axes: dict[str, tuple[str | None, ...]] | None = None
    """{name: logical axis names}, if the file has them."""
    path: Path = Path()
    """What was read."""


def read_model(path: str | os.PathLike[str], *, nested: bool | None = None) -> dict[str, Any]:
    """Read the arrays of a model in a file, as abstract arrays: their names, shapes and dtypes.

    Only the headers of tensor files are read, and nothing is executed. Files may come from anyone.

    Args:
        path: A safetensors file, the index of several, a directory of them, or a JSON manifest,
            also gzipped: `{"params": [["name", [4096, 128], "BF16"], ...]}`. `-` is a manifest on
            standard input.
        nested: Whether names are split into the levels of a tree. Default: at `/`; names with dots
            stay whole, as `safetensors.flax.load_file` has them. True splits these too; False
            splits none.

    Returns:
        A dict of jax.ShapeDtypeStructs, or of such dicts. Equal leaves are one object.

    Raises:
        FileError: There is no such file, its kind is unknown, it is damaged, or it would take more
            memory; a ValueError.

    Example:
        >>> import json, os, tempfile
        >>> import shardrules as sr
        >>> manifest = {"params": [["layers/0/wq", [4096, 4096], "BF16"]]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(os.path.join(directory, "model.json"), "w") as file:
        ...         json.dump(manifest, file)
        ...     model = sr.read_model(file.name)
        >>> model
        {'layers': {'0': {'wq': ShapeDtypeStruct(shape=(4096, 4096), dtype=bfloat16)}}}
    """
    splits = nested if nested is None else boolean("nested", nested)
    arrays = read_arrays(file_name(path))
    structs = {leaf: _abstract_array(leaf) for leaf in set(arrays.leaves.values())}
    leaves = {name: structs[leaf] for name, leaf in arrays.leaves.items()}
    if splits or (splits is None and arrays.separator == "/"):
        return nested_dicts(arrays._replace(leaves=leaves))
    return leaves


def _abstract_array(leaf: ArraySpec) -> Any:
    import ml_dtypes
    from jax import ShapeDtypeStruct

    dtype = key_dtype(leaf.dtype) or getattr(ml_dtypes, leaf.dtype, leaf.dtype)
    return ShapeDtypeStruct(leaf.shape, dtype)


def nested_dicts(arrays: Arrays) -> dict[str, Any]:
    """Make dicts in dicts of the arrays, with a level for each component of the names.

    Raises:
        FileError: A name is a part of another one, or the dicts take more than `max_memory`.
    """
    tree: dict[str, Any] = {}
    nodes_left = max_memory.get() // _BYTES_OF_NODE
    for name, leaf in arrays.leaves.items():
        *outer, last = name.split(arrays.separator, _MOST_LEVELS)
        nodes_left -= len(outer)
        if arrays.separator in last or nodes_left < 0:
            raise FileError(
                f"{arrays.name}: {name}: the names have more levels than can be taken apart; "
                "shorten them"
            )
        node = tree
        for key in outer:
            nodes_left += key in node  # it takes no new node
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise FileError(f"{arrays.name}: {name}: a part of this name is an array itself")
        if last in node:
            raise FileError(f"{arrays.name}: {name}: this name is a part of another one")
        node[last] = leaf
    return tree


def read_arrays(source: str, *, keeps_places: bool = False) -> Arrays:
    """Read the arrays of a model in a file: their names, shapes and dtypes.

    Args:
        source: As the path of `read_model`; `"logical_axes": {name: [axis, ...]}` may stand beside
            the params of a manifest, and `"model": name`.
        keeps_places: Whether leaves say where their bytes are, if the file has them.

    Raises:
        FileError: There is no such file, its kind is unknown, or it is damaged.
    """
    path = _place_of(source)
    if _REPOSITORY.fullmatch(source) and not path.exists():
        raise FileError(
            f"{source}: there is no such file or directory; if it is a repository of Hugging Face, "
            f"download it: hf download {source} --local-dir DIRECTORY"
        )
    if path.suffix in _NOT_READ:
        raise FileError(
            f"{path}: files of {path.suffix} are not read here; read it with its own library, and "
            "write it with save_file of safetensors.numpy or safetensors.torch"
        )
    try:
        with collector_paused():
            if path.is_dir():
                return _of_directory(path, keeps_places)
            if path.name.endswith(SUFFIX):
                return _arrays_in(path, read_header(path, keeps_places))
            return _of_json(path, keeps_places)
    except OSError as error:
        raise unreadable(path, error) from None


def _place_of(source: str) -> Any:
    """Return the path of a file, or of a URL, of which a `Path` has left one slash."""
    url = _URL.match(source)
    if url is None:
        return path_of(source)
    if url["protocol"] in ("file", "http", "https"):
        fix = "give the path" if url["protocol"] == "file" else f"download it: curl -LO {source}"
        raise FileError(f"{source}: it is not read from there; {fix}")
    return RemotePath(source if "://" in source else source.replace(":/", "://", 1))


def _of_directory(path: Any, keeps_places: bool) -> Arrays:
    """Read the safetensors files of a directory, by their index if they have one."""
    files = sorted(path.iterdir(), key=str)
    tensors, indexes = ([f for f in files if f.name.endswith(end)] for end in _SAFETENSORS)
    name = path.resolve().name if isinstance(path, Path) else str(path.name)
    if len(indexes) > 1:
        raise FileError(
            f"{path}: the directory has {len(indexes)} indexes, "
            f"{', '.join(index.name for index in indexes)}; give the name of one"
        )
    if indexes:
        return _of_json(indexes[0], keeps_places)._replace(name=name)
    if cached := next((file for file in files if file.name == "snapshots"), None):
        raise FileError(f"{path}: this is a cache of Hugging Face; give {cached}/REVISION")
    if not tensors:
        raise FileError(
            f"{path}: the directory has no arrays that can be read; give {_FORMS}; or "
            "package.module:function, which returns what another library reads"
        )
    return _arrays_in(path, read_files(path, tensors, keeps_places), name)


def _of_json(path: Any, keeps_places: bool) -> Arrays:
    """Read a list of arrays in JSON: a manifest, or an index of safetensors files."""
    content = parse_json(path, read_bytes(path))
    if isinstance(content, dict) and "params" in content:
        leaves = _of_params(path, content["params"])
    elif isinstance(content, dict) and "weight_map" in content:
        leaves = read_index(path, content["weight_map"], keeps_places)
    else:
        what = shown(content)
        raise FileError(f"{path}: line 1: this is {what}, which lists no arrays; give {_FORMS}")
    arrays = _arrays_in(path, leaves, content.get("model"))
    names = content.get("logical_axes")
    return arrays._replace(
        logical_axes=None if names is None else _checked_names(path, names, leaves)
    )


def _arrays_in(path: Path, leaves: dict[str, ArraySpec], name: object = None) -> Arrays:
    stem = Path(path.name.removesuffix(INDEX_SUFFIX).removesuffix(".gz")).stem
    separator = "/" if "/" in "".join(leaves) else "."
    return Arrays(name if isinstance(name, str) else stem, leaves, separator, path=path)


def _checked_names(
    path: Path, names: object, leaves: dict[str, ArraySpec]
) -> dict[str, tuple[str | None, ...]]:
    where, example = (
        f"{path}: key logical_axes: ",
        '{"w": ["embed", null]}, a name of each dimension',
    )
    if not isinstance(names, dict):
        raise FileError(f"{where}it is {shown(names)}; write {example}")
    for name in names.keys() - leaves.keys():
        raise FileError(f"{where}there is no array {name!r}{near_shown(name, leaves)}")
    axes = converted(
        path, [*names.values()], tuple[str | None, ...],
        lambda index: f"logical_axes of {[*names][index]!r}", f"write {example}",
    )  # fmt: skip
    return dict(zip(names, axes, strict=True))


_Row = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of an array."""


def _of_params(path: Path, params: object) -> dict[str, ArraySpec]:
    if not isinstance(params, list):
        raise FileError(f"{path}: key 'params': it is {shown(params)}; give {_FORMS}")
    example = 'write ["name", [4096, 128], "BF16"]'
    return leaves_of(path, converted(path, params, _Row, "params[{}]".format, example))


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


def arrays_of(
    tree: Any, dialect: Dialect | LogicalDialect | None = None, names: Any = None
) -> Plan:
    """Plan a tree without rules, on any mesh; `names` are logical axis names beside it."""
    if dialect is None:
        dialect = EFORMER if names is None and not has_names(tree) else LINEN
    make: Any = LogicalRules if isinstance(dialect, LogicalDialect) else Rules
    return plan(tree, make((), dialect), {"devices": 1}, names=names)


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
        json.dumps([path, kind.shape or (), as_dtype_name(f"the dtype of {path}", kind.dtype)])
        for path, kind in arrays
    ]
    names = {path: kind.names for path, kind in arrays if kind.names is not None}
    model = "" if name is None else f'"model": {json.dumps(name)}, '
    head = f'{{{model}"params": [\n'
    tail = f'\n], "logical_axes": {json.dumps(names)}}}\n' if names else "\n]}\n"
    return head + ",\n".join(rows) + tail


def write_packed(path: str | os.PathLike[str], text: str) -> None:
    """Write a manifest to a file; gzipped, always to the same bytes, if its name ends with .gz."""
    data = text.encode()
    write_bytes(path, gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)
