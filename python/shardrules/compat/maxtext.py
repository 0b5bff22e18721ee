"""MaxText: its dumps of shardings, beside a plan, and its ZeRO-1 for optimizer states.

MaxText's rules are `LogicalRules` in the dialect `sr.dialects.MAXTEXT`; rule files may be its YAML.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import check_type
from shardrules._base.io import FileError, parse_json, read_bytes
from shardrules._base.mesh_sizes import checked_sizes
from shardrules._base.specs import Entries, entries_of, entry_axes, with_entries, without_axes
from shardrules._base.text import record, shown
from shardrules._files.leaves import ArraySpec, ArraySpecs
from shardrules._plan.diff import PlanDiff, plan_diff
from shardrules._plan.plan import Plan
from shardrules._plan.resolve import Fit, kind_on_mesh
from shardrules._plan.state import Zero1
from shardrules._plan.survey import checked_type
from shardrules._plan.table import NO_RULE_NEEDED, Columns, Kind, Leaves
from shardrules._rules.dialects import MAXTEXT
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.names import checked_names

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

__all__ = ["ZERO1", "Dump", "DumpedArrays", "add_data_to_sharding", "read_dump"]

ZERO1: Final = Zero1("data", dim="first", place="outer", not_with=("tensor",))
"""MaxText's `shard_optimizer_over_data`, for `Plan.for_optimizer`: as `add_data_to_sharding`."""

_FILES: Final = ("named_shardings.json", "logical_shardings.json", "input_shardings.json")
_ACTIVATIONS: Final = "Activation Sharding Dump"
_NO_NAMES: Final = "Unknown"
_ACTIVATION: Final = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[0-9,]*)\]")


@record
class DumpedArrays(NamedTuple):
    """Arrays with their names, and the specs that MaxText gave them.

    Example:
        >>> from shardrules.compat import maxtext
        >>> dump = maxtext.read_dump("tests/data/maxtext-dumps/qwen3-0.6b_tpu7x-16_default.json.gz")
        >>> name = "attentions/inputs_q: bfloat16[192,2048,1024]"
        >>> dump.activations.specs[name]
        ('fsdp', None, None)
    """

    arrays: dict[str, ArraySpec]
    """{path: shape and dtype}, a tree for `plan`."""
    names: dict[str, tuple[Any, ...]]
    """{path: logical axis names}, for `plan`."""
    specs: dict[str, tuple[Any, ...]]
    """{path: entries of the PartitionSpec}."""
    mesh: dict[str, int]

    def diff(self, plan: Plan) -> PlanDiff:
        """Return the differences from the dump to a plan, up to dtypes and mesh axes of size 1.

        Raises:
            ValueError: The plan has another mesh.
        """
        check_type("plan", plan, Plan, "a Plan")
        dumped, planned = _plainest(self._columns()), _plainest(plan)
        if dumped.axis_sizes != planned.axis_sizes:
            raise ValueError(f"plan: it is on the mesh {plan.axis_sizes}, the dump on {self.mesh}")
        return plan_diff(dumped, planned)._replace(rules=())

    def _columns(self) -> Columns:
        paths = list(self.arrays)
        types, kinds = [], []
        for path, array in self.arrays.items():
            leaf = checked_type(NO_RULE_NEEDED, array.shape, array.dtype)
            types.append(leaf)
            kinds.append(kind_on_mesh(leaf, None, Fit(Entries(self.specs[path])), self.mesh))
        kind_of = np.arange(len(paths), dtype=np.int32)
        tree = {path: row for row, path in enumerate(paths)}
        return Columns(
            Leaves(LogicalRules((), MAXTEXT), tree, paths, paths, kind_of, types), kinds, self.mesh
        )


@record
class Dump(NamedTuple):
    """What MaxText decided for a model on a mesh.

    Example:
        >>> from shardrules.compat import maxtext
        >>> dump = maxtext.read_dump("tests/data/maxtext-dumps/qwen3-0.6b_tpu7x-16_default.json.gz")
        >>> len(dump.leaves.arrays), len(dump.activations.arrays), len(dump.unnamed)
        (42, 7, 5)
    """

    mesh: dict[str, int]
    """Devices along each mesh axis."""
    rules: LogicalRules | None
    """The rules, if the dump has them."""
    leaves: DumpedArrays
    """Parameters and optimizer state. Their dtypes are not in a dump."""
    activations: DumpedArrays
    """The activations that have names, by place, dtype and shape."""
    unnamed: tuple[str, ...]
    """The other activations."""


