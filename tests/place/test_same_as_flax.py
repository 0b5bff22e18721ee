"""The shardings of logical rules and of eformer's are `==` to those of the libraries themselves."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax.core import spmd
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus

MODELS = [name for name in corpus.manifest_names() if name.startswith("maxtext")]
RULES = [
    ("batch", "data"),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("mlp", ("tensor", "fsdp")),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("kv", None),
]
LEAVES = {
    "shorter": (("embed", "kv"), (64, 8, 8)),
    "whole": (("kv", None), (8, 8)),
    "rules": (("embed", "mlp"), (64, 128)),
    "several": (("mlp", "kv"), (128, 8)),
    "unknown": (("layers", "heads", None), (4, 8, 16)),
    "scalar": ((), ()),
}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("data", "fsdp", "tensor"))


def boxes(box):
    return {
        path: box(jax.ShapeDtypeStruct(shape, "float32"), names)
        for path, (names, shape) in LEAVES.items()
    }


def test_of_linen(mesh):
    boxed = boxes(nn.LogicallyPartitioned)
    boxed["none"] = jax.ShapeDtypeStruct((8, 8), "float32")
    theirs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    assert sr.named_shardings(boxed, sr.LogicalRules(RULES), mesh) == theirs
    assert sr.plan(boxed, sr.LogicalRules(RULES), mesh).shardings() == theirs


@pytest.mark.parametrize("model", MODELS)
def test_of_linen_on_a_real_model(model, mesh):
    rules = corpus.logical_rules("maxtext__base")
    axes = set(jax.tree.leaves([named for _, named in rules]))
    sizes = {axis: {"fsdp": 4, "tensor": 2}.get(axis, 1) for axis in axes}
    tree = corpus.manifest(model).flat(corpus.abstract)
    names = {path: tuple(given) for path, given in corpus.logical_axes(model).items()}
    on = sr.resolve_mesh(sizes)
    found = sr.named_shardings(tree, sr.LogicalRules(rules), on, names=names)
    for path, given in names.items():
        assert found[path] == NamedSharding(on, nn.logical_to_mesh_axes(given, rules)), path


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="flax of that day keeps names otherwise")
def test_of_nnx(mesh):
    rules = [(name, axes) for name, axes in dict(RULES).items()]
    known = {path: leaf for path, leaf in LEAVES.items() if path not in ("unknown", "rules")}
    params = {path: nnx.Param(jax.ShapeDtypeStruct(of[1], "float32")) for path, of in known.items()}
    for path, param in params.items():
        param.set_metadata(out_sharding=known[path][0])
    state = nnx.State(params)
    with spmd.logical_axis_rules(rules):
        theirs = nnx.get_named_sharding(state, mesh)
    ours = sr.named_shardings(state, sr.LogicalRules(rules, sr.dialects.FLAX_CORE), mesh)
    for path in known:
        assert ours[path].get_value() == theirs[path].get_value(), path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model", ["easydel-mixtral-8x22b", "flax-gpt2"])
def test_of_eformer_for_arrays_that_fit(model):
    eformer = pytest.importorskip("eformer.escale", reason="eformer is not installed")
    axes = ("dp", "fsdp", "ep", "tp", "sp")
    on = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 1, 2, 1), axes)
    rules = corpus.rules("easydel__mixtral-MixtralConfig-v0.1.4")
    rules = [*rules, (".*", P())]
    tree = corpus.manifest(model).flat(corpus.abstract)
    specs = eformer.match_partition_rules(rules, tree)
    ours = sr.named_shardings(tree, rules, on)
    for path, leaf in tree.items():
        with on:  # what eformer reads
            theirs = eformer.get_corrected_named_sharding(leaf.shape, specs[path], False)
        assert ours[path] == theirs, path
