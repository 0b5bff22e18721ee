"""Plan.check: each kind of finding on rows made for it, and on rows that are nearly the same.

A row has a tree, rules, a mesh, and what `check` says of a kind: fields of the only finding; or of
several, a list; or None. `says` and `advises` are parts of the message and of the fix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection
from tests.support.trees import array

MESH = {"fsdp": 8, "tp": 4}
MIB = 2**20


LARGE = array(4096, 1024)  # 16 MiB, just large
SMALL = array(4096, 1023)
WHOLE = array(16384, 16384, dtype="bfloat16")
SHARDED = [("w", ("fsdp", "tp"))]
KERAS, KEYSTR, NNX = sr.dialects.KERAS, sr.dialects.KEYSTR, sr.dialects.NNX


class Row(NamedTuple):
    """What `check` says of a kind."""

    what: str
    tree: Any
    rules: Any
    finds: Any
    """Fields of the finding, or of each of several; None for no finding of the kind."""
    mesh: Any = MESH
    of_plan: Any = {}
    """Arguments of `plan`."""
    options: Any = {}
    """Arguments of `check`."""
    only: str | None = None
    """The kind of all findings; "" if there are none at all."""


def exact(*rules):
    return sr.Rules(rules, correction=sr.Correction(indivisible="error"))


def state(tree):
    return {"params": tree, "opt_state": {"mu": tree}}


UNMATCHED = [
    Row("all at once", {"w": LARGE, "x": [array(8, 2)] * 3, "y": array(2), "scalar": array()}, SHARDED, {
        "level": "error", "leaves": 4, "rule": None, "paths": ("x/{0..2}", "y"), "bytes": 3 * 64 + 8,
        "message": "no rule matches 4 leaves of 6",
        "fix": "add rules for them, such as `suggest` writes; or replicate them by a last rule ('.*', P())"}),
    Row("not where a dialect replicates", {"x": LARGE}, sr.Rules([("w", None)], KERAS), None),
    Row("not what needs no rule", {"w": LARGE, "scalar": array(), "name": "x", "none": None}, SHARDED, None),
]  # fmt: skip

FORBIDDEN = exact(("w", ("fsdp", "tp")))
MISFIT = [
    Row("indivisible", {"w": [array(8, 6)] * 3, "w2": array(8, 8)}, FORBIDDEN, {
        "level": "error", "leaves": 3, "rule": 0, "paths": ("w/{0..2}",), "bytes": 3 * 8 * 6 * 4,
        "message": "rule 0 'w' -> P('fsdp', 'tp') cannot be applied to the shape (8, 6): dim 1 of size 6 is not divisible by tp=4",
        "advises": "use fewer axes or pad the array"}),
    Row("an axis twice", {"w": LARGE}, [("w", ("tp", "tp"))], {
        "says": "dim 1: 'tp' is used twice", "fix": "an axis can cut only one dimension, once"}),
    Row("not what is corrected", {"w": array(8, 6)}, SHARDED, None),
    Row("ambiguous", {"w": LARGE, "aw": LARGE, "wb": LARGE}, sr.Rules([(".*w", ("tp",)), ("w.*", None)], KERAS), {
        "level": "error", "leaves": 1, "rule": None, "paths": ("w",), "says": "several rules match"}),
    Row("axes of a dict are not explicit", {"w": array(8, 8)}, [("w", P("fsdp", unreduced={"tp"}))], {
        "says": "'tp' is unreduced and is not Explicit"}),
    Row("not an axis that the mesh lacks", {"w": array(6, 8)}, exact(("w", ("fsdp", "sp"))), {
        "level": "error", "says": "dim 0 of size 6 is not divisible by fsdp=8"}),
]  # fmt: skip


def with_catch_all(spec=()):
    return [*SHARDED, ("experts/up", "tp"), (".*", spec)]


EXPERTS = {"w": LARGE, "experts": [{"fc": LARGE}] * 5}
CATCH_ALL = [
    Row("large and replicated", {"w": LARGE, "experts": [{"fc": LARGE}] * 4, "small": array(8)}, with_catch_all(), {
        "level": "error", "leaves": 5, "rule": 2, "paths": ("experts/{0..3}/fc", "small"), "bytes": 4 * 16 * MIB + 32,
        "message": "5 leaves of 6 (67.1 MB of 83.9 MB) match no rule but the catch-all, rule 2 '.*' -> P(): 67.1 MB on each device",
        "advises": "such as `suggest` writes (perhaps meant for them, but matching nothing: rule 1)"}),
    Row("many small ones are as silent", {"w": LARGE, "experts": [{"fc": array(64, 1024)}] * 64}, with_catch_all(), {"level": "error"}),
    Row("one less is a note", {"w": LARGE, "experts": [{"fc": array(64, 1024)}] * 63}, with_catch_all(), {"level": "info"}),
    Row("a note if it shards", {"w": LARGE, "x": LARGE}, with_catch_all(("tp",)), {"level": "info"}),
    Row("a note on one device", {"w": LARGE, "x": LARGE}, with_catch_all(), {"level": "info"}, {"fsdp": 1, "tp": 1}),
    *(Row(f"{pattern!r} matches whatever comes", {"w": LARGE, "x": LARGE}, [*SHARDED, (pattern, ())], {"rule": 1})
      for pattern in (".*", "", ".", ".+", "^", "(?s).*", r"[\s\S]")),
    *(Row(f"{pattern!r} does not", {"w": LARGE, "x": LARGE}, [*SHARDED, (pattern, ())], None)
      for pattern in ("x", "^(?!.*w)", "^[^w]*$", "[a-z]", "(x|w)")),
    Row("declared", EXPERTS, with_catch_all(), None, options={"replicated": ["^experts/.*fc$"]}),
    Row("declared in part", EXPERTS, with_catch_all(), {"paths": ("experts/{1,2,4}/fc",), "leaves": 3},
        options={"replicated": ["experts/0/", "experts/3/"]}),
]  # fmt: skip

WHOLE_X = [*SHARDED, ("x", None)]
MATCHING_ONE = sr.Rules([(".*w", ("fsdp", "tp"))], KERAS)
THRESHOLD = {f"w{i}": array(1000, 1000) for i in range(8)}
REPLICATED = [
    Row("a large one", {"w": LARGE, "x": [LARGE] * 2}, WHOLE_X, {
        "level": "warning", "leaves": 2, "rule": 1, "bytes": 32 * MIB,
        "message": "2 large leaves replicated (rule 1 'x' -> P()): 33.6 MB on each device"}),
    Row("not a small one", {"w": LARGE, "x": SMALL}, WHOLE_X, None),
    Row("what is large", {"w": LARGE, "x": SMALL}, WHOLE_X, {}, options={"large": 4096 * 1023 * 4}),
    Row("what is not", {"w": LARGE, "x": SMALL}, WHOLE_X, None, options={"large": 4096 * 1023 * 4 + 1}),
    Row("an axis of one device cuts nothing", {"w": LARGE, "x": LARGE}, [*SHARDED, ("x", "dp")], {}, {"dp": 1, **MESH}),
    Row("an axis of two does", {"w": LARGE, "x": LARGE}, [*SHARDED, ("x", "dp")], None, {"dp": 2, **MESH}),
    Row("one device", {"x": LARGE}, [("x", None)], None, {"tp": 1}),
    Row("what the mesh leaves nothing of", {"x": array(4097, 1024)}, [("x", "tp")], {
        "says": "1 large leaf replicated (rule 0 'x' -> P('tp'), of which the shapes and the mesh leave nothing)"}),
    Row("declared", {"w": LARGE, "x": LARGE}, WHOLE_X, None, options={"replicated": ["^x$"]}),
    Row("another declared", {"w": LARGE, "x": LARGE}, WHOLE_X, {}, options={"replicated": ["^y$"]}),
    Row("without a rule", {"w": LARGE, "x": LARGE}, MATCHING_ONE, {
        "message": "1 large leaf replicated (no rule decides): 16.8 MB on each device"}),
    Row("a rule exempts it by its threshold", {**THRESHOLD, "big": LARGE}, [(".*", sr.fsdp("fsdp", min_bytes=4 * MIB))], {
        "level": "info", "leaves": 8, "bytes": 32_000_000,
        "message": "8 leaves replicated (by the threshold of rule 0 '.*' -> fsdp('fsdp', min_bytes=4194304)): 32.0 MB on each device",
        "fix": "lower its min_bytes or min_rank, if they are to be cut too"}, {"fsdp": 64}, only="replicated"),
    Row("no threshold exempts it", {**{f"w{i}": array(1001, 1001) for i in range(8)}, "big": LARGE},
        [(".*", sr.fsdp("fsdp", min_bytes=1000))], {"level": "warning", "leaves": 8}, {"fsdp": 64}),
]  # fmt: skip

HELD = 20 * 16 * MIB // 32 + 4 * 4096
MANY = {"w": [LARGE] * 20, "norm": array(4096)}
MEMORY = [
    Row("leaves that do not fit", MANY, [*SHARDED, ("norm", ())], {
        "level": "error", "bytes": 1, "paths": ("w/{0..19}", "norm"),
        "message": "10.5 MB on the fullest device: params 10.5 MB; a device has 10.5 MB"}, options={"hbm": HELD - 1}),
    Row("leaves that fit", MANY, [*SHARDED, ("norm", ())], None, options={"hbm": HELD}, only=""),
    Row("any memory", MANY, [*SHARDED, ("norm", ())], None),
    Row("what is on the host takes no room", {"w": LARGE}, [("w", sr.RuleSpec(("fsdp", "tp"), memory_kind="pinned_host"))], None,
        options={"hbm": 1}),
]  # fmt: skip

ADVICE = "use fewer axes or pad the array"
VOCABULARY = {**MESH, "rows": 32, "sp": 1}
CORRECTION = [
    # Cut by fsdp=8 alone: 4096*1022*4/8 bytes; with tp=4 it would be a quarter.
    Row("what it costs", {"w": [array(4096, 1022)] * 20}, SHARDED, {
        "level": "warning", "leaves": 20, "rule": 0, "paths": ("w/{0..19}",), "bytes": 20 * (4096 * 1022 * 4 // 8) * 3 // 4,
        "message": "rule 0 'w' -> P('fsdp', 'tp'): dim 1 of size 1022 is not divisible by tp=4; costs 31.4 MB on each device",
        "fix": ADVICE}),
    Row("a cheap one is a note", {"w": array(8, 6)}, SHARDED, {"level": "info"}),
    Row("not of what fits", {"w": [LARGE] * 20}, SHARDED, None),
    Row("a spec that is too long", {"w": array(8)}, SHARDED, {"says": "the spec has 2 entries, the array 1 dimension", "fix": "shorten the spec"}),
    # A vocabulary of 50,280 on 32 devices: a prefix of the axes would keep nothing.
    Row("a prefix is advised", {"w": array(8, 16)}, [("w", (("fsdp", "tp"),))], {
        "fix": f"{ADVICE}, or let Correction(indivisible='prefix') cut it into 8 parts"}, VOCABULARY),
    Row("the axes that fit are advised", {"w": array(4, 16)}, [("w", (("fsdp", "tp"),))], {
        "fix": f"{ADVICE}, or let Correction(indivisible='drop_axis') cut it into 4 parts"}, VOCABULARY),
    Row("heads are shared", {"wq": array(64, 8, 32), "wk": array(64, 2, 32)}, [("w", (None, "tp"))], {
        "level": "warning", "paths": ("wk",),
        "fix": f"{ADVICE}, or put kv=2, rep=2 in the mesh in place of tp=4: rules.with_axes({{'tp': ('kv', 'rep')}}) and "
        "Correction(indivisible='prefix')"}, options={"large": 1}),
    Row("shared heads are no loss", {"wq": array(64, 8, 32), "wk": array(64, 2, 32)},
        sr.Rules([("w", (None, ("kv", "rep")))], correction=sr.Correction(indivisible="prefix")), {
        "level": "info", "paths": ("wk",), "fix": "leave it so",
        "says": "dim 1 of size 2 has 2 parts for kv=2 * rep=2 devices, which share them"}, {"kv": 2, "rep": 2}, options={"large": 1}),
    Row("what could be cut further is no sharing", {"w": array(64, 12)},
        sr.Rules([("w", (None, ("kv", "rep")))], correction=sr.Correction(indivisible="prefix")),
        {"level": "warning", "says": "is not divisible"}, {"kv": 4, "rep": 2}, options={"large": 1}),
    *(Row(f"{size} are no few heads", {"w": array(64, size)}, [("w", (None, "tp"))], {"fix": ADVICE}, {"tp": 8}) for size in (3, 50_258)),
    *(Row(f"a dimension of one is not to be padded: {shape}", {"w": array(*shape)}, [("w", spec)], {"fix": fix}, {"tp": 8, "fsdp": 2})
      for shape, spec, fix in (
          ((64, 1), (None, "tp"), "leave it whole, or cut dim 0 of size 64 instead"),
          ((1, 60, 64), ("tp",), "leave it whole, or cut dim 2 of size 64 instead"),
          ((1, 64), ("tp", "fsdp"), "leave the dimension whole"),
          ((1, 60), ("tp",), "leave the dimension whole"))),
    Row("no policy is advised", {"w": array(50280, 16)}, [("w", (("rows",),))], {"fix": ADVICE}, VOCABULARY),
    Row("no policy for two axes", {"w": array(50281, 16)}, [("w", (("rows", "tp"),))], {"fix": ADVICE}, VOCABULARY),
    Row("declared in the rules", {"w": WHOLE}, sr.Rules([("w", ("fsdp", ("tp", "sp")))], optional_axes=["sp"]), {"level": "info", "bytes": 0}),
    Row("declared by a rule", {"w": WHOLE, "v": WHOLE},
        [("w", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), ("v", ("fsdp", "sp"))], {
        "rule": 0, "level": "info", "paths": ("w",), "says": "the mesh has no axis 'sp', which alone the spec is without"}),
]  # fmt: skip
LLAMA = {"fsdp": 64, "tp": 8}
UNKNOWN_AXIS = [
    Row("misspelt", {"w": WHOLE}, [("w", ("fdsp", "tp"))], {
        "level": "error", "leaves": 1, "rule": 0, "paths": ("w",), "bytes": 2 * 16384**2 // 8 - 2 * 16384**2 // 512,
        "says": "the mesh has no axis 'fdsp' (did you mean 'fsdp'?)", "advises": "optional_axes"}, LLAMA, only="unknown-axis"),
    Row("in a dialect that corrects nothing", {"w": WHOLE}, sr.Rules([("w", ("fdsp", "tp"))], sr.dialects.EASYLM), {}, LLAMA, only="unknown-axis"),
    Row("no name is near", {"w": WHOLE}, [("w", ("fsdp", "sp"))], {
        "message": "rule 0 'w' -> P('fsdp', 'sp'): the mesh has no axis 'sp'"}),
    Row("an axis of the spec was not meant", {"w": WHOLE}, [("w", ("fsdp", "fdsp"))], {"unsaid": "did you mean"}),
    Row("as eformer drops the axis", {"w": WHOLE}, sr.Rules([("w", ("fdsp", "tp"))], correction=LibraryCorrection(absent="drop")),
        {"level": "error"}, LLAMA),
    Row("beside a shape that does not fit", {"w": array(6, 8)}, exact(("w", ("fsdp", "sp"))), {"level": "error"}),
    Row("declared by another rule", {"w": WHOLE, "v": WHOLE},
        [("w", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), ("v", ("fsdp", "sp"))], {"rule": 1, "paths": ("v",)}),
    Row("one of two is declared", {"w": WHOLE}, [("w", sr.RuleSpec(("fsdp", ("sp", "ep")), optional_axes=["sp"]))], {"says": "no axis 'ep'"}),
    Row("both are", {"w": WHOLE}, sr.Rules([("w", sr.RuleSpec(("fsdp", ("sp", "ep")), optional_axes=["sp"]))], optional_axes=["ep"]), None),
    Row("not of a rule that decides nothing", {"w": WHOLE}, [("w", ("fsdp", "tp")), ("x", "ep")], None, only="dead"),
]  # fmt: skip

LAYERS = {name: [array(4096, 4096)] * 8 for name in ("q", "k", "v", "o")}
UNCUT = [
    Row("an axis forgotten", LAYERS, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))], {
        "level": "warning", "leaves": 8, "rule": 1, "paths": ("o/{0..7}",), "bytes": 8 * (64 * MIB // 4 - 64 * MIB // 32),
        "says": "the mesh axis 'fsdp' could cut 8 leaves"}),
    Row("of most leaves", LAYERS, [("[qkv]", ("fsdp",)), ("o", ("tp", "fsdp"))], {"leaves": 24}),
    Row("no axis forgotten", LAYERS, [("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))], None, only=""),
    Row("declared", LAYERS, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))], None, options={"replicated": ["^o/"]}, only=""),
    Row("not what it cannot cut", {**LAYERS, "o": [array(4100, 4095)] * 8}, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))], None),
    Row("an axis for experts says nothing of matrices", {**LAYERS, "experts": array(8, 4096, 4096)},
        [("experts", ("ep", "fsdp", "tp")), ("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))], None, {**MESH, "ep": 2}, only=""),
    Row("one for matrices does about experts", {**LAYERS, "experts": array(8, 4096, 4096)},
        [("experts", ("ep", "fsdp")), ("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))], {"paths": ("experts",)}, {**MESH, "ep": 2}),
    Row("zero1 says nothing of parameters", state(LAYERS),
        [("opt_state.*[qkvo]", (("fsdp", "dp"), "tp")), ("[qkvo]", ("fsdp", "tp"))], None, {**MESH, "dp": 2}, only=""),
    Row("what the shape refuses is a correction", {**LAYERS, "o": [array(4096, 4100)] * 8},
        [("[qkv]", ("fsdp", "tp")), ("o", ("tp", "fsdp"))], None, only="correction"),
    Row("what is replicated is told as that", LAYERS, [("[qkv]", ("fsdp", "tp")), ("o", ())], None, only="replicated"),
    Row("little is not told", {**LAYERS, "o": array(4096, 512)}, [("[qkv]", ("fsdp", "tp")), ("o", ("tp",))], None, only=""),
]  # fmt: skip


def attention(kv=6, **more):
    kernels = {"q_proj": array(4096, 4096), "k_proj": array(4096, kv * 128), **more}
    return {"attn": {name: {"kernel": leaf} for name, leaf in kernels.items()}}


TORCH = {"self_attn.k_proj.weight": array(768, 4096), "self_attn.o_proj.weight": array(4096, 768)}
QUERY = {"attention": {"query": {"kernel": array(4096, 8, 128)}}}
PROJ, NORMED = [("proj", ("fsdp", "tp"))], [("norm", ()), ("proj", ("fsdp", "tp"))]
HEADS = {"head_dim": 128}
HALF_HEAD = [
    Row("no size is known", attention(), PROJ, None),
    Row("by its size", attention(), PROJ, {
        "level": "warning", "rule": 0, "paths": ("attn/k_proj/kernel",),
        "says": "dim 1 of size 768, 6 heads of 128, is cut into parts of 192, 1.5 heads"}, options=HEADS),
    Row("few heads by two axes", attention(kv=2), PROJ, {
        "says": "2 heads of 128, is cut into parts of 64, 0.5 heads",
        "fix": "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...), and put kv=2, rep=2 in the mesh in place "
        "of tp=4: rules.with_axes({'tp': ('kv', 'rep')}) and Correction(indivisible='prefix')"}, options=HEADS),
    Row("whole heads", attention(kv=8), PROJ, None, options=HEADS),
    Row("a projection of one dimension", attention(o_proj=array(4096)), PROJ, {"paths": ("attn/k_proj/kernel",)}, options=HEADS),
    Row("by a norm beside it", attention(k_norm=array(128)), NORMED, {"paths": ("attn/k_proj/kernel",)}),
    Row("a norm of all heads together", attention(k_norm=array(768), q_norm=array(4096)), NORMED, None),
    Row("one norm of all heads together", attention(k_norm=array(768)), NORMED, None),
    Row("norms of two sizes", attention(k_norm=array(128), q_norm=array(64)), NORMED, None),
    Row("units keep heads whole", attention(), [("proj", sr.RuleSpec(("fsdp", "tp"), units=(None, 128)))], None, options=HEADS),
    Row("one projection of torch", TORCH, [("proj", ("tp", "fsdp"))], {"leaves": 1}, options=HEADS),
    Row("two of torch", TORCH, [("o_proj", ("fsdp", "tp")), ("proj", ("tp", "fsdp"))], [{"leaves": 1}] * 2, options=HEADS),
    Row("heads of their own", QUERY, [("query", ("fsdp", None, "tp"))], {"says": "dim 2 of size 128, 1 head of 128"}, options=HEADS),
    Row("heads of their own, whole", QUERY, [("query", ("fsdp", "tp"))], None, options=HEADS),
    Row("weights are gathered along fsdp", attention(), [("proj", ("tp", "fsdp"))], None, options=HEADS),
    Row("an array called value", {"attn": {"value": array(4096, 768)}}, [("value", ("fsdp", "tp"))], {"leaves": 1}, options=HEADS),
    Row("no attention is found", {"w": LARGE}, SHARDED, {"says": "no path names projections of attention"}, options=HEADS),
]  # fmt: skip

# Paths of nnx end in `value`, and `query|key|value` won every leaf.
OF_NNX = {name: {"kernel": {"value": LARGE}} for name in ("query", "mlp")}
NNX_VALUE = [
    Row("matches only so", OF_NNX, [("query|key|value", ("fsdp", "tp"))], {
        "level": "error", "rule": 0, "leaves": 1, "says": "matches 1 leaf only through the '/value' in which flax nnx lets paths end",
        "advises": "use the dialect NNX"}),
    *(Row(f"not {pattern!r}", OF_NNX, [(pattern, ("fsdp", "tp"))], None)
      for pattern in (".*", "kernel/value$", "kernel/value", "(query|mlp|value)/kernel", "kernel")),
    Row("not where it wins nothing", OF_NNX, [("kernel", ("fsdp", "tp")), ("value", "tp")], None),
    Row("not what is perhaps meant so", {**OF_NNX, "norm": {"scale": {"value": LARGE}}}, [("kernel/v", ("fsdp", "tp")), ("scale/v", ("tp", "fsdp"))], None),
    Row("not a tree of specs", OF_NNX, jax.tree.map(lambda _: P("fsdp", "tp"), OF_NNX), None, only=""),
    *(Row(f"{pattern!r} in the dialect", OF_NNX, sr.Rules([(pattern, ("fsdp", "tp")), (".*", ())], NNX), None)
      for pattern in ("query|key|value", "kernel/value$", "kernel$")),
]  # fmt: skip

DEAD = [
    Row("a rule", {"w": LARGE}, [*SHARDED, ("v", "tp")], {
        "level": "warning", "rule": 1, "leaves": 0, "bytes": 0, "paths": (), "message": "rule 1 'v' -> P('tp') matches no leaf"}),
    Row("not one that matches", {"w": LARGE, "v": array(8)}, [*SHARDED, ("v", "tp")], None),
    Row("one that only scalars match", {"w": LARGE, "v": array()}, [*SHARDED, ("v", "tp")], {"rule": 1}),
]  # fmt: skip

SHADOWED = [
    Row("a rule", {"w": LARGE, "bw": LARGE}, [*SHARDED, ("bw", "tp")], {
        "level": "warning", "rule": 1, "leaves": 1, "message": "rule 1 'bw' -> P('tp') matches 1 leaf, but wins none: rule 0 came first",
        "fix": "move it before rule 0, or remove it"}),
    Row("not the first", {"w": LARGE, "bw": LARGE}, [("bw", "tp"), *SHARDED], None),
    Row("a catch-all may be left with nothing", {"w": LARGE}, [*SHARDED, (".*", None)], None, only=""),
    Row("where one rule alone may match there is no before", {"a": LARGE}, sr.Rules([("a", ("fsdp", "tp")), ("a.*", None)], KERAS), {
        "fix": "make the patterns exclude each other, or remove it"}),
]  # fmt: skip

HUNDRED = {"w": [LARGE] * 100}
NAMES = {"names": {"w": ("embed", "mlp")}}
BATCHES = sr.LogicalRules([("batch", "dp"), ("mlp", "tp"), ("embed", None)])
UNUSED_AXIS = [
    Row("an axis", {"w": LARGE}, SHARDED, {
        "level": "info", "message": "the mesh axis 'dp' cuts no leaf: everything is held 2 times along it"},
        {"dp": 2, **MESH}),
    # It is a correction, and another finding would say of a rule that names it to name it.
    Row("not one that leaves lose", {"w": [array(4096, 4095)] * 20}, [("w", ("fsdp", "rows"))], None, {"fsdp": 8, "rows": 4}, only="correction"),
    Row("one of a rule for no leaf", HUNDRED, [*SHARDED, ("batch", "dp")], {
        "level": "info", "rule": 1, "says": "named only by rule 1 'batch' -> P('dp'), which no leaf meets",
        "advises": "correct the rule; or declare"}, {"dp": 4, **MESH}),
    Row("not of one device", {"w": LARGE}, SHARDED, None, {"dp": 1, **MESH}),
    Row("a mesh four times as large that holds as much", HUNDRED, SHARDED, {
        "level": "warning", "bytes": 100 * 16 * MIB // 32 * 3 // 4}, {"dp": 4, **MESH}),
    Row("declared", HUNDRED, SHARDED, None, {"dp": 4, **MESH}, options={"data_axes": ["dp"]}, only=""),
    Row("of a logical rule for activations", {"w": array(8192, 8192)}, BATCHES, {
        "level": "info", "rule": 0, "says": "named only by rule 0 'batch' -> 'dp', which no leaf meets", "advises": "data_axes=['dp']"},
        {"dp": 4, "tp": 4}, NAMES, only="unused-axis"),
    Row("kept by a misspelt name", {"w": LARGE}, sr.LogicalRules([("embex", "fsdp"), ("mlp", "tp")]), {"level": "warning"},
        of_plan=NAMES, options={"large": MIB}),
]  # fmt: skip

SQUARE, LARGER = {"fsdp": 2, "tp": 2}, array(4096, 4096)
IN_HOST = [("w", sr.RuleSpec(("fsdp", "tp"), memory_kind="unpinned_host")), ("", ("fsdp", "tp"))]
UNPINNED = [
    Row("what jit copies to the device", {"w": [LARGER] * 2, "v": LARGER}, IN_HOST, {
        "level": "warning", "rule": 0, "leaves": 2, "bytes": 2 * 16 * MIB, "advises": "'pinned_host'",
        "says": "33.6 MB on each device are not counted"}, SQUARE),
    Row("a small one", {"w": array(8, 8)}, IN_HOST, {"level": "info"}, SQUARE),
    *(Row(f"not {kind}", {"w": LARGER}, [("w", sr.RuleSpec(("fsdp", "tp"), memory_kind=kind))], None, SQUARE, only="")
      for kind in (None, "device", "pinned_host")),
]  # fmt: skip

FACTORS = {"up": {"kernel": array(64, 256), "lora_a": array(64, 8), "lora_b": array(8, 256)}, "norm": array(64)}  # fmt: skip
LOOSE = [("up", P("fsdp", "tp")), ("norm", P())]
ONE_CUT = ("up", P("fsdp", None))  # cuts the rank of lora_b alone
STACKED = {"companions": [sr.stacked("layers")]}
SCANNED = {"layers": {"wq": array(32, 64, 64)}}
NO_LEAVES = {"level": "warning", "paths": (), "leaves": 0}
COMPANION = [
    Row("no rule is left", {"layers": {"wo": array(8, 8)}}, [], {"says": "what decides is no rule"}, of_plan=STACKED),
    Row("a base that no rule meets", {"layers": {"wo": array(32, 64, 64), "wq": array(32, 64, 64)}},
        [("layers/wo", ("fsdp", "tp")), (r"layers/\d+/wq", ("fsdp", "tp"))], {
        "level": "warning", "paths": ("layers/wo",), "leaves": 1, "bytes": 32 * 64 * 64 * 4 // 32,
        "says": "what decides is rule 0, as if there were no companion",
        "advises": "add a rule that matches 'layers/0/wo'"}, of_plan=STACKED),
    Row("all layers follow", {**SCANNED, "norm": array(64)}, [(r"layers/\d+/wq", ("fsdp", "tp")), ("norm", ())], None, of_plan=STACKED),
    *(Row(f"finds nothing: {mistyped.pattern}", SCANNED, [("", "fsdp")],
          {**NO_LEAVES, "message": f"the companion {mistyped.pattern!r} finds no leaf"},
          of_plan={"companions": [sr.stacked("layers"), mistyped]})
      for mistyped in (sr.stacked("layer"), sr.Companion("wx$", "w", dims=(0, 1)))),
    Row("off", SCANNED, [("", "fsdp")], None, of_plan={"companions": [sr.stacked("layer")]}, options={"levels": {"companion": "off"}}),
    Row("a table is asked as a whole", {"q": {"kernel": array(64, 64), "lora_a": array(64, 4)}}, [("kernel", "tp")], None,
        of_plan={"companions": sr.LORA}),
    Row("a table that finds nothing", {"q": {"kernel": array(64, 64), "lora_a": array(64, 4)}}, [("kernel", "tp")],
        {"message": "the companions find no leaf"}, of_plan={"companions": sr.QUANTIZED}),
    Row("no companions", {"w": LARGE}, SHARDED, None, only=""),
    Row("a rule for kernels cuts the rank of LoRA", FACTORS, LOOSE, {
        "level": "warning", "rule": 0, "bytes": 0, "paths": ("up/lora_a", "up/lora_b"), "says": "rule 0 'up' -> P('fsdp', 'tp') is for kernels",
        "advises": "companions=shardrules.LORA"}),
    Row("they follow", FACTORS, LOOSE, None, of_plan={"companions": sr.LORA}),
    Row("the rank of one", FACTORS, [ONE_CUT, ("norm", P())], {"paths": ("up/lora_b",), "says": "it cuts their rank"}),
    Row("a rule of its own", FACTORS, [("lora_b", P()), ONE_CUT, ("norm", P())], None),
    Row("rules of their own", FACTORS, [("lora_", P("fsdp", "tp")), *LOOSE], None),
    Row("the kernel is in another tree", {"up": {"lora_a": array(64, 8)}}, LOOSE[:1], {"paths": ("up/lora_a",)}),
    # Its dimensions are found by their sizes.
    Row("qwix's names", {"up": {"kernel": array(64, 256), "kernel_lora_a": array(64, 8)}}, [("up/kernel", P("fsdp", "tp"))],
        {"paths": ("up/kernel_lora_a",)}),
    Row("qwix's names of experts", {"up": {"kernel": array(6, 32, 48), "kernel_lora_b": array(6, 4, 48)}},
        [("up/kernel", P(None, "tp", None))], {"paths": ("up/kernel_lora_b",)}),
]  # fmt: skip

TABLE = {
    "unmatched": UNMATCHED, "misfit": MISFIT, "catch-all": CATCH_ALL, "replicated": REPLICATED, "memory": MEMORY,
    "correction": CORRECTION, "unknown-axis": UNKNOWN_AXIS, "uncut": UNCUT, "half-head": HALF_HEAD, "nnx-value": NNX_VALUE,
    "dead": DEAD, "shadowed": SHADOWED, "unused-axis": UNUSED_AXIS, "companion": COMPANION,
    "unpinned": UNPINNED,
}  # fmt: skip
ROWS = [pytest.param(kind, row, id=f"{kind}: {row.what}") for kind, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_findings_are_those_of_the_table(kind, row):
    findings = sr.plan(row.tree, row.rules, row.mesh, **row.of_plan).check(**row.options)
    found = [finding for finding in findings if finding.kind == kind]
    expected = row.finds if isinstance(row.finds, list) else [] if row.finds is None else [row.finds]
    assert len(found) == len(expected), found
    assert row.only is None or {finding.kind for finding in findings} == {*filter(None, [row.only])}
    for finding, fields in zip(found, expected, strict=True):
        parts = {"says": finding.message, "advises": finding.fix}
        for name, value in fields.items():
            if name in parts:
                assert value in parts[name]
            elif name == "unsaid":
                assert value not in finding.message
            else:
                assert getattr(finding, name) == value, name
