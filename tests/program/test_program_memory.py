"""The memory of programs: XLA's numbers, and the arrays that are alive at the peak."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.hlo import Hlo
from shardrules._program.memory import Alive, DeviceArrays, LiveRanges, memory_of, totals_of
from shardrules._program.values import Values
from tests.support.compiled import array, devices

MESH = devices(fsdp=8)
KERNELS, ROWS = P(None, "fsdp"), P("fsdp")
PLAN = sr.plan({"w": jax.ShapeDtypeStruct((16, 256, 256), "float32")}, [("w", KERNELS)], MESH)


def layers(*, recompute=False, rows=2048, moments=0):
    def layer(x, w):
        h = jax.nn.gelu(jnp.tanh(x @ w) @ w)
        return x + h @ w, None

    def loss(params, x):
        body = jax.checkpoint(layer) if recompute is True else layer
        last = jax.checkpoint(jnp.tanh) if recompute == "the last" else jnp.tanh
        return (last(jax.lax.scan(body, x, params["w"])[0]) ** 2).mean()

    def step(params, x, *moments):
        params = jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))
        return (params, *(0.9 * m for m in moments)) if moments else params

    more = [array(MESH, (moments,), "fsdp")] * bool(moments)
    out = (PLAN.shardings(), *(each.sharding for each in more)) if more else PLAN.shardings()
    jitted = jax.jit(step, donate_argnums=(0, 2) if more else 0, out_shardings=out)
    return jitted, PLAN.abstract(), array(MESH, (rows, 256), "fsdp"), *more


def compile_layers(**options):
    jitted, *args = layers(**options)
    return jitted.lower(*args).compile()


def memory_of_layers(**options):
    return sr.inspect(compile_layers(**options), (PLAN, ROWS), PLAN).memory


def told(total=0, **sizes):
    """The totals of an executable of which XLA tells these bytes."""
    numbers = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    stats = SimpleNamespace(**numbers, total_allocation_bytes=total)
    return totals_of(SimpleNamespace(memory_analysis=lambda: stats))


class TestMemory:
    def test_its_numbers_are_those_of_xla(self):
        compiled = compile_layers()
        memory, numbers = sr.inspect(compiled, (PLAN, ROWS), PLAN).memory, compiled.memory_analysis()
        assert memory.totals.arguments == numbers.argument_size_in_bytes
        assert memory.totals.aliased == numbers.alias_size_in_bytes > 0
        total = numbers.argument_size_in_bytes + numbers.output_size_in_bytes + numbers.temp_size_in_bytes
        # Without what is lost between arrays, where this JAX tells the whole.
        total = getattr(numbers, "total_allocation_bytes", total - numbers.alias_size_in_bytes)
        assert memory.peak == total + numbers.generated_code_size_in_bytes
        assert 0.9 < memory.alive / memory.peak < 1.1

    def test_temporaries_of_tpus_are_not_counted_twice(self):
        # libtpu accepted this step on v5e, which has 16.9 GB: arguments and temp are 19.9 GB.
        sizes = {"argument": 1_342_177_280, "output": 1_342_177_280, "alias": 1_342_177_280}
        assert told(**sizes, temp=18_556_400_000, generated_code=2_100_000).temporaries == 18_556_400_000
        totals = told(16_056_201_728, **sizes, temp=18_556_400_000, generated_code=2_100_000)
        assert totals.peak == 16_056_201_728 + 2_100_000

    def test_the_largest_arrays_have_a_name_and_a_line(self):
        memory = memory_of_layers()
        assert 10 < len(memory.buffers) <= 100
        assert len(str(memory).splitlines()) == 13
        sizes = [row.bytes for row in memory.buffers]
        assert sizes == sorted(sizes, reverse=True)
        kept = next(row for row in memory.buffers if row.is_saved)
        assert kept.shape == "f32[16,256,256]"
        assert kept.place.file == __file__
        assert any(row.what == "inputs/0/w" for row in memory.buffers)
        content = json.loads(json.dumps(memory.to_json()))
        assert (content["peak"], content["buffers"][0]["bytes"]) == (memory.peak, sizes[0])

    def test_recomputed_activations_are_not_kept(self):
        whole, less = memory_of_layers(), memory_of_layers(recompute=True)
        layer_inputs = 16 * 2048 // 8 * 256 * 4
        assert layer_inputs <= less.saved < 1.1 * layer_inputs  # with what the loss reads again
        assert whole.saved > 5 * layer_inputs
        assert less.peak < whole.peak

    @pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="older XLA writes no live ranges")
    def test_what_is_kept_is_about_what_xla_has_in_memory_at_the_peak(self):
        jitted, *args = layers()
        assert memory_of_layers().saved == pytest.approx(sr.prove(jitted, *args, on=MESH).memory.saved, rel=0.1)

    def test_a_result_is_not_kept_for_the_backward_pass_alone(self):
        def loss(w, x):
            hidden = jnp.tanh(x @ w)
            return (hidden**2).sum(), hidden

        rows = jax.ShapeDtypeStruct((256, 256), "float32")
        memory = sr.inspect(jax.jit(jax.grad(loss, has_aux=True)).lower(rows, rows).compile(), (None, None)).memory
        assert memory.saved == sum(row.bytes for row in memory.buffers if row.is_saved) < rows.size * 4


class TestRemat:
    def findings(self, compiled, **options):
        return [row for row in sr.verify(compiled, (PLAN, ROWS), PLAN, **options) if row.kind == "remat"]

    @pytest.mark.parametrize("recompute", [False, "the last"])
    def test_activations_that_are_most_of_the_memory_are_told(self, recompute):
        (finding,) = self.findings(compile_layers(recompute=recompute), large=2**20)
        assert finding.level == "info"
        assert "jax.checkpoint" in finding.fix
        assert f"at {sr.types.Place(__file__, 1)}"[:-2] in finding.message

    def test_recomputed_or_small_ones_are_not(self):
        assert not self.findings(compile_layers(recompute=True), large=2**20)
        assert not self.findings(compile_layers(rows=256))

    @pytest.mark.parametrize(("moments", "is_told"), [(2**27, True), (2**31, False)])
    def test_a_large_state_of_the_optimizer_does_not_hide_them(self, moments, is_told):
        """But of 2**31, where to compute them again would free too little."""
        findings = sr.verify(compile_layers(moments=moments), (PLAN, ROWS, None), large=2**20)
        assert ("remat" in {row.kind for row in findings}) == is_told


def test_arrays_that_share_memory_are_not_said_to_be_more_than_there_is():
    """As before JAX 0.10, whose XLA lists none: the order of the instructions knows no sharing."""
    executable = sr.inspect(compile_layers(), (PLAN, ROWS), PLAN)._executable
    all_saved = memory_of(executable, told(1000))
    assert (all_saved.alive, all_saved.saved, all_saved.peak) == (1000, 1000, 1000)
    assert str(all_saved).splitlines()[1].startswith("the largest arrays that are alive; 1.00 kB are ")


# As libtpu writes it: the cast at the end of the fusion has no name of its own.
CAST = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[64,64]{1,0})->bf16[64,64]{1,0}}

%fused (p: f32[64,64]) -> bf16[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  %tanh.1 = f32[64,64]{1,0} tanh(%p), metadata={op_name="jit(f)/tanh"}
  ROOT %convert.1 = bf16[64,64]{1,0} convert(%tanh.1)
}

ENTRY %main (x: f32[64,64]) -> bf16[64,64] {
  %x = f32[64,64]{1,0} parameter(0), metadata={op_name="x"}
  %exp.1 = f32[64,64]{1,0} exponential(%x), metadata={op_name="jit(f)/exp"}
  %fusion = bf16[64,64]{1,0} fusion(%exp.1), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/tanh"}
  ROOT %neg.1 = bf16[64,64]{1,0} negate(%fusion), metadata={op_name="jit(f)/neg"}
}
"""


