"""What a program sends: the sum of the rows of `inspect` is what is in the HLO, to the byte."""

import gzip
import json
import random
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.hlo import Hlo
from tests.support import hlo_counts
from tests.support.compiled import array, devices
from tests.support.folders import ROOT

TEXTS = sorted((ROOT / "tests" / "data" / "hlo").glob("*.txt.gz"))
MESH = devices(fsdp=4, tp=2)

# From the shapes and the loops of the steps, on a device. Kernels of the train step are bfloat16 of
# 512 x 4 x 64 (q, k, v, o) and 512 x 1024 (gate, up, down); its activations of 4 x 256 x 512.
KIB, MIB = 2**10, 2**20
LAYER = 4 * 512 * 4 * 64 * 2 + 3 * 512 * 1024 * 2
ACTIVATION = 4 * 256 * 512 * 2
BY_HAND = {
    "train-v5e": {
        # Forward, and again in the backward pass; embedding, tokens on it, ids, head, the constraint.
        "all-gather": 2 * 3 * LAYER + 2 * MIB + 8 * 256 * 4 + 512 * 2048 * 2 + 16 * 256 * 512 * 2,
        # Attention and MLP forward; one recomputed and two gradients; the kernels' gradients but two;
        # behind the loop the logits' gradient, their greatest, two sums, and those of norms and loss.
        "all-reduce": 3 * 2 * ACTIVATION
        + 3 * (3 * ACTIVATION + 4 * 512 * 4 * 64 * 2 + 512 * 1024 * 2)
        + ACTIVATION
        + 4 * 256 * (2 + 2 * 4)
        + (2 * 3 * 512 + 512 + 1) * 4,
        "all-to-all": 4 * 4 * 256 * 128 * 2,
        "collective-permute": 4 * 256 * 4,
        # gate and up in the loop; embedding and head.
        "reduce-scatter": 3 * 2 * 512 * 1024 * 2 + 4096 * 128 * 2 + 512 * 2048 * 2,
    },
    # 2 layers; a window of 8 shards sends 9 permutes, 2 forward and 3 in the backward pass.
    "windowed-v5e": {"all-gather": 2 * 4096 * 16384 * 2, "collective-permute": 2 * 5 * 9 * (4096 // 8) * 16384 * 2},
    # 4 micro-batches of 3 layers, with two kernels of 1 MiB.
    "accumulate-h100": {"all-gather": 4 * 3 * 2 * 2 * MIB, "reduce-scatter": 4 * 3 * 2 * MIB},
    # The loop of unknown length once; then seven, which begin at 0.
    "branches-v5e": {
        "all-gather": 2 * MIB,
        "all-reduce": (1 + 1 + 7) * 512 * KIB + 256 * KIB,
        "reduce-scatter": 512 * KIB,
    },
    "ring-h100": {"collective-permute": 8 * 2 * MIB},
    "experts-v5e": {"all-to-all": 2 * 512 * KIB},
}


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name.removesuffix(".txt.gz"))
def test_the_rows_of_a_recorded_program_are_all_that_it_sends(file):
    text = gzip.decompress(file.read_bytes()).decode("utf-8")
    counted = hlo_counts.collectives(text)
    expected = hlo_counts.totals(counted)
    rows, totals = list(Hlo(text).exchanges({})), Counter()
    for row in rows:
        totals[row.kind] += row.payload * (1 if row.times is None else row.times)
    assert totals == expected == BY_HAND.get(file.name.removesuffix(".txt.gz"), expected)
    assert not any(row.number for row in rows if row.kind == "all-to-all")  # pieces of one array
    # Of a loop of unknown length it is not known.
    assert any(row.times is None for row in rows) == any(row["times"] is None for row in counted)


@pytest.fixture
def print_as(monkeypatch):
    """Return what lets compiled functions print another text."""
    return lambda text: monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda _: text)


def compiled_layers(layers=3):
    def step(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, batch, params)[0]

    params, batch = array(MESH, (layers, 256, 256), None, "fsdp", "tp"), array(MESH, (512, 256), "fsdp")
    return jax.jit(step, out_shardings=batch.sharding).lower(params, batch).compile()


COMPILED = compiled_layers()
TEXT = COMPILED.as_text()
PLANNED = (P(None, "fsdp", "tp"), P("fsdp"))


