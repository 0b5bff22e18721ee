"""Advice on corrections: it has been tried, and who follows it cuts the array."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr

PREFIX = sr.Correction(indivisible="prefix")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def fix_of(shape, spec, mesh):
    plan = sr.plan({"w": array(*shape)}, [("w", spec)], mesh)
    (one,) = (found for found in plan.check(large=1) if found.kind == "correction")
    return one.fix


@pytest.mark.parametrize(("heads", "unit"), [(4, 1), (2, 128), (6, 1), (12, 64)])
def test_few_heads_by_two_axes(heads, unit):
    spec = sr.RuleSpec((None, "tp"), units=(None, unit))
    fix = fix_of((64, heads * unit), spec, {"tp": 8})
    parts = {6: 2, 12: 4}.get(heads, heads)
    assert (
        f"put kv={parts}, rep={8 // parts} in the mesh in place of tp=8: rules.with_axes({{'tp': ('kv', 'rep')}}) and "
        "Correction(indivisible='prefix')"
    ) in fix
    rules = sr.Rules([("w", spec)]).with_axes({"tp": ("kv", "rep")})
    mesh = {"kv": parts, "rep": 8 // parts}
    plan = sr.plan({"w": array(64, heads * unit)}, sr.Rules(rules, correction=PREFIX), mesh)
    assert plan.kind("w").spec == (None, "kv")
    if parts == heads:
        plan.check(large=1).raise_for("warning")  # they are shared on purpose


def test_what_could_be_cut_further_is_no_sharing():
    rules = sr.Rules([("w", (None, ("kv", "rep")))], correction=PREFIX)
    (one,) = sr.plan({"w": array(64, 12)}, rules, {"kv": 4, "rep": 2}).check(large=1)
    assert one.level == "warning"
    assert "is not divisible" in one.message


@pytest.mark.parametrize("size", [3, 50_258])
def test_no_such_axes_for_other_sizes(size):
    assert fix_of((64, size), (None, "tp"), {"tp": 8}) == "use fewer axes or pad the array"


@pytest.mark.parametrize(
    ("shape", "spec", "fix"),
    [
        ((64, 1), (None, "tp"), "leave it whole, or cut dim 0 of size 64 instead"),
        ((1, 60, 64), ("tp",), "leave it whole, or cut dim 2 of size 64 instead"),
        ((1, 64), ("tp", "fsdp"), "leave the dimension whole"),
        ((1, 60), ("tp",), "leave the dimension whole"),
    ],
)
def test_a_dimension_of_one_was_to_be_padded(shape, spec, fix):
    assert fix_of(shape, spec, {"tp": 8, "fsdp": 2}) == fix
