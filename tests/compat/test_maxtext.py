"""MaxText's golden shardings: each leaf and each named activation, as MaxText decided it."""

import ast
import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import maxtext
from tests.support.folders import DATA

DUMPS = sorted((DATA / "maxtext-dumps").glob("*.json.gz"))
_ACTIVATION = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[0-9,]*)\]")


class Dump(NamedTuple):
    """Arrays by path: abstract, with their logical names and the spec's entries of MaxText."""

    mesh: dict[str, int]
    rules: sr.LogicalRules
    arrays: dict[str, jax.ShapeDtypeStruct]
    names: dict[str, tuple[Any, ...]]
    specs: dict[str, tuple[Any, ...]]


def read_dump(path: Path, what: str = "leaves") -> Dump:
    """The parameters and the optimizer's state, without dtypes; or the activations that have names."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    if what == "leaves":
        rows = {name: (one["shape"], "float32", one["logical"], one["spec"]) for name, one in content[what].items()}
    else:
        rows = {one["name"]: _activation(one) for one in content[what] if one["logical"] != "Unknown"}
    return Dump(
        content["mesh"],
        sr.LogicalRules(content["logical_axis_rules"], sr.dialects.MAXTEXT),
        {path: jax.ShapeDtypeStruct(row[0], row[1]) for path, row in rows.items()},
        *({path: _entries(row[at]) for path, row in rows.items()} for at in (2, 3)),
    )


def _activation(line: dict[str, str]) -> tuple[Any, str, Any, Any]:
    """Names and spec are Python literals; shape and dtype are at the end of the name."""
    match = _ACTIVATION.fullmatch(line["name"].rpartition(": ")[2])
    shape = [int(size) for size in match["dims"].split(",") if size]
    return shape, match["dtype"], ast.literal_eval(line["logical"]), ast.literal_eval(line["spec"].removeprefix("P"))


def _entries(written: Any) -> tuple[Any, ...]:
    entries = written if isinstance(written, list | tuple) else (written,)
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


assert len(DUMPS) == 6


def axes_of(spec, rank):
    axes = [[] if e is None else [e] if isinstance(e, str) else list(e) for e in spec]
    return [*axes, *[[]] * (rank - len(axes))]


def without_ones(entries, mesh, rank):
    """Per dimension the mesh axes of more than one device."""
    return [[axis for axis in each if mesh[axis] > 1] for each in axes_of(entries, rank)]


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.name)
@pytest.mark.parametrize(("what", "least"), [("leaves", 42), ("activations", 7)])
def test_each_gets_maxtexts_spec(path, what, least):
    dump = read_dump(path, what)
    plan = sr.plan(dump.arrays, dump.rules, dump.mesh, names=dump.names)
    specs = plan.specs()
    assert len(specs) == len(dump.specs) >= least
    for at, spec in specs.items():
        rank = len(dump.arrays[at].shape)
        wanted = without_ones(dump.specs[at], dump.mesh, rank)
        assert without_ones(tuple(spec), dump.mesh, rank) == wanted, at
    assert not plan.check().at_least("warning")


RULE_LISTS = json.loads(gzip.decompress((DATA / "maxtext-rules.json.gz").read_bytes()))["files"]
SIZES = [
    {"fsdp": 4, "tensor": 4, "model": 4},
    {"data": 2, "stage": 2, "fsdp": 2, "expert": 4, "context": 2, "tensor": 2, "model": 2},
    {"fsdp": 3, "fsdp_transpose": 2, "tensor_sequence": 2, "expert": 5, "autoregressive": 7},
]


def pairs_of(name):
    pairs = RULE_LISTS[name]["rules"]
    return [(a, b if isinstance(b, str) else tuple(b or ()) or None) for a, b in pairs]


def mesh_of(name, sizes):
    return {axis: sizes.get(axis, 1) for axis in RULE_LISTS[name]["mesh_axes"]}


def as_maxtext_shards(names, shape, rules, sizes):
    """flax.linen's spec; without axes of one device, or none; of others those that divide."""
    entries = []
    for dim, entry in enumerate(nn.logical_to_mesh_axes(names, rules)):
        left, kept = shape[dim], []
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            if sizes.get(axis, 1) > 1 and left % sizes[axis] == 0:
                kept.append(axis)
                left //= sizes[axis]
        entries.append(tuple(kept) or None)
    return P(*entries)


@pytest.mark.parametrize("name", RULE_LISTS)
class TestItsRuleLists:
    """All that MaxText's repository has; some name axes that its meshes no longer have."""

    @pytest.mark.parametrize("sizes", SIZES, ids=range(3))
    def test_each_leaf_gets_what_maxtext_gives_it(self, name, sizes):
        pairs, mesh = pairs_of(name), mesh_of(name, sizes)
        rules = sr.LogicalRules(pairs, sr.dialects.MAXTEXT)
        for dump in map(read_dump, DUMPS[0::2]):
            arrays, names = dump.arrays, dump.names
            found = sr.named_shardings(arrays, rules, mesh, names=names)
            planned = sr.plan(arrays, rules, mesh, names=names)
            assert planned.specs() == {path: one.spec for path, one in found.items()}
            for path, sharding in found.items():
                wanted = as_maxtext_shards(names[path], arrays[path].shape, pairs, mesh)
                assert sharding.spec == wanted, (path, names[path])

    def test_a_stale_axis_is_no_error(self, name):
        rules, mesh = sr.LogicalRules(pairs_of(name), sr.dialects.MAXTEXT), mesh_of(name, SIZES[0])
        leaves = read_dump(DUMPS[0])
        found = sr.plan(leaves.arrays, rules, mesh, names=leaves.names).check()
        stale = [one for one in found if "the mesh has no ax" in one.message]
        assert bool(stale) == (name in ("inference/inference", "post_train/rl_mt_jt"))
        assert all((one.level, one.bytes) == ("info", 0) for one in stale)
        assert not any("did you mean" in one.message for one in stale)


def test_zero1_as_maxtext_itself_decided():
    """On specs that MaxText's own function was given; and on some that are shorter or longer than the shape."""
    file = json.loads((DATA / "maxtext-zero1.json").read_text())
    cases = file["shape, spec, spec with data"]
    assert sum(spec != expected for _, spec, expected in cases) > 50
    more = [((3, 3, 2), [None], [[], [], ["data"]]), ((4,), [None, "fsdp"], [["data"]]),
            ((8, 8), [None, ["fsdp", "data"]], [[], ["fsdp", "data"]])]  # fmt: skip
    for shape, spec, expected in [*cases, *more]:
        mesh = sr.resolve_mesh(
            file["mesh"] if (shape, spec, expected) not in more else {"data": 2, "fsdp": 4, "tensor": 2}
        )
        leaf = jax.ShapeDtypeStruct(tuple(shape), "float32")
        entries = (axes if isinstance(axes, str) else tuple(axes or ()) or None for axes in spec)
        made = maxtext.add_data_to_sharding(mesh, (), leaf, NamedSharding(mesh, P(*entries))).spec
        assert axes_of(made, len(shape)) == axes_of(expected, len(shape)), shape
    with pytest.raises(AssertionError, match="expected a NamedSharding"):
        maxtext.add_data_to_sharding(mesh, (), jax.ShapeDtypeStruct((2,), "int8"), P())