def test_a_fusion_that_ends_in_a_cast_is_not_named_by_what_it_reads():
    values = Values(Hlo(CAST))
    row = Alive(*values.of("main", "fusion"), 2**13)
    assert DeviceArrays(values).buffer(row, {}).what == "jit(f)/tanh"


LASTING = """\
HloModule m, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (a: f32[16], h: f32[64]) -> (f32[16], f32[2]) {
  %a = f32[16]{0} parameter(0)
  %h = f32[64]{0:S(5)} parameter(1)
  %i = s32[] constant(0)
  %zeros = f32[16]{0} broadcast(%i), dimensions={}, metadata={op_name="jit(f)/jvp()/zeros"}
  %part = f32[4]{0} slice(%a), slice={[0:4]}, metadata={op_name="jit(f)/jvp()/part"}
  %kept = f32[16]{0} dynamic-update-slice(%zeros, %part, %i), metadata={op_name="jit(f)/jvp()/update"}
  %next = f32[16]{0} multiply(%kept, %zeros), metadata={op_name="jit(f)/transpose(jvp())/mul"}
  %out = f32[2]{0} slice(%next), slice={[0:2]}
  ROOT %t = (f32[16]{0}, f32[2]{0}) tuple(%next, %out)
}
"""


def test_arrays_that_last():
    """Neither what is in the memory of an argument or of the host, nor what is computed again."""
    values = Values(Hlo(LASTING))
    arrays, rows = DeviceArrays(values), {}
    for row in arrays.lasting():
        rows[values.lines[row.node].name] = (row.bytes, row.is_output, arrays.buffer(row, {}).what)
    update = (64, False, "jit(f)/jvp()/part")  # by what is written
    assert rows == {"a": (64, False, "a"), "kept": update, "out": (8, True, "output")}
    assert [arrays.is_saved(*values.of("main", name)) for name in ("zeros", "part", "kept")] == [True, False, True]
    # What is read in another shape is kept, too.
    casts = "  %flat = f32[16,1]{1,0} bitcast(%kept)\n  %again = f32[16]{0} bitcast(%flat)\n  %next"
    values = Values(Hlo(LASTING.replace("  %next", casts, 1).replace("multiply(%kept", "multiply(%again")))
    assert DeviceArrays(values).is_saved(*values.of("main", "kept"))