def read_dump(path: str | Path, *, dtype: str = "float32") -> Dump:
    """Return what MaxText decided, as its script `run_sharding_dump` writes it.

    Args:
        path: A directory of named_shardings.json, logical_shardings.json and input_shardings.json;
            or one JSON file, which may be gzipped, with the keys mesh, logical_axis_rules, leaves
            (by path their shape, logical and spec) and activations (name, logical and spec).
        dtype: The dtype of the leaves.

    Raises:
        FileError: It is not a dump, or a part of it is missing.

    Example:
        >>> import shardrules as sr
        >>> from shardrules.compat import maxtext
        >>> dump = maxtext.read_dump("tests/data/maxtext-dumps/qwen3-0.6b_tpu7x-16_default.json.gz")
        >>> plan = sr.plan(dump.leaves.arrays, dump.rules, dump.mesh, names=dump.leaves.names)
        >>> print(dump.leaves.diff(plan))
        no differences
    """
    check_type("path", path, str | os.PathLike, "the path of a dump")
    check_type("dtype", dtype, str, "the name of a dtype")
    place = Path(path)
    content = _dump_of_directory(place) if place.is_dir() else _dump_json(place)
    with _dump_errors_at(place):
        mesh = checked_sizes(_dump_typed(content["mesh"], dict))
        rules = content.get("logical_axis_rules")
        leaves = {
            name: (
                _dump_shape(line["shape"]),
                dtype,
                _dump_names(line["logical"]),
                _dump_entries(line["spec"]),
            )
            for name, line in _dump_typed(content["leaves"], dict).items()
        }
        named, unnamed = {}, []
        for line in _dump_typed(content["activations"], list):
            if line["logical"] == _NO_NAMES:
                unnamed.append(line["name"])
            else:
                named[line["name"]] = _activation(line)
        return Dump(
            mesh,
            None if rules is None else LogicalRules(rules, MAXTEXT),
            _dumped(leaves, mesh),
            _dumped(named, mesh),
            tuple(unnamed),
        )


_Dumped = tuple[tuple[int, ...], str, tuple[Any, ...], tuple[Any, ...]]


def _dumped(match: Mapping[str, _Dumped], mesh: dict[str, int]) -> DumpedArrays:
    specs = ArraySpecs()
    return DumpedArrays(
        {name: specs[shape, dtype] for name, (shape, dtype, _, _) in match.items()},
        {name: names for name, (_, _, names, _) in match.items()},
        {name: spec for name, (_, _, _, spec) in match.items()},
        mesh,
    )


def _dump_of_directory(path: Path) -> dict[str, Any]:
    """Return the three files that MaxText writes, as one."""
    named, logical, inputs = (_dump_json(path / name) for name in _FILES)
    with _dump_errors_at(path):
        first = next(iter(named.values()))
        return {
            "mesh": first["mesh"]["shape"],
            "leaves": {
                name: {
                    "shape": file["shape"],
                    "logical": logical[name]["partition_spec"],
                    "spec": file["partition_spec"],
                }
                for name, file in named.items()
            },
            "activations": [
                {"name": name, "logical": file["logic_axes"], "spec": file["PartitionSpec"]}
                for entry in inputs[_ACTIVATIONS]
                for name, file in entry.items()
            ],
        }


def _dump_json(path: Path) -> dict[str, Any]:
    content = parse_json(path, read_bytes(path))
    if not isinstance(content, dict):
        raise FileError(f"{path}: not a dump of MaxText: it holds {shown(content)}")
    return content


@contextmanager
def _dump_errors_at(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        LookupError,
        RecursionError,
        StopIteration,
        SyntaxError,
        TypeError,
        ValueError,
        MemoryError,
    ) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise FileError(f"{path}: not a dump of MaxText: {what}") from error


