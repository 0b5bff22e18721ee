"""Each private name of JAX and flax that is read: there today, and its fallback without it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base import jax_names as _jax
from shardrules._program import jax_names as _programs

MODULES = (_jax, _programs)
ROOT = Path(sr.__file__).parent


def names_read():
    """The private names in calls of `private`, as written there."""
    texts = (Path(module.__file__).read_text(encoding="utf-8") for module in MODULES)
    return {
        call.args[1].value
        for text in texts
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "private"
        and len(call.args) == 2
    }


@pytest.fixture
def mesh(devices=8):
    return Mesh(np.array(jax.devices()[:devices]).reshape(4, 2), ("fsdp", "tp"))


@pytest.fixture
def without(monkeypatch):
    """A function that takes a private name away, from one module or from all."""
    caches = [value for module in MODULES for value in vars(module).values() if hasattr(value, "cache_clear")]

    def take_away(name, module=None):
        read = _jax.private

        def without_it(owner, asked):
            is_hidden = asked == name and module in (None, owner)
            return None if is_hidden else read(owner, asked)

        for place in MODULES:
            monkeypatch.setattr(place, "private", without_it)
        for cache in caches:
            cache.cache_clear()

    yield take_away
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.skipif(not hasattr(jax.sharding, "get_mesh"), reason="JAX has it later than 0.7")
def test_the_mesh_of_set_mesh_is_read_by_public_names(without, mesh):
    without("get_concrete_mesh")
    with jax.set_mesh(mesh):
        assert sr.resolve_mesh() == mesh

        @jax.jit
        def constrained(x):
            return sr.with_sharding_constraint(x, P("fsdp"))

        assert constrained(jnp.ones((8, 8))).sharding.spec[0] == "fsdp"
    with pytest.raises(ValueError, match="no mesh"):
        sr.resolve_mesh()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_any_name_for_the_legacy_mesh_there_is_none(without, mesh):
    without("thread_resources")
    with mesh, pytest.raises(ValueError, match="no mesh"):
        sr.resolve_mesh()


def test_tracing_is_known_from_an_array_made_inside(without, mesh):
    without("trace_state_clean")
    is_clean = _jax.trace_state_check()
    assert is_clean()
    seen = []
    jax.jit(lambda x: (seen.append(is_clean()), x)[1])(1.0)
    assert seen == [False]


def test_without_a_coordination_service_a_process_is_alone(without):
    without("global_state")
    assert _jax.coordination_state() is None
    assert not _jax.is_coordinated()


def test_a_number_keeps_a_dtype_without_weak_types(without):
    assert jax.jit(lambda x: _jax.weakly_typed(x))(np.float32(1)).weak_type
    without("_convert_element_type")
    made = jax.jit(lambda x: _jax.weakly_typed(x))(np.float32(1))
    assert (made.dtype, made.weak_type) == (np.float32, False)


@functools.cache
def compiled(mesh):
    sharding = NamedSharding(mesh, P("fsdp", "tp"))

    def step(state, unused, constant_free):
        return {"w": state["w"] * 2 + constant_free, "n": jnp.sum(state["w"])}

    arrays = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)}
    number = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, P()))
    return jax.jit(step).lower(arrays, number, number).compile()


def test_a_compiled_function_is_read_by_public_names(without, mesh):
    expected = [_shown(side) for side in (_programs.compiled_inputs, _programs.compiled_outputs)]
    without("_executable.out_avals")
    in_tree = _programs.compiled_in_tree(compiled(mesh))
    for name in ("_executable._in_shardings", "_params.const_args", "_executable._out_shardings"):
        without(name)
    without("_params.in_tree")
    assert _programs.compiled_in_tree(compiled(mesh)) == in_tree
    assert [_shown(side) for side in (_programs.compiled_inputs, _programs.compiled_outputs)] == expected
    assert expected[0][1:] == [(None, (), "float32"), expected[0][2]]  # the second one is unused


def _shown(side):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    shardings, values, *_ = side(compiled(mesh))
    return [
        (sharding and sharding.devices_indices_map(value.shape), value.shape, str(value.dtype))
        for sharding, value in zip(shardings, values, strict=True)
    ]


def test_devices_are_in_the_order_of_their_numbers_where_a_sharding_says_none(without):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4])[::-1], ("x",)), P("x"))
    assert _programs.device_order(sharding) == tuple(jax.devices()[3::-1])
    without("_device_assignment")
    assert _programs.device_order(sharding) == tuple(jax.devices()[:4])


def test_rules_are_our_own_where_flax_has_none(without):
    pytest.importorskip("flax.core.spmd")
    without("_axis_rules")
    with sr.logical_axis_rules([("embed", "fsdp")]):
        assert _jax.flax_axis_rules() is None
        assert sr.logical_to_mesh({"w": P("embed")}) == {"w": P("fsdp")}


IN_A_PROCESS = """
import dataclasses, sys
import jax, numpy as np
from shardrules import match_partition_rules
from shardrules._base import jax_names as _jax
read = _jax.private
_jax.private = lambda owner, asked: None if asked == sys.argv[1] else read(owner, asked)

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: object
    bias: object

