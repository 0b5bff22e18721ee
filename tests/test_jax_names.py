"""Each private name of JAX and flax that is read: there today, and its fallback without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base import jax_names as _jax
from shardrules._program import jax_names as _programs

MODULES = (_jax, _programs)
ROOT = Path(sr.__file__).parent


def names_read():
    """The private names in calls of `private` and `required`, as written there."""
    texts = (Path(module.__file__).read_text(encoding="utf-8") for module in MODULES)
    return {
        call.args[1].value
        for text in texts
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("private", "required")
        and isinstance(call.args[1], ast.Constant)
    }


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


def test_a_compiled_function_is_read_by_public_names(without, mesh):
    sharding = NamedSharding(mesh, P("fsdp", "tp"))
    w = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
    compiled = jax.jit(lambda w: (w * 2, jnp.sum(w))).lower(w).compile()

    def read():
        shardings, values = _programs.compiled_outputs(compiled)
        return shardings, [(value.shape, str(value.dtype)) for value in values]

    expected = read()
    assert expected == ([sharding, expected[0][1]], [((8, 8), "float32"), ((), "float32")])
    drops = jax.jit(lambda w, unused: w * 2).lower(w, w).compile()
    names = ("_executable.out_avals", "_executable._out_shardings", "_executable._in_shardings", "_params.const_args")
    for name in ("", *names):
        if name:
            without(name)
        assert read() == expected
        for function, shardings in ((compiled, [sharding]), (drops, [sharding, None])):
            assert _programs.argument_shardings(function, len(shardings)) == shardings


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


def test_what_xla_dumps_is_read_as_jax_reads_it(mesh, tmp_path):
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp", "tp")))
    lowered = jax.jit(lambda x, y: (x * 2, x.sum(0), x.T), keep_unused=False).lower(x, x)
    assert _programs.lowered_shardings(lowered) == ([x.sharding, None], [None, None, None])
    compiled = lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True})
    (file,) = tmp_path.glob("*after_optimizations.hlo.pb")
    module = _programs.module_of(file.read_bytes())
    specs = [sharding.spec for sharding in compiled.output_shardings]
    assert specs == _programs.result_specs(module, mesh) == [P("fsdp", "tp"), P("tp"), P("tp", "fsdp")]
    assert module.to_string().startswith("HloModule jit__lambda")
    for cut in (b"", file.read_bytes()[:9], file.read_bytes()[:200]):
        assert not _programs.module_of(cut)
    assert _programs.result_specs(None, mesh) == []


REQUIRED = (
    "HloModule", "HloSharding", "parse_flatten_op_sharding", "_lowering.compile_args", "get_compile_options",
    "_lowering._compiler_options_kvs", "get_prop_to_input_output", "LoweringParameters",
    "jaxpr_has_prim_requiring_devices",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_name_that_the_compiler_needs_is_told_where_jax_has_it_no_more(without, name):
    def step(x):
        return jnp.sin(x) + jax.pure_callback(lambda v: v, x, x)

    x = jax.ShapeDtypeStruct((8, 8), "float32")
    without("_lowering._device_list")  # of which the numbers of devices stand in
    (note,) = sr.prove(step, x, on={"fsdp": 4, "tp": 2}).notes
    assert note.startswith("left out, as it is lowered without devices: jax.pure_callback at ")
    without(name)
    with pytest.raises(RuntimeError, match=f"this version of JAX has no {name}, by which its compiler"):
        sr.prove(lambda x: step(x) * 2, x, on={"fsdp": 4, "tp": 2})


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
