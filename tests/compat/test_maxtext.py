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


class Dumped(NamedTuple):
    """Arrays by path: abstract, with their logical names and the spec's entries of MaxText."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    names: dict[str, tuple[Any, ...]]
    specs: dict[str, tuple[Any, ...]]


class Dump(NamedTuple):
    mesh: dict[str, int]
    rules: sr.LogicalRules
    leaves: Dumped
    """Parameters and optimizer state; their dtypes are not in a dump."""
    activations: Dumped
    """Those that have names, by place, dtype and shape."""


def read_dump(path: Path) -> Dump:
    content = json.loads(gzip.decompress(path.read_bytes()))
    leaves = {
        name: (line["shape"], "float32", line["logical"], line["spec"]) for name, line in content["leaves"].items()
    }
    lines = content["activations"]
    named = {line["name"]: _activation(line) for line in lines if line["logical"] != "Unknown"}
    return Dump(
        content["mesh"],
        sr.LogicalRules(content["logical_axis_rules"], sr.dialects.MAXTEXT),
        _dumped(leaves),
        _dumped(named),
    )


def _dumped(rows: dict[str, tuple[Any, str, Any, Any]]) -> Dumped:
    return Dumped(
        {path: jax.ShapeDtypeStruct(row[0], row[1]) for path, row in rows.items()},
        {path: _entries(row[2]) for path, row in rows.items()},
        {path: _entries(row[3]) for path, row in rows.items()},
    )


def _activation(line: dict[str, str]) -> tuple[Any, str, Any, Any]:
    """Names and spec are Python literals; shape and dtype are at the end of the name."""
    match = _ACTIVATION.fullmatch(line["name"].rpartition(": ")[2])
    assert match is not None
    shape = [int(size) for size in match["dims"].split(",") if size]
    names, spec = (ast.literal_eval(line["logical"]), ast.literal_eval(line["spec"].removeprefix("P")))
    return shape, match["dtype"], names, spec


def _entries(written: Any) -> tuple[Any, ...]:
    entries = written if isinstance(written, list | tuple) else (written,)
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


NAMES = [path.name.removesuffix(".json.gz") for path in DUMPS]
assert len(DUMPS) == 6


def plan_of(dump, part):
    return sr.plan(part.arrays, dump.rules, dump.mesh, names=part.names)


@pytest.fixture(scope="module", params=DUMPS, ids=NAMES)
def dump(request):
    return read_dump(request.param)


def without_ones(entries, mesh, rank):
    """Per dimension the mesh axes of more than one device."""
    axes = [() if one is None else (one,) if isinstance(one, str) else one for one in entries]
    named = [tuple(axis for axis in each if mesh[axis] > 1) for each in axes]
    return named + [()] * (rank - len(named))


class TestGoldenFiles:
    @pytest.mark.parametrize(("what", "least"), [("leaves", 42), ("activations", 7)])
    def test_each_gets_maxtexts_spec(self, dump, what, least):
        part = getattr(dump, what)
        specs = plan_of(dump, part).specs()
        assert len(specs) == len(part.specs) >= least
        for path, spec in specs.items():
            rank = len(part.arrays[path].shape)
            wanted = without_ones(part.specs[path], dump.mesh, rank)
            assert without_ones(tuple(spec), dump.mesh, rank) == wanted, path

    def test_the_check_finds_no_error(self, dump):
        for part in (dump.leaves, dump.activations):
            assert not plan_of(dump, part).check().at_least("warning")


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
            arrays, names = dump.leaves.arrays, dump.leaves.names
            found = sr.named_shardings(arrays, rules, mesh, names=names)
            planned = sr.plan(arrays, rules, mesh, names=names)
            assert planned.specs() == {path: one.spec for path, one in found.items()}
            for path, sharding in found.items():
                wanted = as_maxtext_shards(names[path], arrays[path].shape, pairs, mesh)
                assert sharding.spec == wanted, (path, names[path])

    def test_a_stale_axis_is_no_error(self, name):
        rules, mesh = sr.LogicalRules(pairs_of(name), sr.dialects.MAXTEXT), mesh_of(name, SIZES[0])
        leaves = read_dump(DUMPS[0]).leaves
        found = sr.plan(leaves.arrays, rules, mesh, names=leaves.names).check()
        stale = [one for one in found if "the mesh has no ax" in one.message]
        assert bool(stale) == (name in ("inference/inference", "post_train/rl_mt_jt"))
        assert all((one.level, one.bytes) == ("info", 0) for one in stale)
        assert not any("did you mean" in one.message for one in stale)


class TestZero1:
    """MaxText's ZeRO-1."""

    @staticmethod
    def plain(spec, rank):
        """Per dimension a list of axes."""
        axes = [[] if e is None else [e] if isinstance(e, str) else list(e) for e in spec]
        return [*axes, *[[]] * (rank - len(axes))]

    def test_as_maxtext_itself_decided(self):
        """On specs that MaxText's own function was given."""
        file = json.loads((DATA / "maxtext-zero1.json").read_text())
        cases = file["shape, spec, spec with data"]
        mesh = sr.resolve_mesh(file["mesh"])
        for shape, spec, expected in cases:
            leaf = jax.ShapeDtypeStruct(tuple(shape), "float32")
            given = NamedSharding(mesh, P(*(tuple(axes or ()) or None for axes in spec)))
            made = maxtext.add_data_to_sharding(mesh, (), leaf, given).spec
            assert self.plain(made, len(shape)) == self.plain(expected, len(shape)), shape
        assert sum(spec != expected for _, spec, expected in cases) > 50

    def test_specs_that_are_shorter_or_longer_than_the_shape(self):
        mesh = sr.resolve_mesh({"data": 2, "fsdp": 4, "tensor": 2})
        for shape, spec, expected in [
            ((3, 3, 2), P(None), [[], [], ["data"]]),
            ((4,), P(None, "fsdp"), [["data"]]),
            ((8, 8), P(None, ("fsdp", "data")), [[], ["fsdp", "data"]]),
        ]:
            leaf = jax.ShapeDtypeStruct(shape, "float32")
            made = maxtext.add_data_to_sharding(mesh, (), leaf, NamedSharding(mesh, spec))
            assert self.plain(made.spec, len(shape)) == expected
        with pytest.raises(AssertionError, match="expected a NamedSharding"):
            maxtext.add_data_to_sharding(mesh, (), jax.ShapeDtypeStruct((2,), "int8"), P())