tree = {"a": [Layer(np.ones(4), {"b": np.ones(4)})], "c": None}
print(match_partition_rules([("kernel", "fsdp"), (".*", None)], tree))
"""


def test_trees_are_walked_by_public_names():
    """In processes of their own, since a type is looked up once."""
    outputs = {
        subprocess.run([sys.executable, "-c", IN_A_PROCESS, hidden], capture_output=True, text=True, check=True).stdout
        for hidden in ("_registry", "nothing")
    }
    assert len(outputs) == 1


DUMPED = ("HloModule", "HloSharding", "from_proto", "parse_flatten_op_sharding")


def test_without_what_reads_dumps_no_shardings_of_results_are_known(without, mesh, tmp_path):
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp", "tp")))
    lowered = jax.jit(lambda x, y: (x * 2, x.sum(0), x.T), keep_unused=False).lower(x, x)
    known = _programs.lowered_shardings(lowered)
    assert known == ([x.sharding, None], [None, None, None])
    compiled = lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True})
    (file,) = tmp_path.glob("*after_optimizations.hlo.pb")
    module = file.read_bytes()
    specs = [sharding.spec for sharding in compiled.output_shardings]
    assert specs == _programs.dumped_specs(module, mesh) == [P("fsdp", "tp"), P("tp"), P("tp", "fsdp")]
    assert _programs.module_text(module).startswith("HloModule jit__lambda")
    for cut in (b"", module[:9], module[: len(module) // 4]):
        assert _programs.dumped_specs(cut, mesh) is None
        assert _programs.module_text(cut) == ""
    for name in DUMPED:
        without(name)
        assert _programs.dumped_specs(module, mesh) is None
    without("v3_to_v2_sharding")  # before JAX 0.10 there is none
    assert _programs.dumped_specs(module, mesh) in (None, specs)
    without("HloModule")
    assert _programs.module_text(module) == ""
    without("_lowering.compile_args")
    assert _programs.lowered_shardings(lowered) is None


@pytest.mark.parametrize(
    "name",
    [
        "get_compile_options",
        "get_prop_to_input_output",
        "_lowering._compiler_options_kvs",
        "_lowering.compile_args",
        *dict.fromkeys(name for _, name in _programs.NAMES_IN_CHILD),
    ],
)
def test_without_what_a_compiler_needs_no_child_is_asked(without, name):
    """The step is then compiled in this process, with the same answer."""
    lowered = jax.jit(lambda x: x * 2).lower(jnp.ones(8))
    asked = _programs.compiler_input(lowered)
    assert asked.device_ids == [0]
    without("_lowering._device_list")
    assert _programs.compiler_input(lowered) == asked
    assert not _programs.calls_python(lowered)
    without(name)
    assert _programs.compiler_input(lowered) is None
    assert _programs.calls_python(lowered) == (name == "_lowering.compile_args")
    proof = sr.prove(lambda x: x * 2, jnp.ones(8))
    assert proof.memory.totals.arguments == 32


@pytest.mark.parametrize("name", ["LoweringParameters", "jaxpr_has_prim_requiring_devices"])
def test_without_overridden_rules_jax_refuses_calls_of_python_without_devices(without, name):
    def step(x):
        return x + jax.pure_callback(lambda v: v, x, x)

    sizes = {"fsdp": 4, "tp": 2}
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    (note,) = sr.prove(step, x, on=sizes).notes
    assert note.startswith("left out, as it is lowered without devices: jax.pure_callback at ")
    without(name)
    with pytest.raises(ValueError, match="an operation that JAX lowers for devices alone"):
        sr.prove(lambda x: step(x) * 2, x, on=sizes)


def test_a_program_beside_a_library_has_lines():
    """What lay in `jax_models` was of JAX, and so had none."""
    file = str(Path(jax.__file__).parent) + "_models/step.py"
    namespace = {}
    exec(compile("def step(x):\n    return x * 2", file, "exec"), namespace)
    (equation,) = jax.make_jaxpr(namespace["step"])(1.0).eqns
    assert _programs.user_line(equation) == (file, 2)


def test_without_frames_an_equation_has_no_line(without):
    (equation,) = jax.make_jaxpr(lambda x: x * 2)(1.0).eqns
    file, line = _programs.user_line(equation)
    assert (file, line > 0) == (__file__, True)
    without("source_info.traceback.frames")
    assert _programs.user_line(equation) is None
    step = sr.trace(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), "float32"))
    assert [row.line for row in step.work] == ["dot_general"]


def test_every_name_is_taken_away_by_a_test():
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in names_read() if f'"{name}"' not in tests] == []


def test_no_other_module_reads_private_names_of_jax():
    texts = {file: file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py")}
    words = ("from jax._src", "import jax._src", "_executable._", "_device_assignment")
    assert not [
        (file.name, word)
        for file, text in texts.items()
        for word in words
        if word in text and file.name != "jax_names.py"
    ]
