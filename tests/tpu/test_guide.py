"""The steps of docs/guides/prove.md, of each library, for several topologies."""

from __future__ import annotations

import pytest

import shardrules as sr
from tests.support.docs_pages import blocks
from tests.support.plans import shard_bytes
from tests.tpu.marks import needs_libtpu
from tests.tpu.test_prove import TOPOLOGIES

PAGE = "docs/guides/prove.md"
LIBRARIES = {"plain": "optax", "linen": "flax.linen", "nnx": "flax.nnx"}


@pytest.fixture(scope="module")
def names():
    """What the page defines; its own proofs are those of tests/docs."""
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    names = {}
    for block in blocks(PAGE):
        if block.language == "python":
            code = "\n".join(line for line in block.code.splitlines() if "print(" not in line)
            exec(compile(code, PAGE, "exec"), names)
    return names


def test_each_is_short():
    for block in blocks(PAGE):
        head, _, body = block.code.partition("_step_on(mesh):\n")
        if body:
            lines = [line for line in body.partition("\n\n\nprint(")[0].splitlines() if line]
            assert len(lines) + 1 <= 25, head


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_it_is_clean_and_its_arguments_are_the_plan_s_bytes(names, library, topology):
    mesh = sr.Topology(topology).mesh(TOPOLOGIES[topology])
    step, arguments, outputs = names[f"{library}_step_on"](mesh)
    proof = sr.prove(step, *arguments, on=mesh, outputs=outputs)
    proof.raise_for("warning")
    plan, batch = arguments
    rows = 4 * batch.size // mesh.shape["fsdp"]
    scalars = sum(plan.kinds[kind].shape == () for kind in plan.kind_of)
    # A number takes 512 bytes of a TPU's memory.
    held = sum(shard_bytes(plan)) + rows + scalars * 508
    assert proof.memory.totals.arguments == held
    assert proof.program.sent