STARTED = """\
HloModule m, entry_computation_layout={(f32[64]{0})->f32[64]{0}}, num_partitions=2

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %s = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %d = f32[64]{0} collective-permute-done(%s)
}
"""
RANGES = """\
    x{}: 256 bytes (cumulative: 256 bytes)
    s{1}: 256 bytes (cumulative: 512 bytes)
    s{2}: 4 bytes (cumulative: 516 bytes)
    d{}: 256 bytes (cumulative: 516 bytes)
"""
ASSIGNED = """\
allocation 0: size 256, parameter 0, shape |f32[64]| at ShapeIndex {}:
 value: <1 x @0> (size=256,offset=0): f32[64]{0}
allocation 1: size 256, maybe-live-out:
 value: <2 s{1} @0> (size=256,offset=0): f32[64]{0}
 value: <4 d @0> (size=256,offset=0): f32[64]{0}
allocation 2: size 4, preallocated-temp:
 value: <3 s{2} @0> (size=4,offset=0): u32[]
"""


def test_what_a_start_has_beside_its_array_is_no_array_and_what_shares_memory_is_one():
    arrays = DeviceArrays(Values(Hlo(STARTED)))
    rows = arrays.at_peak(LiveRanges(RANGES, ASSIGNED))
    assert [(row.bytes, row.is_output) for row in rows] == [(256, False), (256, True)]