class TestProgram:
    def test_rows_say_what_moves_how_often_and_why(self):
        program = sr.inspect(COMPILED, PLANNED)
        gather = next(row for row in program.collectives if row.kind == "all-gather")
        assert (gather.what, gather.moves, gather.axes) == ("argument", "inputs/0", ("fsdp",))
        assert gather.times == 3
        assert gather.payload == 256 * 128 * 4
        assert gather.sent == 3 * gather.payload * 3 // 4
        assert gather.is_expected
        assert program.axis_sizes == {"fsdp": 4, "tp": 2}
        assert sum(program.sent.values()) == sum(row.sent for row in program.collectives)

    def test_rows_say_whether_the_program_calls_it(self):
        """One program of both kinds: a collective that it calls, and one that a product needs."""

        def two_sums(x):
            with jax.named_scope("layer"):
                first = jax.lax.psum(x, "tp")
            return first, jax.lax.psum(x + 1, "tp")  # XLA merges them

        called = [
            ("all-reduce", two_sums),
            ("all-reduce", lambda x: jax.lax.pmax(x, "tp")),
            ("all-gather", lambda x: jax.lax.all_gather(x, "tp", tiled=True)),
            ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "tp", tiled=True)),
            ("all-to-all", lambda x: jax.lax.all_to_all(x, "tp", 0, 1, tiled=True)),
            ("collective-permute", lambda x: jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)])),
        ]
        arguments = array(MESH, (256, 256), "fsdp"), array(MESH, (256, 256), "tp")
        for kind, call in called:
            mapped = jax.shard_map(call, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
            step = jax.jit(lambda w, x, mapped=mapped: (x @ w, mapped(x)))
            compiled = step.lower(*arguments).compile()
            rows = sr.inspect(compiled, (P("fsdp"), P("tp"))).collectives
            assert {row.kind for row in rows if row.is_called} == {kind}
            assert any(not row.is_called for row in rows)
            assert all(row.is_called == (row.axes == ("tp",)) for row in rows)
        rows = sr.inspect(COMPILED, PLANNED).collectives
        assert rows
        assert not any(row.is_called for row in rows)

    def test_the_report_is_text_html_and_json(self):
        program = sr.inspect(COMPILED, PLANNED)
        assert str(program).startswith("each device sends ")
        assert "all-gather" in str(program)
        assert "all-gather" in program._repr_html_()
        content = json.loads(json.dumps(program.to_json()))
        assert content["mesh"] == {"fsdp": 4, "tp": 2}
        assert [row["kind"] for row in content["collectives"]] == [row.kind for row in program.collectives]

    def test_what_is_planned_by_a_spec_may_be_the_batch(self):
        plan = sr.plan(jax.ShapeDtypeStruct((256, 256), "float32"), [("", P("fsdp"))], MESH)
        compiled = jax.jit(jnp.dot).lower(array(MESH, (8, 256), "tp"), plan.abstract()).compile()
        assert sr.inspect(compiled, (P("tp"), plan)).batch_axes == {"tp"}

    def test_a_plan_that_does_not_fit_is_an_error(self):
        with pytest.raises(ValueError, match="inputs"):
            sr.inspect(COMPILED, (P(None, "fsdp", "tp"),))
        with pytest.raises(TypeError, match="compiled"):
            sr.inspect(lambda: None, PLANNED)


@pytest.mark.parametrize(("name", "is_called"), [("(psum:layer/psum)", True), ("(psum:layer/dot_general)", False)])
def test_what_xla_has_merged_is_called_if_all_of_it_is(print_as, name, is_called):
    print_as(re.sub('op_name="[^"]*"', f'op_name="jit(step)/shard_map/{name}"', TEXT))
    assert {row.is_called for row in sr.inspect(COMPILED, PLANNED).collectives if row.op_name} == {is_called}


def damaged(text):
    """Texts that are cut, or have lost lines, names or brackets."""
    chance = random.Random(0)
    for _ in range(60):
        yield text[: chance.randrange(len(text))]
        begin, end = sorted(chance.randrange(len(text)) for _ in range(2))
        yield text[:begin] + text[end:]
        word = chance.choice(["%", "(", "}", "replica_groups=", "[", "to_apply=", "body=", ","])
        yield text.replace(word, "", chance.randrange(1, 40))
    lines = text.splitlines(keepends=True)
    chance.shuffle(lines)
    yield "".join(lines)


@pytest.mark.parametrize("read", [sr.inspect, sr.verify])
def test_a_damaged_text_is_an_error_or_an_answer(read, print_as):
    errors = set()
    for text in damaged(TEXT):
        print_as(text)
        try:
            str(read(COMPILED, PLANNED))
        except ValueError as error:
            errors.add(str(error)[:60])
    assert any("the text of the executable is cut" in error for error in errors), errors


CYCLE = """HloModule m, is_scheduled=true, num_partitions=8

%a (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%d)
  %d = f32[8]{0} copy(%c)
}

ENTRY %main (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %call = f32[8]{0} call(%q), to_apply=%a
  ROOT %sum = f32[8]{0} all-reduce(%call), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%a
}
"""


def doubled(depth):
    """Each computation calls the next one twice."""
    body = "  %p = f32[8]{{0}} parameter(0)\n  %x = f32[8]{{0}} call(%p), to_apply=%c{n}\n"
    last = "%c{n} (p: f32[8]) -> f32[8] {{\n  ROOT %p = f32[8]{{0}} parameter(0)\n}}\n\n"
    text = "HloModule m, is_scheduled=true, num_partitions=8\n\n" + last.format(n=depth)
    for n in reversed(range(depth)):
        name = f"ENTRY %c{n}" if n == 0 else f"%c{n}"
        root = f"  ROOT %y = f32[8]{{0}} call(%x), to_apply=%c{n + 1}\n}}\n\n"
        text += f"{name} (p: f32[8]) -> f32[8] {{\n" + body.format(n=n + 1) + root
    return text


def test_a_text_whose_computations_call_each_other_ends(print_as):
    compiled = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
    for text in (CYCLE, CYCLE.replace("copy(%d)", "call(%p), to_apply=%a")):
        print_as(text)
        with pytest.raises(ValueError, match="cut, or no HLO"):
            str(sr.inspect(compiled, (None,)))
    print_as(doubled(60))  # 2**60 calls, of which each computation is read once
    assert "on each device" in str(sr.inspect(compiled, (None,)))
