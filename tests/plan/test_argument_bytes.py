"""The bytes of a plan are those that XLA counts for the arguments of a compiled program.

`memory_analysis().argument_size_in_bytes` is per device, and of all arguments together. Where the two differ
on purpose stands in docs/planning.md; the tests at the end have the same list.
"""

from __future__ import annotations

from functools import cache

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

import shardrules as sr
from shardrules._base.dtypes import BITS
from shardrules._base.rule_specs import LibraryCorrection
from tests.support import corpus
from tests.support.process_worker import enable_x64
from tests.support.slow import MODELS, slow
from tests.support.trees import array

SIZES = {1: (1, 1), 2: (1, 2), 8: (4, 2)}
RULES = [("", sr.fsdp(("fsdp", "tp"), min_bytes=0))]
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in BITS if "key<" not in name}
# XLA does not pack these, and JAX does not have those unless jax_enable_x64 is set.
UNPACKED = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
WIDE = ("int64", "uint64", "float64", "complex128")
DROPPING = LibraryCorrection(absent="drop")


def mesh_of(devices):
    grid = np.array(jax.devices()[:devices]).reshape(SIZES[devices])
    return Mesh(grid, ("fsdp", "tp"))


def argument_bytes(*trees):
    """What XLA counts for a program with these arguments."""
    leaves = jax.tree.leaves(trees)
    compiled = jax.jit(lambda *_: 0, keep_unused=True).lower(*leaves).compile()
    return compiled.memory_analysis().argument_size_in_bytes


def check_equal(plan):
    assert plan.bytes_per_device().max == argument_bytes(plan.abstract()) > 0


def of_each_kind(plan, tree, most):
    """The plan of the flat tree's first leaves of each folded path; XLA takes minutes for 45,000."""
    rows = [row for folded in plan.folded for row in folded.rows[:most]]
    few = {plan.paths[row]: tree[plan.paths[row]] for row in rows}
    return sr.plan(few, sr.Rules(plan.rules, correction=DROPPING), plan.mesh)


@pytest.mark.parametrize("devices", [slow(1), slow(2), 8])
@pytest.mark.parametrize("model", MODELS)
def test_models(model, devices):
    """Whole, but for the experts of DeepSeek-V3."""
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    plan = sr.plan(tree, RULES, mesh_of(devices))
    check_equal(of_each_kind(plan, tree, 500) if model in corpus.LARGEST else plan)


@pytest.mark.parametrize("devices", SIZES)
@pytest.mark.parametrize("shape", [(8, 3), (16, 9), (8,), (1,), (), (0, 5), (8, 0)], ids=str)
def test_all_dtypes(shape, devices):
    """Together: elements of 4 bits are packed, and each array begins with a whole byte."""
    names = sorted(known_dtypes() - {*UNPACKED})
    with enable_x64(True):
        tree = {name: array(*shape, dtype=DTYPES[name]) for name in names}
        plan = sr.plan(tree, RULES, mesh_of(devices))
        assert plan.bytes_per_device().max == argument_bytes(plan.abstract())
    assert {"bool", "float8_e4m3fn", "int4", "uint4", "bfloat16", "complex64", *WIDE} <= set(names)


@cache
def known_dtypes():
    """The dtypes that this version of JAX has."""
    with enable_x64(True):
        return {name for name, dtype in DTYPES.items() if is_known(dtype)}


def is_known(dtype):
    try:
        argument_bytes(array(8, dtype=dtype))
    except (TypeError, jax.errors.JaxRuntimeError):  # of JAX, of jaxlib
        return False
    return True


@pytest.mark.parametrize("devices", SIZES)
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys(implementation, devices):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    keys = jax.ShapeDtypeStruct((8, 3), key.dtype)
    check_equal(sr.plan({"key": key, "keys": keys}, [("", ("fsdp",))], mesh_of(devices)))


class TestWhereTheyDiffer:
    """As docs/planning.md says."""

    def test_uneven_cuts(self):
        """JAX has no arguments like that; the plan counts what a program would hold inside."""
        keep = sr.Correction(indivisible="keep")
        plan = sr.plan({"w": array(6, 8)}, sr.Rules([("w", "fsdp")], correction=keep), mesh_of(8))
        assert plan.bytes_per_device().max == 64
        with pytest.raises(ValueError, match="divi"):
            argument_bytes(plan.abstract())

    @pytest.mark.parametrize("name", UNPACKED)
    def test_types_of_less_than_a_byte(self, name):
        if name not in known_dtypes():
            pytest.skip("this JAX has no such dtype")
        plan = sr.plan({"w": array(8, 8, dtype=DTYPES[name])}, [("w", "fsdp")], mesh_of(8))
        assert plan.bytes_per_device().max == 2 * BITS[name]
        assert argument_bytes(plan.abstract()) == 2 * 8

    @pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
    def test_types_of_64_bits(self):
        for name in WIDE:
            plan = sr.plan({"w": array(8, 8, dtype=name)}, [("w", "fsdp")], mesh_of(8))
            assert plan.bytes_per_device().max == 2 * argument_bytes(plan.abstract())
