"""Specs with axes that cut nothing: reduced ones are placed; what cannot be is told at each door."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

X = np.arange(64, dtype="float32").reshape(8, 8)
REDUCED = P("x", reduced={"y"})


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def rules(spec):
    return [("a", spec)]


PLACED = {
    "shard": lambda spec, mesh: sr.shard({"a": X}, rules(spec), mesh),
    "shard by specs": lambda spec, mesh: sr.shard({"a": X}, spec, mesh),
    "shard by shardings": lambda spec, mesh: sr.shard({"a": X}, NamedSharding(mesh, spec)),
    "shard_local": lambda spec, mesh: sr.shard_local({"a": X}, spec, mesh),
}
DECIDED = {
    "named_shardings": lambda spec, mesh: sr.named_shardings({"a": X}, rules(spec), mesh),
    "named_shardings by specs": lambda spec, mesh: sr.named_shardings({"a": X}, spec, mesh),
    "specs of a plan": lambda spec, mesh: sr.plan({"a": X}, rules(spec), mesh).specs(),
    "shardings of a plan": lambda spec, mesh: sr.plan({"a": X}, rules(spec), mesh).shardings(),
    "spec_for": lambda spec, mesh: sr.spec_for("a", (8, 8), rules(spec), mesh),
    "constraint": lambda spec, mesh: sr.with_sharding_constraint({"a": X}, rules(spec), mesh),
    "shard": PLACED["shard"],
    "shard by specs": PLACED["shard by specs"],
    "shard_local": PLACED["shard_local"],
}


@pytest.mark.parametrize("door", PLACED)
def test_reduced_axes_ended_in_a_bare_error_of_jax(mesh, door):
    placed = PLACED[door](REDUCED, mesh)["a"]
    expected = jax.device_put(X, NamedSharding(mesh, REDUCED))
    assert placed.sharding.is_equivalent_to(expected.sharding, 2)
    assert placed.sharding.spec.reduced == {"y"}
    np.testing.assert_array_equal(placed, expected)


@pytest.mark.parametrize("door", PLACED)
def test_unreduced_arrays_are_not_placed(mesh, door):
    with pytest.raises(ValueError, match=r"the leaf \['a'\] cannot be placed .* sum over y"):
        PLACED[door](P("x", unreduced={"y"}), mesh)


@pytest.mark.skipif(
    (0, 8) <= jax.__version_info__ < (0, 12), reason="JAX 0.10 takes them outside jit, and no error ends it"
)
@pytest.mark.parametrize("make", [np.asarray, jax.numpy.asarray], ids=["numpy", "jax"])
def test_constraints_outside_jit_ended_in_a_bare_error_of_jax(mesh, make):
    given, spec = {"b": make(X), "a": make(X)}, P("x", unreduced={"y"})
    with pytest.raises(ValueError, match=r"the leaf \['a'\] cannot be placed .* sum over y"):
        sr.with_sharding_constraint(given, [("a", spec), ("b", P("x"))], mesh)


def test_a_constraint_to_the_unreduced_axes_that_an_array_has_keeps_it(mesh):
    placed = [jax.device_put(X, NamedSharding(mesh, spec)) for spec in (P("x", "y"), P("y"))]
    target = NamedSharding(mesh, P("x", None, unreduced={"y"}))
    sums = jax.jit(lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=target))(*placed)
    assert sr.with_sharding_constraint({"a": sums}, target)["a"].sharding == target


@pytest.mark.parametrize("tag", ["reduced", "unreduced"])
@pytest.mark.parametrize("door", DECIDED)
def test_one_that_the_mesh_lacks_was_an_error_without_path_or_none(mesh, door, tag):
    with pytest.raises(ValueError, match="the mesh has no axis 'z'") as caught:
        DECIDED[door](P("x", **{tag: {"z"}}), mesh)
    for part in ("\n    a", "(8, 8)", f"{tag}=['z']"):
        assert part in str(caught.value)


def test_one_that_is_not_explicit_is_told_with_path_and_rule():
    for call in (sr.named_shardings, lambda *given: sr.plan(*given).shardings()):
        with pytest.raises(ValueError, match=r"(?s)rule 0.*Explicit"):
            call({"a": X}, rules(P(None, unreduced={"x"})), {"x": 2})


def test_zero1_cuts_along_a_reduced_axis(mesh):
    """The moments are cut by what the parameter is whole along."""
    plan = sr.plan({"a": X}, rules(REDUCED), mesh)
    assert plan.for_optimizer({"mu": {"a": X}}, zero1="y").specs()["mu"]["a"] == P("x", "y")
