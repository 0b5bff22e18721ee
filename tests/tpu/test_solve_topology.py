"""`solve` on a topology: the mesh is chosen among those that exist there, and the compiler proves it."""

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules._program.solve import candidates
from shardrules._program.solve.search import Search, best_of
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Spread
from tests.cli.test_solve_command import folder  # noqa: F401 # has the module, in each test
from tests.support.command_line import invoke
from tests.support.compiled import array
from tests.support.contexts import needs_libtpu

pytestmark = needs_libtpu


def loss(params, x):
    return jnp.sum(jax.nn.relu(x @ params["up"]) @ params["down"])


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Compile three layouts: these tests are of the search."""
    monkeypatch.setattr(candidates, "MOST", 3)


TREE = {"up": jax.ShapeDtypeStruct((512, 2048), "bfloat16"), "down": jax.ShapeDtypeStruct((2048, 512), "bfloat16")}
STEP = sr.trace(loss, TREE, jax.ShapeDtypeStruct((48, 512), "bfloat16"))


def test_the_mesh_is_the_best_of_those_of_the_topology(monkeypatch):
    topology = sr.Topology("v5e:2x4")
    solution = sr.solve(STEP, topology)
    meshes = topology.meshes(("fsdp", "tp"))
    assert dict(solution.mesh) in meshes
    each = []
    for mesh in meshes:
        monkeypatch.setattr(sr.Topology, "_whole_and_split", lambda *_, mesh=mesh: ([mesh], []))
        each.append(sr.solve(STEP, topology).bound)
    assert solution.bound == min(each)
    assert solution.gap == 0


def test_a_mesh_of_a_slice_has_its_links(monkeypatch):
    topology, sizes = sr.Topology("v5e:2x4"), {"fsdp": 4, "tp": 2}
    solution = sr.solve(STEP, topology.mesh(sizes))
    monkeypatch.setattr(sr.Topology, "_whole_and_split", lambda *_: ([sizes], []))
    chosen = sr.solve(STEP, topology)
    assert (solution.compiled, solution.specs) == (chosen.compiled, chosen.specs)
    assert "share the links" not in solution.summary + chosen.summary
    assert sr.solve(STEP, sizes, hardware="v5e").bound != solution.bound


def test_the_axes_are_those_of_the_step():
    plan = sr.plan(TREE, [(".*", ())], {"a": 2, "b": 2, "c": 2})
    step = sr.trace(loss, plan, jax.ShapeDtypeStruct((4096, 512), "bfloat16"))
    solution = sr.solve(step, sr.Topology("v5e:2x2"))
    assert set(solution.mesh) == {"a", "b", "c"}


def test_meshes_that_split_a_dimension_of_the_slice_are_named():
    plan = sr.plan(TREE, [(".*", ())], {"data": 8, "model": 2})
    step = sr.trace(loss, plan, jax.ShapeDtypeStruct((4096, 512), "bfloat16"))
    solution = sr.solve(step, sr.Topology("v5e:4x4"))
    assert {"data": 8, "model": 2} in solution.left_out
    assert dict(solution.mesh) not in solution.left_out
    assert "not tried, as they split a dimension of the slice: data=" in str(solution)


def test_rows_that_an_iota_indexes_stay_in_place_by_the_compiler_as_by_the_price():
    mesh = sr.Topology("v5e:2x4").mesh(fsdp=8)
    rows, places = array(mesh, (64, 512, 128), "fsdp"), array(mesh, (64, 64), "fsdp", dtype="int32")

    def squares(z, i):
        return jnp.sum(z[jnp.arange(64)[:, None], i] ** 2)

    compiled = jax.jit(jax.grad(squares), out_shardings=rows.sharding).lower(rows, places).compile()
    assert not sr.inspect(compiled, (None, None)).collectives
    step = sr.trace(jax.grad(squares), rows, places)
    space = Space(step, {"fsdp": 8})
    assert Spread(space, space.of_program()).of_step().sent == []


def test_what_is_sent_takes_the_links_of_the_slice():
    """v5e:2x4 has none around one of its dimensions, so that rings there have half of the rate."""
    topology = sr.Topology("v5e:2x4")
    meshes = topology.meshes(("fsdp", "tp"))
    searches = [Search(STEP, sizes, topology.hardware, 10**10, topology) for sizes in meshes]
    first = candidates.shortlist(best_of(searches)[0], searches)[0]
    mesh, sent = topology.mesh(first.row.mesh), first.predicted.sent
    rates = {axes: topology._links(mesh, axes).rate for axes in sent}
    seconds = sum(size / rates[axes] for axes, size in sent.items())
    assert first.seconds.meanwhile + first.seconds.alone == pytest.approx(seconds, rel=1e-6) != 0
    assert max(rates.values()) < topology.hardware.link_bytes_per_second


# By the command


def test_a_slice_is_all_that_is_needed():
    done = invoke("solve", "mlp_to_solve:step_on", "--on", "v5e:2x4")
    assert done.exit_code == 0, done.stderr
    assert "[[rules]]" in done.stdout
    assert "a step on fsdp=" in done.stderr
    done = invoke("solve", "mlp_to_solve:step_on", "--on", "v5e:2x4", "-m", "fsdp=3,tp=2")
    assert (done.exit_code, "fsdp=3" in done.stderr) == (2, True)


def test_the_compiler_sends_what_was_predicted():
    from mlp_to_solve import step_on

    topology = sr.Topology("v5e:2x4")
    step, arguments = step_on(topology.mesh(fsdp=8))
    solution = sr.solve(sr.trace(step, *arguments), topology)
    best = solution.candidates[0]
    assert best.predicted.sent == pytest.approx(best.compiled.sent, rel=0.2)
    assert best.compiled.seconds <= min(row.compiled.seconds for row in solution.candidates if not row.refusal) * (
        1 + 1e-2
    )