def _activation(line: dict[str, Any]) -> _Dumped:
    """Return an activation: names and spec are Python literals, its shape is in its name."""
    match = _ACTIVATION.fullmatch(line["name"].rpartition(": ")[2])
    if match is None:
        raise ValueError(
            f"the activation {shown(line['name'])} does not end in a dtype and a shape"
        )
    dims = [int(size) for size in match["dims"].split(",") if size]
    spec = ast.literal_eval(_dump_typed(line["spec"], str).removeprefix("P"))
    return (
        tuple(dims),
        match["dtype"],
        _dump_names(ast.literal_eval(line["logical"])),
        _dump_entries(spec),
    )


def _dump_names(names: Any) -> tuple[Any, ...]:
    return checked_names(tuple(_dump_typed(names, list | tuple)))


def _dump_entries(spec: Any) -> tuple[Any, ...]:
    text = spec if isinstance(spec, list | tuple) else (spec,)
    entries = tuple(tuple(item) if isinstance(item, list) else item for item in text)
    return checked_names(entries)


def _dump_shape(shape: Any) -> tuple[int, ...]:
    return tuple(_dump_typed(size, int) for size in _dump_typed(shape, list))


def _dump_typed(value: Any, types: Any) -> Any:
    if not isinstance(value, types) or isinstance(value, bool):
        raise TypeError(f"{shown(value)} stands where something else belongs")
    return value


def _plainest(columns: Columns) -> Columns:
    """Return the columns without dtypes and axes of size 1."""
    ones = frozenset(axis for axis, size in columns.axis_sizes.items() if size == 1)

    def plain(kind: Kind) -> Kind:
        if kind.spec is None:
            return replace(kind, dtype=None)
        entries = list(entries_of(without_axes(kind.spec, ones)))
        while entries and not entry_axes(entries[-1]):
            entries.pop()
        return replace(kind, dtype=None, spec=with_entries(kind.spec, entries))

    sizes = {axis: n for axis, n in columns.axis_sizes.items() if n > 1}
    return Columns(columns._leaves, list(map(plain, columns.kinds)), sizes)


def add_data_to_sharding(mesh: Mesh, path: Any, aval: Any, sharding: Any) -> NamedSharding:
    """Add the mesh axis "data" to a sharding: ZeRO-1 for a leaf of an optimizer's state.

    The first dimension gets it whose part on a device "data" divides, unless "tensor" cuts it.
    Semantics of `maxtext.utils.sharding.add_data_to_sharding` of 2026. `Plan.for_optimizer` does so
    with `zero1=ZERO1`; with `zero1="data"` it takes the dimension of which each device holds most.

    Args:
        mesh: The mesh, with an axis "data".
        path: The leaf's path, of JAX's keys.
        aval: The leaf; its `.shape` is read.
        sharding: Its NamedSharding.

    Raises:
        AssertionError: It is not a NamedSharding, or the leaf cannot be sharded so.

    Example:
        >>> import jax
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from shardrules import resolve_mesh
        >>> mesh = resolve_mesh({"data": 2, "fsdp": 4})
        >>> leaf = jax.ShapeDtypeStruct((6, 8), "float32")
        >>> add_data_to_sharding(mesh, (), leaf, NamedSharding(mesh, P(None, "fsdp"))).shard_shape(
        ...     leaf.shape)
        (3, 2)
    """
    from jax import tree_util
    from jax.sharding import NamedSharding, PartitionSpec

    where = tree_util.keystr(path)
    if not isinstance(sharding, NamedSharding):
        raise AssertionError(  # noqa: TRY004 MaxText's type
            f"{where}: expected a NamedSharding, not {shown(sharding)}"
        )
    rank, spec = len(aval.shape), tuple(sharding.spec)
    if len(spec) == rank + 1 and "local_layers" in spec:
        spec = tuple(entry for entry in spec if entry != "local_layers")
    spec = (*spec, *[None] * (rank - len(spec)))[:rank]
    padded = sharding
    if len(sharding.spec) != rank:
        padded = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    try:
        dims = padded.shard_shape(tuple(aval.shape))
    except Exception as error:
        raise AssertionError(f"{where}: a shape of {aval.shape} cannot have {padded}") from error
    named = [entry_axes(entry) for entry in spec]
    if any("data" in axes for axes in named):
        return padded
    for dim, (size, axes) in enumerate(zip(dims, named, strict=True)):
        if size % mesh.shape["data"] == 0 and "tensor" not in axes:
            entries = (*spec[:dim], ("data", *axes), *spec[dim + 1 :])
            return NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return padded
