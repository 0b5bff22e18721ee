"""What `prove` says of a step against what the TPU's compiler makes of it to its end."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import compiled_on
from tests.tpu.marks import needs_libtpu
from tests.tpu.test_prove import params, step

LAYOUTS = {
    "megatron and fsdp": [("up", P(None, "fsdp", "tp")), ("down", P(None, "tp", "fsdp"))],
    "fsdp": [("", P(None, ("fsdp", "tp")))],
    "swapped": [("up", P(None, "tp", "fsdp")), ("down", P(None, "fsdp", "tp"))],
    "replicated": [("", P())],
}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "layout"),
    [("v5e:2x4", "fsdp"), ("v5e:2x4", "swapped"), ("v5p:2x2x2", "megatron and fsdp"),
     ("v5p:2x2x2", "replicated")],
)  # fmt: skip
def test_bytes_are_equal_and_memory_is_within_a_hundredth(name, layout):
    mesh = sr.Topology(name).mesh(fsdp=4, tp=2)
    plan = sr.plan(params(layers=4, width=1024), LAYOUTS[layout], mesh)
    x = jax.ShapeDtypeStruct((16384, 1024), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    jitted = jax.jit(step, donate_argnums=0)
    proof = sr.prove(jitted, plan, x, on=mesh)
    whole = compiled_on(jitted, plan, x, on=mesh)
    program = sr.inspect(whole, (plan, None))
    assert proof.program.sent == program.sent
    stats = whole.memory_analysis()
    assert proof.memory.peak == pytest.approx(stats.total_allocation_bytes, rel=0.01)
    assert proof.memory.alive <= proof.memory.peak
