"""Price of products whose operand comes in parts: a known answer, and the compiler's cycles."""

from __future__ import annotations

import math
import statistics

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._estimate.step_time import machine_of
from shardrules._place.mesh import as_mesh
from tests.support import memory_steps, page_table

ROWS, WIDTH, HIDDEN = 2**17, 2048, 8192


def time(
    weight, x=("fsdp",), made=("fsdp",), sizes=(("fsdp", 8),), hardware="v5p", dtype="bfloat16"
):
    """Return the time of a product, of which devices along fsdp have rows."""
    mesh = as_mesh(dict(sizes))
    plan = sr.plan({"w": jax.ShapeDtypeStruct((WIDTH, HIDDEN), dtype)}, [("w", weight)], mesh)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype, sharding=NamedSharding(mesh, P(*x)))

    def product(params, x):
        return lax.with_sharding_constraint(x @ params["w"], NamedSharding(mesh, P(*made)))

    step = sr.trace(product, plan, x)
    return step.time(machine_of(hardware))


def alone(devices, hardware="v5p"):
    device = sr.Hardware.named(hardware)
    peak = device.flops_per_second["bfloat16"] * device.efficiency
    return 2 * ROWS * WIDTH * HIDDEN / devices / peak


def test_each_part_but_the_first_is_added_to_the_result_in_memory():
    result = ROWS // 8 * HIDDEN * 2
    added = 7 * 2 * result / sr.Hardware.named("v5p").memory_bytes_per_second
    found = time(("fsdp",))
    assert found.compute == pytest.approx(alone(8) + added)
    # A flag of the compiler has the weight gathered first, which is the best that there is.
    best = alone(8) * sr.Hardware.named("v5p").efficiency
    assert found.best == pytest.approx(max(best, found.sent["fsdp",]))


@pytest.mark.parametrize(
    "case",
    [
        {"weight": (None, "fsdp")},
        {"weight": ()},
        {"weight": ("fsdp",), "hardware": "H100"},
        {"weight": ("fsdp",), "sizes": (("fsdp", 64),)},
        {
            "weight": ("fsdp", "tp"),
            "x": ("fsdp", "tp"),
            "made": ("fsdp", "tp"),
            "sizes": (("fsdp", 8), ("tp", 2)),
        },
    ],
    ids=["kept dimension", "whole", "no TPU", "64 parts", "both operands come"],
)
def test_other_products_cost_what_they_compute(case):
    devices = math.prod(dict(case.get("sizes", (("fsdp", 8),))).values())
    hardware = case.get("hardware", "v5p")
    assert time(**case).compute == pytest.approx(alone(devices, hardware))


@pytest.mark.slow
def test_the_time_is_near_the_cycles_of_the_compiler():
    times = memory_steps.seconds()
    assert memory_steps.time_table(times) == page_table.shown(memory_steps.PAGE, "computing")
    ratios = {name: mine / compilers for name, (mine, compilers) in times.items()}
    passes = [r for name, r in ratios.items() if not name.startswith("decode")]
    assert len(passes) >= 13
    # Half of them are within a quarter; without the parts, within 45 %.
    assert statistics.median(abs(math.log(ratio)) for ratio in passes) < math.log(1.3)


def test_what_is_assumed_of_parts_is_told():
    assert time(("fsdp",)).assumptions["parts"] == 32
    assert "parts=32" in str(time(("fsdp",)))
    assert "parts" not in time((None, "fsdp")).assumptions
    assert "parts" not in time(("fsdp",), hardware="H100").assumptions


def test_float32_is_multiplied_at_its_own_rate_and_on_tpus_at_that_of_bfloat16():
    for hardware, ratio in (("H100", 2), ("v5p", 1)):
        times = [time((), hardware=hardware, dtype=dtype) for dtype in ("float32", "bfloat16")]
        assert times[0].compute == pytest.approx(ratio * times[1].compute)
