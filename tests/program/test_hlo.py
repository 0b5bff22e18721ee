"""What is read of optimized HLO: forms that programs which JAX compiles here do not have."""

import time
import tracemalloc
from contextlib import nullcontext

import pytest

from shardrules._program.computation import Shape
from shardrules._program.hlo import Hlo, ReplicaGroups, hlo_errors

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", PAIRS),
        ("{{0,1},{2}}", ((0, 1), (2,))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['a'=4,'b'=2] {'b'}", PAIRS),
        ("mesh[a=2,b=4] {a}", COLUMNS),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(4)2}", PAIRS),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", COLUMNS),
    ],
)
def test_forms_of_replica_groups(written, groups):
    attributes = f", channel_id=1, replica_groups={written}, dimensions={{0}}, to_apply=%add"
    hlo = Hlo("HloModule m, num_partitions=8\n")
    assert hlo.groups(attributes) == groups
    assert hlo.groups(", channel_id=1, dimensions={0}") == (tuple(range(8)),)  # without groups, of all devices


@pytest.mark.parametrize(
    ("sizes", "groups", "axes"),
    [
        ({"a": 2, "b": 4}, COLUMNS, ("a",)),
        ({"a": 4, "b": 2}, PAIRS, ("b",)),
        ({"a": 2, "b": 2, "c": 2}, ((0, 1, 4, 5), (2, 3, 6, 7)), ("a", "c")),
        ({"a": 1, "b": 8}, (tuple(range(8)),), ("b",)),
        ({"a": 8}, PAIRS, ("a",)),
        ({"a": 8}, tuple((i,) for i in range(8)), ()),
    ],
)
def test_the_axes_of_groups(sizes, groups, axes):
    assert ReplicaGroups(groups).axes(sizes) == axes


STARTS = """\
HloModule starts, num_partitions=8

%wrapped (p: u32[8]) -> u32[4] {
  %p = u32[8]{0} parameter(0)
  ROOT %rs = u32[4]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (a: bf16[4,8], b: s4[2]) -> (bf16[4,8], s4[2]) {
  %a = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = s4[2]{0:E(4)} parameter(1)
  %ags = ((bf16[4,8]{1,0}, s4[2]{0}), (bf16[8,8]{1,0:T(8,128)}, /*index=1*/s4[4]{0})) all-gather-start(%a, %b), replica_groups=[4,2]<=[8], dimensions={0}
  %agd = (bf16[8,8]{1,0}, s4[4]{0}) all-gather-done(%ags), metadata={op_name="a all-gather( b"}
  %ars = bf16[4,8]{1,0} all-reduce-start(%a), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %ard = bf16[4,8]{1,0} all-reduce-done(%ars)
  %cps = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %rss = ((u32[8]{0}), u32[4]{0}) async-start(%c), calls=%wrapped
  %rsd = u32[4]{0} async-done(%rss), calls=%wrapped
  ROOT %t = (bf16[4,8]{1,0}, s4[2]{0}) tuple(%a, %b)
}
"""


def test_asynchronous_collectives_are_counted_once():
    moved = [(one.kind, one.number, one.shape, one.payload) for one in Hlo(STARTS).exchanges({})]
    assert sorted(moved) == [
        ("all-gather", 0, Shape("bf16", (8, 8)), 128),
        ("all-gather", 1, Shape("s4", (4,)), 2),
        ("all-reduce", 0, Shape("bf16", (4, 8)), 64),
        ("collective-permute", 0, Shape("bf16", (4, 8)), 64),
        ("reduce-scatter", 0, Shape("u32", (8,)), 32),
    ]
    assert {one.times for one in Hlo(STARTS).exchanges({})} == {1}


@pytest.mark.parametrize(
    ("dtype", "bits"), [("pred", 8), ("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("f4e2m1fn", 4), ("c64", 64)]
)
def test_bits_of_an_element(dtype, bits):
    assert Shape(dtype, (3,)).bits == bits
    assert Shape(dtype, (3,)).bytes == -(-3 * bits // 8)


LOOP = """\
HloModule loop, num_partitions=8

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%step, %i)
  %sum = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant(BOUND)
  ROOT %test = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %begin = s32[] constant(BEGIN)
  %in = (s32[], f32[8]{0}) tuple(%begin, %x)
  %loop = (s32[], f32[8]{0}) while(%in), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("begin", "bound", "step", "direction", "trips"),
    [(0, 7, 1, "LT", 7), (2, 7, 2, "LT", 3), (9, 7, 1, "LT", 0), (0, 7, -1, "LT", None), (0, 7, 1, "GE", None)],
)
def test_trips_of_a_loop_without_a_count(begin, bound, step, direction, trips):
    """As XLA for TPUs writes it."""
    text = LOOP.replace("BEGIN", str(begin)).replace("BOUND", str(bound)).replace("STEP", str(step))
    (exchange,) = Hlo(text.replace("=LT", f"={direction}")).exchanges({})
    assert exchange.times == trips


def hostile(groups="{}", more="", head="num_partitions=8", before="", type_="f32[8]{0}"):
    return (
        f"HloModule m, {head}\n\n{before}ENTRY %main (p: f32[8]) -> f32[8] {{\n"
        "  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %a = {type_} all-reduce(%p), replica_groups={groups}, to_apply=%add{more}\n}}\n"
    )


ROWS = range(1, 40_001)
FRAMES = "".join(
    f"{name}\n{rows}\n"
    for name, rows in {
        "FileNames": '1 "step.py"\n',
        "FileLocations": "".join(f"{i} {{file_name_id=1 line={i}}}\n" for i in ROWS),
        "StackFrames": "".join(f"{i} {{file_location_id={i}}}\n" for i in ROWS),
    }.items()
)
CHAIN = "".join(
    f"%c{i} (p: f32[8]) -> f32[8] {{\n  ROOT %r{i} = f32[8]{{0}} call(%p), to_apply=%c{i + 1}\n}}\n\n"
    for i in range(5000)
)
CHAIN = f"HloModule m\n\n{CHAIN}{hostile().partition('ENTRY')[2].replace(' %main (', '%c5000 (')}\n" + (
    "ENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %z = f32[8]{0} call(%p), to_apply=%c0\n}\n"
)
OF_DEVICES = "has groups of .* devices, of 131,072 at most"
LONG = "x" * 5_000_000


HOSTILE = {
    "partitions": (hostile(head=f"num_partitions={10**9}"), OF_DEVICES),
    "iota": (hostile("[1,50000000]<=[50000000]"), OF_DEVICES),
    "iota that wraps": (hostile(f"[1,8]<=[{2**32},{2**32}]"), OF_DEVICES),
    "mesh": (hostile(f"mesh['x'={10**9}] {{'x'}}"), OF_DEVICES),
    "digits": (hostile(head=f"num_partitions={'9' * 5000}"), "limit .* digits"),
    "braces": (hostile("{" * 1_000_000), "replica groups of an unknown form"),
    "frames": (hostile(more=", metadata={stack_frame_id=39999}", before=f"{FRAMES}\n"), None),
    "line": (hostile(more=f', metadata={{op_name="{LONG}"}}'), None),
    "calls": (hostile(more=f', note="{"=%a " * 300_000}"'), None),
    "tuple": (hostile(type_="(" * 100_000 + "f32[8]" + ")" * 100_000), None),
    "dims": (hostile(type_=f"f32[{','.join(['9' * 18] * 10_000)}]"), None),
    "chain": (CHAIN, "cut, or no HLO .*RecursionError"),
    "ends": ("HloModule m, num_partitions=8\n" + "\n}" * 400_000 + hostile(), None),
}
"""Each a text, and its error if it has one."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_takes_bounded_time_and_memory(name):
    text, error = HOSTILE[name]
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with nullcontext() if error is None else pytest.raises(ValueError, match=error), hlo_errors():
            hlo = Hlo(text)
            (exchange,) = hlo.exchanges({})
            assert exchange.groups == (tuple(range(8)),)
            assert exchange.shape.dims
            place = hlo.place(exchange.instruction)
            assert place == (("step.py", 39_999) if "StackFrames" in text else None)
        assert tracemalloc.get_traced_memory()[1] < 150e6
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 20
