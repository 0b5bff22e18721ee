"""Every parameter of every public function, with values that it cannot be: what the error says."""

from __future__ import annotations

import inspect
import math
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import demo
from shardrules._base.text import shown
from shardrules._estimate.step_time import machine_of
from shardrules._program.compiling import CompileLog
from shardrules._rules import matcher
from tests.support import api
from tests.support.files import header_file

TREE = {"w": np.ones((8, 8), np.float32)}
RULES = [("w", ("tp",))]
SIZES = {"tp": 1}
MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))
LOGICAL = [("embed", "tp")]
PLAN = sr.plan(TREE, RULES, SIZES)
COMPILED = jax.jit(lambda x: x).lower(np.ones(3)).compile()
DOUBLED = jax.jit(lambda x: x * 2)
STEP = sr.trace(lambda params, x: params["w"].sum() * x, PLAN, np.ones(3))
SOLUTION = sr.solve(STEP, SIZES, hardware="v5p")
# Something whose text is far too long for a message.
HUGE = {f"layer{i}": {"kernel": np.ones(2)} for i in range(20_000)}


class Thing:
    """Of no type that anything takes."""


THING = Thing()

# By the parameter's name, what it cannot be; by the callable's and the parameter's where they differ.
NOT_TEXT = (3, b"x", THING, HUGE, 0, ["w"])
NOT_TRUTH = ("no", None, 2, THING, HUGE, np.ones(2), [])
NOT_SIZE = ("8", 1.5, -1, 2**64, 10**5000, THING, HUGE, False, [])
NOT_NUMBER = ("8", THING, HUGE, [], np.ones(2))
NOT_TREE = ("ckpt", b"x", Path("ckpt"), print, Thing, THING, iter([]), {"f": print}, math)
NOT_DECIDERS = ("tp", 3, THING, {"w": 3}, {"v": P()}, [("w",)], {"w": {"x": P()}}, ())
NOT_RULES = (
    "w",
    3,
    0,
    {},
    THING,
    HUGE,
    P("tp"),
    [3],
    ["ab"],
    [("w",)],
    [(3, "tp")],
    [("w", 3.5j, 1)],
)
NOT_MESH = ("tp=2", 3, 0, {}, [], THING, HUGE, {"tp": 0}, {"tp": "2"}, {"tp": 2**63}, {3: 2},
            {"tp": 2**24 + 1}, {"a": 2**30, "b": 2}, {"tp": 10**5000}, {"tp": 2.0}, (2, 2))  # fmt: skip
NOT_CORRECTION = ("drop", 0, {}, [], False, THING, HUGE)
NOT_MEMORY = ("pinned_hsot", "host", "", 3, 0, False, b"device", ["device"], {}, THING, HUGE)
NOT_DIALECT = ("eformer", None, 0, {}, THING, HUGE, sr.Correction())
NOT_LOGICAL_DIALECT = (*(x for x in NOT_DIALECT if x is not None), sr.dialects.EFORMER)
NOT_LOGICAL = (3, 0, [3], ["ab"], [("a",)], THING, "ab", [([], "tp")])
NOT_FILE = (0, 3, [], THING, HUGE)
WRONG: dict[str, tuple[Any, ...]] = {
    "time": (3, "text", [0], THING, HUGE),
    "lines": (3, 0, "12", [0], [2.5], [None], THING, HUGE),
    "tree": NOT_TREE,
    "model": NOT_TREE,
    "like": tuple(value for value in NOT_RULES if value is not None),
    "state": NOT_TREE,
    "rules": NOT_RULES,
    "rules_a": NOT_RULES,
    "rules_b": NOT_RULES,
    "mesh": NOT_MESH,
    "min_size": NOT_NUMBER,
    "correction": NOT_CORRECTION,
    "dialect": NOT_DIALECT,
    "companions": (3, 0, "x", [3], [None], THING, HUGE, sr.LORA[0]),
    "batch": NOT_TREE,
    "spec": ("tp", 3, None, THING, {"w": 3}, {"v": P()}, RULES, P("no axis"), P(None, None, None)),
    "donate": NOT_TRUTH,
    "scalars": ("drop", 0, THING, HUGE, []),
    "strict": NOT_TRUTH,
    "optional": NOT_TRUTH,
    "path": NOT_TEXT,
    "shape": (3, 0, "ab", (2.5,), (-1,), (2**63,), (None,), ("8",), THING, {8: 8}, (10**5000,)),
    "memory_budget": NOT_SIZE,
    "large": NOT_NUMBER,
    "replicated": (3, 0, "bias", [3], THING, HUGE, [b"x", None]),
    "optional_axes": ("sp", 3, 0, [3], [None], THING, HUGE),
    "data_axes": ("dp", 3, 0, [3], [None], THING, HUGE),
    "head_dim": ("8", 0, 1.5, -1, True, THING, HUGE),
    "levels": (3, 0, [], "error", THING, {"dead": "fatal"}, {"silly": "error"}, {"dead": THING}),
    "gradients": ("adam", 0, 3, THING, HUGE, []),
    "unreduced": ("data", 3, 0, [3], [None], ["no such axis"], THING, HUGE),
    "optimizer": ("adam", 0, 3, THING, HUGE, ["adam"], [None], [[]]),
    "meshes": (3, 0, THING, [3], [{}], [{"tp": 0}], [None], SIZES),
    "devices": NOT_SIZE,
    "axes": ("tp", 3, 0, [3], [None], [], ["tp", "tp"], THING, HUGE),
    "fixed": (3, 0, [], "tp", THING, {"tp": 0}, {"tp": "2"}),
    "hbm": NOT_NUMBER,
    "host_memory": NOT_NUMBER,
    "memory_kind": NOT_MEMORY,
    "optimizer_memory_kind": NOT_MEMORY,
    "activations": ("plan", 3, 0, {}, THING, HUGE),
    "other": ("plan", None, 3, 0, {}, THING, HUGE),
    "plan": ("plan", None, 3, 0, {}, THING, HUGE),
    "lock": (3, None, 0, [], THING, HUGE, "no such file", "{}", "{" * 5000, "x" * 10**5),
    "zero1": (3, 0, [], THING, HUGE, "no such axis"),
    "dim": ("last", None, 0, THING, HUGE, []),
    "place": ("front", None, 0, THING, HUGE, []),
    "not_with": ("tp", 3, 0, [3], [None], THING, HUGE),
    "findings": (3, 0, [], "none", THING, HUGE),
    "sweep": (3, 0, [], THING, HUGE),
    "title": (3, None, THING, HUGE),
    "level": (3, None, 0, "fatal", THING, HUGE, []),
    "file": NOT_FILE,
    "absent": ("drp", None, 0, THING, HUGE, []),
    "name": (3, None, THING, HUGE),
    "hidden_key": (1, b"value", THING, HUGE, ["value"]),
    "separator": (1, None, b"/", THING, HUGE),
    "match": (3, 0, "search", [], ["silly"], [3], THING, HUGE),
    "last_wins": NOT_TRUTH,
    "keeps_unknown": NOT_TRUTH,
    "tries_next": NOT_TRUTH,
    "keeps_size_one": NOT_TRUTH,
    "units": (3, 0, "12", [0], [-1], [2**63], ["8"], [1.5], [True], THING, HUGE),
    "pattern": (3, None, b"x", THING, HUGE, "("),
    "base": (3, None, THING, HUGE, r"\9"),
    "dims": (3, "tp", [-1], [1.5], [THING], [..., 0], [[]], THING, HUGE, [True]),
    "blocks": (3, "12", [0], ["8"], [2**63], THING, HUGE),
    "rank": ("8", None, 1.5, -1, THING, HUGE),
    "at": NOT_TEXT,
    "layer": (3, 0, b"x", THING, HUGE),
    "axis": ("0", None, 1.5, -1, 64, THING, HUGE),
    "mesh_axis": (3, 0, [], THING, HUGE),
    "fallback": ("raise", None, 0, THING, HUGE),
    "names": (3, "embed", THING, None),
    "logical_names": (3, "embed", THING),
    "arrays": (3, {}, [THING]),
    "libraries": (3, None, "keras", THING, []),
    "scanned": (3, 0, "Layer", [3], THING, HUGE),
    "nested": tuple(value for value in NOT_TRUTH if value is not None),
    "max_memory": NOT_SIZE,
    "shardings": (3, {"w": 3}, {"w": P()}, {}, THING),
    "dtype": (3, 0, "f23", [], THING, HUGE),
    "min_bytes": NOT_SIZE,
    "min_rank": NOT_SIZE,
    "step": (3, None, "step", THING, HUGE, PLAN),
    "on": (3, "v5p:8x8x8", SIZES, THING, HUGE, PLAN),
    "effort": (3, None, "some", THING, HUGE),
    "slices": (0, -1, None, 1.5, "2", THING),
    "compiled": (3, None, "step", THING, HUGE, jax.jit(print)),
    "inputs": (3, 0, None, "w", THING, HUGE, {}, PLAN, (), (3,), (None, None), ("w",), ([P()],)),
    "outputs": (3, 0, "w", THING, HUGE, {"w": 3}, [P()], (P(), P())),
    "source": (3, None, b"x", [], THING, HUGE, "no such file"),
    "renames": (3, 0, "x", [3], [None], THING, HUGE),
    "progress": (3, 0, "bar", [], THING, HUGE),
    "max_bytes_in_flight": (*NOT_SIZE, 1),
    "prove": (*NOT_SIZE, 2),
    "shared": NOT_TRUTH,
    "resize": (3, 0, "in", [], THING, {"in": "8"}, {"in": -1}, {"no dimension": 8}, {3: 8}),
    "apply": (3, 0, "x", [], {}, HUGE),
    "argument": (3, None, THING, HUGE, "a b"),
    "solution": (3, 0, "solution", THING, HUGE),
    "keep": (3, "w", [3], ["no such path"], ["("], [("w", P("no such axis"))], THING, HUGE),
    "forbid": (3, "experts", [3], [("experts",)], [("no such role", "tp")], THING, HUGE),
    "time_limit": (*NOT_NUMBER, -1),
    "remat": (3, "all", [], THING, HUGE),
    "timeout": (*NOT_NUMBER, -1, 0),
    "config": (3, None, [], "llama", THING, {"model_type": "lama"}, {"model_type": "llama"}),
    "layout": (3, None, "keras", THING, HUGE),
    "factor": (*NOT_NUMBER, None, 0),
    "offset": (*NOT_NUMBER, None),
    "sizes": (3, 0, "in", [], THING, {"in": 0}, {"in": "8"}, {"in": (8, 0)}, {"no axis": 8}),
    "words": (3, 0, "in", [], THING, {"part": "qkv"}, {"part": [THING]}, {"part": ("q", "q")}, {"in": ("q",)}),
    "scale": (3, 0, [], THING, HUGE, r"\9"),
    "within": (3, 0, [3], THING, {}, {"tp"}, ["tp", "tp"]),
    "tokens": (*NOT_SIZE, 0, None),
    "batch_axes": ("tp", 3, 0, [3], [None], ["tp", "tp"], ["no such axis"], THING, HUGE),
    "gathers": (*NOT_SIZE, 0, None),
    "accumulate": (*NOT_SIZE, 0, None),
    "reduce": ("reduce", None, 0, THING, HUGE, []),
    "sequence_parallel": NOT_TRUTH,
    "input_gradients": ("twice", None, 0, THING, HUGE, []),
    "experts_per_token": (*NOT_SIZE, 0),
    "capacity_factor": (*NOT_NUMBER, 0, -1.0, math.inf, math.nan, None),
    "roles": (3, 0, [], "in", THING, {3: ("in",)}, {"w": "in"}, {"w": ("in",)}, {"w": (3, 3)},
              {"w": ("in", "unknown")}, {"no such path": ("in", "out")}, {"(": ("in", "out")}),
    "hardware": (3, 0, [], "no such device", THING, HUGE),
    "axes_over_dcn": ("tp", 3, 0, [3], [None], ["no such axis"], THING, HUGE),
    "overlap": ("params", 3, 0, [3], ["parms"], THING, HUGE),
    "efficiency": (*NOT_NUMBER, 0, -1, 1.5),
    "schedule": (3, 0, [], "x", THING, HUGE, {"gather": 2}, {"gathers": 0}, {3: 3}),
    "flops_per_second": (3, None, [], {}, {3: 1.0}, {"bf17": 1.0}, {"int8": 0}, {"int8": "1"}, THING),
    **dict.fromkeys(
        ("memory_bytes_per_second", "link_bytes_per_second", "dcn_bytes_per_second"),
        (*NOT_NUMBER, None, 0, -1.0, math.inf, math.nan, True)),
    **dict.fromkeys(("memory_bytes", "link_devices", "torus_dimensions"), (*NOT_SIZE, 0, None)),
    "link": NOT_TEXT,
    "tolerance": (*NOT_NUMBER, -0.1, math.inf, math.nan, True, None),
    "budget": (3, 0, [], "fsdp=1GB", THING, {3: 1}, {"no such axis": 1}, {"total": "much"},
               {"total": -1}, {"total": THING}, {"total": True}),
    "log": (3, 0, [], "log", THING, HUGE, CompileLog()),
    "sources": (3, "x", None, [3], THING, HUGE),
}  # fmt: skip
CHOICES = ("indivisible", "rank", "unconstrained", "pad", "keys", "precedence",
           "scalars", "unmatched")  # fmt: skip
OTHERWISE: dict[str, tuple[Any, ...]] = {
    **{f"Correction.{name}": WRONG["absent"] for name in CHOICES[:4]},
    "Correction.pad": NOT_TRUTH,
    "with_logical_constraint.tree": (),
    **dict.fromkeys(("Rules.with_axes.axes", "LogicalRules.with_axes.axes"),
                    (3, None, "tp", THING, {"no axis": "a"}, {3: "a"}, {"tp": 3}, {"tp": [3]})),
    "Plan.check.step": (3, "step", THING, HUGE, PLAN),
    **{f"Dialect.{name}": WRONG["absent"] for name in ("keys", "precedence", "scalars", "min_size",
                                                       "rank", "unmatched")},
    "Dialect.correction": (*NOT_CORRECTION, None),
    **{f"{name}.names": (3, "embed", THING, {"w": 3}, [3])
       for name in ("compare", "load", "plan", "named_shardings", "reshard", "shard",
                    "with_sharding_constraint")},
    "from_hf.scanned": NOT_TRUTH,
    "suggest.step": (3, "step", THING, HUGE, PLAN),
    "suggest.tokens": tuple(value for value in WRONG["tokens"] if value is not None),
    "suggest.devices": tuple(value for value in NOT_SIZE if value is not None),
    "suggest.dialect": tuple(value for value in NOT_DIALECT if value is not None),
    "suggest.names": (3, "embed", THING, {"w": 3}, [3]),
    "suggest.optimizer": (*WRONG["optimizer"], PLAN),
    "Plan.traffic.activations": ("plan", None, 3, 0, {}, THING, HUGE),
    "Rename.path": (3, 0, [], THING, HUGE, r"\9", "no axis"),
    "Rename.dims": (3, 0, [], THING, HUGE, "a", "a -> a -> a", "(a", "a) -> a", "a a -> a", "a -> (b a)",
                    "a -> (a b)", "a[0] -> a", ""),
    "reshard.rules": NOT_DECIDERS,
    "shard.rules": NOT_DECIDERS,
    "with_sharding_constraint.rules": NOT_DECIDERS,
    "load.rules": (*NOT_DECIDERS, None),
    "load.tree": NOT_TREE,
    "load.only": (3, THING, HUGE, "(", "no such path"),
    "load.missing": (3, "w", THING, ["w"], {3: 0}, {"w": None}, {"w": 0}),
    "save.tree": (3, "tree", {}, THING),
    "save.path": (3, None, THING, []),
    "save.shard_bytes": (0, -1, "5", 1.5, None, THING),
    "Plan.sweep.optimizer": (*WRONG["optimizer"], PLAN),
    "Plan.sweep.tokens": (*NOT_SIZE, 0),
    "Plan.sweep.devices": (*(size for size in NOT_SIZE if not isinstance(size, str)), "v5q:8"),
    **{
        f"Plan.{name}.step": (3, "step", THING, HUGE, DOUBLED)
        for name in ("bytes_per_device", "step_time", "sweep", "traffic")
    },
    **{
        f"Step.{name}.plan": ("plan", 3, 0, {}, THING, HUGE)
        for name in ("findings", "largest_batch", "memory", "time", "traffic")
    },
    "Step.time.machine": ("v5p", None, 3, THING, HUGE),
    "Step.explain.path": (*NOT_TEXT, "no such leaf"),
    "Plan.lock.path": NOT_FILE,
    "Program.lock.path": NOT_FILE,
    "Program.diff.other": (*WRONG["lock"], PLAN),
    "Plan.to_html.path": NOT_FILE,
    "Topology.name": (3, None, THING, HUGE, "v5q:8x8", "v5p", "v5p:3x3x3", "v5p-7", "v5e:64x64", "h100", "h100:64"),
    "prove.inputs": (3, 0, "w", THING, HUGE, {}, PLAN),
    "Plan.to_html.program": (3, "x", THING, PLAN),
    "Plan.to_html.suggestion": (3, "x", THING, PLAN),
    "Plan.explain.path": (*NOT_TEXT, "no such leaf", "x" * 10**5),
    "Plan.kind.path": (*NOT_TEXT, "no such leaf"),
    "Plan.source.path": (*NOT_TEXT, "no such leaf"),
    "Hardware.named.name": (*NOT_TEXT, "no such device"),
    "read_hardware.path": (*NOT_FILE, None, b"x"),
    "read_model.path": (*NOT_FILE, None, b"x"),
    "write_manifest.path": (*NOT_FILE, None),
    "read_rules.path": (*NOT_FILE, None, b"x"),
    "read_rules.dialect": tuple(value for value in NOT_DIALECT if value is not None),
    "Plan.on_mesh.mesh": (*NOT_MESH, None),
    "logical_axis_rules.rules": (*NOT_LOGICAL, iter(())),
    "logical_to_mesh.rules": NOT_LOGICAL,
    "with_logical_constraint.rules": NOT_LOGICAL,
    "logical_to_mesh.tree": (3, "embed", THING, [THING, 3]),
    "LogicalRules.rules": (3, 0, "w", None, [3], ["ab"], [("a",)], THING, [([], "tp")],
                           [("w", 3)], [("w", [3])], P("w")),
    "LogicalRules.dialect": (*NOT_LOGICAL_DIALECT, None),
    "LogicalDialect.correction": (*NOT_CORRECTION, None),
    "logical_to_mesh.dialect": NOT_LOGICAL_DIALECT,
    "Zero1.axis": (3, None, [], THING, HUGE),
    "fsdp.axis": (3, None, [], [3], ("tp", "tp"), THING, HUGE),
    # As eformer's, it gives P() to whatever has no shape.
    "match_partition_rules.tree": (),
    "Rules.match.tree": (),
    **{name: tuple(x for x in NOT_RULES if not isinstance(x, P))
       for name in ("named_shardings.rules", "plan.rules", "spec_for.rules", "compare.rules_a",
                    "compare.rules_b", "Plan.with_rules.rules", "Suggestion.compare.rules")},
}  # fmt: skip
# What an error may say instead of the parameter's name.
CALLED = {
    "rules": "specs|rule",
    "rules_a": "rules_a|rule ",
    "rules_b": "rules_b|rule ",
    "like": "like|rule ",
    "levels": "level",
    "replicated": "replicated|pattern",
    "meshes": "mesh",
    "fixed": "fixed|mesh",
    "axes": "axes",
    "path": "path|group",
    "lock": "lock",
    "other": "other|lock",
    "shardings": "sharding",
    "names": "names",
    "logical_names": "names|spec",
    "arrays": "array|tree",
    "libraries": "librar",
    "zero1": "zero1",
    "tree": "tree|names",
    "model": "model|tree",
    "pattern": "pattern|position",
    "roles": "roles|position",
    "base": "base|group",
    "devices": "devices",
    "gradients": "gradients",
    "schedule": "schedule|gathers",
    "scale": "scale|group",
    "source": "source|no such file",
    "sizes": "sizes|dims",
    "words": "words|dims",
}

CHECKPOINT = Path(tempfile.mkdtemp()) / "model.safetensors"
CHECKPOINT.write_bytes(
    header_file({"w": {"dtype": "U8", "shape": [8, 8], "data_offsets": [0, 64]}}, bytes(64))
)

# Each public callable with arguments that it takes: (function, arguments by name).
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Companion": (sr.Companion, {"pattern": "a", "base": "b", "dims": (0,), "blocks": (1,)}),
    "Correction": (sr.Correction, {
        "indivisible": "drop", "rank": "keep",
        "unconstrained": "drop", "pad": True}),
    "Dialect": (sr.dialects.Dialect, {
        "name": "x", "separator": "/", "correction": sr.Correction(), "keys": "text",
        "match": ("search",), "precedence": "first", "scalars": "none", "min_size": "after",
        "rank": "keep", "unmatched": "error", "hidden_key": None}),
    "Findings.at_least": (PLAN.check().at_least, {"level": "error"}),
    "Findings.raise_for": (PLAN.check().raise_for, {"level": "error"}),
    "Findings.to_github": (PLAN.check().to_github, {"file": None, "lines": ()}),
    "Findings.to_json": (PLAN.check().to_json, {}),
    "Hardware": (sr.Hardware, {
        "name": "x", "flops_per_second": {"bfloat16": 1.0}, "memory_bytes": 1,
        "memory_bytes_per_second": 1.0, "link": "x", "link_bytes_per_second": 1.0,
        "link_devices": 1, "dcn_bytes_per_second": 1.0, "torus_dimensions": 1, "efficiency": 1.0, "sources": ()}),
    "Hardware.named": (sr.Hardware.named, {"name": "v5p"}),
    "LogicalDialect": (sr.dialects.LogicalDialect, {
        "name": "x", "last_wins": True, "keeps_unknown": False, "correction": sr.Correction(),
        "tries_next": True, "keeps_size_one": True}),
    "LogicalRules": (sr.LogicalRules, {
        "rules": [("w", "tp")], "dialect": sr.dialects.MAXTEXT, "correction": None,
        "optional_axes": ()}),
    "Plan.abstract": (PLAN.abstract, {}),
    "Plan.bytes_per_device": (PLAN.bytes_per_device, {
        "gradients": None, "optimizer": ["int8"], "optimizer_memory_kind": "device", "activations": PLAN, "step": None}),
    "Plan.check": (
        PLAN.check,
        {"large": 1, "replicated": (), "optional_axes": (), "data_axes": (), "head_dim": 1, "hbm": 1, "levels": {}, "step": None},
    ),
    "Plan.diff": (PLAN.diff, {"other": PLAN}),
    "Plan.explain": (PLAN.explain, {"path": "w"}),
    "Plan.fingerprint": (PLAN.fingerprint, {}),
    "Plan.for_gradients": (PLAN.for_gradients, {"dtype": "float32", "unreduced": ()}),
    "Plan.for_optimizer": (PLAN.for_optimizer, {
        "state": TREE, "zero1": "tp", "memory_kind": "pinned_host"}),
    "Plan.from_lock": (sr.Plan.from_lock, {"lock": PLAN.lock()}),
    "Plan.kind": (PLAN.kind, {"path": "w"}),
    "Plan.lock": (PLAN.lock, {"path": None}),
    "Plan.on_mesh": (PLAN.on_mesh, {"mesh": SIZES}),
    "Plan.shardings": (PLAN.shardings, {}),
    "Plan.source": (PLAN.source, {"path": "w"}),
    "Plan.specs": (PLAN.specs, {}),
    "Plan.step_time": (PLAN.step_time, {
        "hardware": "v5p", "tokens": 1, "step": None, "axes_over_dcn": (), "overlap": (), "efficiency": 1.0,
        "gradients": None, "optimizer": ["int8"], "optimizer_memory_kind": None, "schedule": None}),
    "Plan.sweep": (PLAN.sweep, {
        "meshes": None, "devices": 4, "axes": ["tp"], "fixed": None, "hbm": None,
        "host_memory": None, "gradients": None, "optimizer": ["int8"],
        "optimizer_memory_kind": None, "tokens": 1, "hardware": "v5p", "axes_over_dcn": (),
        "overlap": (), "efficiency": 1.0, "schedule": None, "step": None, "prove": 0}),
    "Plan.transfer": (PLAN.transfer, {"other": PLAN}),
    "Plan.to_html": (PLAN.to_html, {
        "path": None, "findings": None, "sweep": None, "title": "x", "hbm": None,
        "host_memory": None, "gradients": None, "optimizer": ["int8"],
        "optimizer_memory_kind": None, "program": None, "time": None, "suggestion": sr.suggest(TREE, {"tp": 2}),
        "solution": SOLUTION}),
    "Plan.traffic": (PLAN.traffic, {
        "tokens": 8, "step": None, "batch_axes": (), "gathers": 1, "accumulate": 1, "reduce": "all-reduce",
        "zero1": None, "gradients": None, "activations": "float32", "sequence_parallel": False,
        "input_gradients": "each", "experts_per_token": None, "capacity_factor": 1.0,
        "roles": {"w": ("in", "out")}}),
    "Rename": (sr.Rename, {
        "pattern": "(?P<layer>[0-9]+)", "path": "{part}", "dims": "(part out) in -> layer in out",
        "sizes": {"out": (8, 4)}, "words": {"part": ("q", "k")}, "scale": "scale", "blocks": (128, 128),
        "dtype": None, "optional": False, "shared": False, "resize": {}, "apply": None, "argument": ""}),
    "RuleSpec": (sr.RuleSpec, {
        "spec": "tp", "correction": None, "units": (), "memory_kind": None,
        "optional_axes": ()}),
    "Rules": (sr.Rules, {
        "rules": RULES, "dialect": sr.dialects.EFORMER, "correction": None, "optional_axes": (), "min_size": 0,
        "memory_budget": 0}),
    "Rules.all_matches": (sr.Rules(RULES).all_matches, {"path": "w"}),
    "Rules.coverage": (sr.Rules(RULES).coverage, {"tree": TREE, "strict": True}),
    "Rules.with_axes": (sr.Rules(RULES).with_axes, {"axes": {"tp": ("kv", "rep")}}),
    "LogicalRules.with_axes": (sr.LogicalRules(LOGICAL).with_axes, {"axes": {"tp": ("kv", "rep")}}),
    "Rules.first_match": (sr.Rules(RULES).first_match, {"path": "w"}),
    "Rules.match": (sr.Rules(RULES).match, {"tree": TREE, "strict": True}),
    "Traffic.by_axes": (PLAN.traffic(tokens=8).by_axes, {}),
    "compile": (lambda step, args, **named: sr.compile(step, *args, **named), {
        "step": DOUBLED, "args": (np.ones(3),), "on": None, "effort": "full", "timeout": 60}),
    "compiling": (sr.compiling, {}),
    "audit": (sr.audit, {"tree": TREE, "plan": PLAN}),
    "fsdp": (sr.fsdp, {"axis": "fsdp", "min_bytes": 0, "min_rank": 2, "within": ("tp",)}),
    "gather": (sr.gather, {"tree": TREE}),
    "inspect": (sr.inspect, {
        "compiled": COMPILED, "inputs": (None,), "outputs": None}),
    "load": (sr.load, {
        "source": CHECKPOINT, "rules": RULES, "mesh": MESH, "tree": None, "renames": (), "dtype": None,
        "strict": True, "only": None, "missing": None, "progress": None, "max_bytes_in_flight": None}),
    "logical_axis_rules": (lambda rules: sr.logical_axis_rules(rules).__enter__(), {
        "rules": LOGICAL}),
    "logical_to_mesh": (sr.logical_to_mesh, {
        "tree": ("embed",), "rules": LOGICAL, "dialect": sr.dialects.LINEN}),
    "match_partition_rules": (sr.match_partition_rules, {
        "rules": RULES, "tree": TREE, "min_size": 0, "strict": True}),
    "named_shardings": (sr.named_shardings, {
        "tree": TREE, "rules": RULES, "mesh": SIZES, "correction": None, "names": None}),
    "patch": (lambda libraries: sr.patch(libraries), {}),
    "plan": (sr.plan, {
        "tree": TREE, "rules": RULES, "mesh": SIZES, "correction": None, "companions": (), "names": None}),
    "read_hardware": (sr.read_hardware, {"path": "tests/data/hardware.toml"}),
    "read_model": (sr.read_model, {"path": demo.MODEL, "nested": None, "max_memory": 2**30}),
    "write_manifest": (sr.write_manifest, {"tree": TREE, "path": "/dev/null"}),
    "read_rules": (sr.read_rules, {"path": demo.RULES, "dialect": None, "max_memory": 2**30}),
    "reshard": (sr.reshard, {
        "tree": TREE, "rules": RULES, "mesh": MESH, "donate": False, "dtype": None, "renames": (),
        "max_bytes_in_flight": None}),
    "resolve_mesh": (sr.resolve_mesh, {"mesh": SIZES}),
    "save": (lambda tree, path, **named: sr.save(
        tree, tempfile.mkdtemp() + "/m" if path == "m" else path, **named), {
        "tree": {"w": np.ones(4)}, "path": "m", "renames": (), "shard_bytes": 64}),
    "shard": (sr.shard, {
        "tree": TREE, "rules": RULES, "mesh": MESH, "correction": None,
        "donate": False, "dtype": None, "scalars": "place"}),
    "shard_local": (sr.shard_local, {"batch": TREE, "spec": P("tp"), "mesh": MESH}),
    "spec_for": (sr.spec_for, {
        "path": "w", "shape": (8, 8), "rules": RULES, "mesh": SIZES,
        "dtype": "float32"}),
    "stacked": (sr.stacked, {"at": "layers", "layer": None, "axis": 0, "mesh_axis": None}),
    "unpatch": (sr.unpatch, {}),
    "unstacked": (sr.unstacked, {"at": "layers", "layer": None, "axis": 0}),
    "prove": (lambda step, args, **named: sr.prove(step, *args, **named), {
        "step": DOUBLED, "args": (np.ones(3),), "on": None, "inputs": (None,), "outputs": None, "hbm": None, "large": 1,
        "budget": None, "effort": "full", "timeout": 60}),
    "ProgramTime.to_json": (sr.types.ProgramTime(3.0, 1.0, (), (), 0.0, ()).to_json, {}),
    "Timeline.to_json": (sr.types.Timeline("forward", 1, ()).to_json, {}),
    "Proof.to_json": (sr.prove(DOUBLED, np.ones(3)).to_json, {}),
    "Proof.raise_for": (sr.prove(DOUBLED, np.ones(3)).raise_for, {"level": "error"}),
    "Topology": (sr.Topology, {"name": "v5p-8", "slices": 2}),
    "verify": (sr.verify, {
        "compiled": COMPILED, "inputs": (None,),
        "outputs": None, "hbm": None, "large": 1, "budget": {"total": "1 GB"},
        "log": None}),
    "with_logical_constraint": (sr.with_logical_constraint, {
        "tree": np.ones(8), "logical_names": ("embed",), "rules": LOGICAL, "mesh": MESH,
        "fallback": sr.types.RulesFallback.NO_CONSTRAINT}),
    "with_sharding_constraint": (sr.with_sharding_constraint, {
        "tree": TREE, "rules": RULES, "mesh": MESH, "correction": None}),
}  # fmt: skip

CALLS |= {
    "Program.diff": (sr.inspect(COMPILED, (None,)).diff, {
        "other": sr.inspect(COMPILED, (None,)), "tolerance": 0.02}),
    "Program.lock": (sr.inspect(COMPILED, (None,)).lock, {"path": None}),
    "Memory.to_json": (sr.inspect(COMPILED, (None,)).memory.to_json, {}),
    "Program.to_json": (sr.inspect(COMPILED, (None,)).to_json, {}),
    "Solution.compare": (SOLUTION.compare, {"rules": RULES}),
    "solve": (sr.solve, {
        "step": STEP, "on": SIZES, "hardware": "v5p", "hbm": 10**9, "keep": (), "forbid": (),
        "remat": "choose", "time_limit": 9.0,
    }),
    "from_hf": (sr.renames.from_hf, {
        "config": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        "layout": "nnx", "scanned": False,
    }),
    "inverse": (sr.renames.inverse, {"renames": (sr.Rename("a", "b"),)}),
    "Affine": (sr.renames.Affine, {"factor": 2.0, "offset": 1.0}),
    "Affine.inverse": (sr.renames.Affine(2.0, 1.0).inverse, {}),
    "Step.explain": (STEP.explain, {"path": "w"}),
    "Step.findings": (STEP.findings, {"plan": PLAN, "large": 1}),
    "Step.largest_batch": (STEP.largest_batch, {"plan": PLAN, "hbm": 10**9}),
    "Step.memory": (STEP.memory, {"plan": PLAN}),
    "Step.time": (STEP.time, {"machine": machine_of("v5p", (), (), 1.0), "plan": PLAN}),
    "Step.to_json": (STEP.to_json, {}),
    "Step.traffic": (STEP.traffic, {"plan": PLAN}),
    "trace": (lambda step, args, on: sr.trace(step, *args, on=on), {"step": DOUBLED, "args": (np.ones(3),), "on": None}),
    "Plan.with_rules": (PLAN.with_rules, {"rules": RULES}),
    "Suggestion.compare": (sr.suggest(TREE, {"tp": 2}).compare, {"rules": RULES}),
    "Suggestion.to_python": (sr.suggest(TREE, {"tp": 2}).to_python, {}),
    "Suggestion.to_toml": (sr.suggest(TREE, {"tp": 2}).to_toml, {}),
    "suggest": (sr.suggest, {
        "model": TREE, "mesh": None, "devices": 8, "axes": ("fsdp", "tp"), "hbm": 10**9,
        "optimizer": ("float32",), "tokens": 8, "experts_per_token": None, "hardware": "v5p",
        "head_dim": 8, "dialect": sr.dialects.EFORMER, "like": RULES, "names": None, "step": None}),
}  # fmt: skip
CALLS |= {
    "Zero1": (sr.Zero1, {"axis": "dp", "dim": "first", "place": "outer", "not_with": ()}),
}

# Records that the package makes, for reading; values.
MADE_BY_US = {"Activation", "Alternative", "Buffer", "Change", "ClassChoice", "RematChoice", "Gain", "ProofRound", "SentBytes", "Solution",
              "Solution.constraints", "SolutionProof", "Collective", "Comparison", "CompileLog", "CutReason", "Reason", "Suggestion", "Coverage", "DeviceBytes", "DimensionClass",
              "Explanation", "FileError", "Finding", "Findings", "FindingsError", "Kind", "Loss", "Memory", "OutOfMemory", "Place", "Plan",
              "PlanDiff", "Program", "ProgramTime", "Proof", "Reshard", "RuleFile", "RulesFallback", "Span", "Step", "StepTime", "Timeline", "Work", "Sweep", "SweepRow", "Totals", "Traffic", "Transfer",
              "TransferRow", "Transmission", "Tried", "TriedName"}  # fmt: skip
# What needs a compiler; tests/tpu and tests/cuda call them.
NEEDS_LIBTPU = {
    "Topology.link_rate",
    "Topology.links",
    "Topology.mesh",
    "Topology.mesh_code",
    "Topology.meshes",
    "Solution.prove",
}
# Modules whose arguments are what other libraries make of them.
THEIRS = (
    "compat.eformer", "compat.flax", "compat.keras", "compat.maxtext.add_data_to_sharding",
)  # fmt: skip
# Any hashable object may be a spec; leaves may be anything where a library's are.
TAKES_ANYTHING = {"compile.args", "prove.args", "trace.args", "RuleSpec.spec"}


def public_callables() -> dict[str, list[str]]:
    """Each callable of shardrules with its parameters, as tests/data/api.txt has them."""
    found, offered = {}, api.public()
    for line in api.api().splitlines():
        match = re.fullmatch(
            r"(?:class|def|classmethod) shardrules\.(?:dialects\.|renames\.|types\.)?([^(]*)(\(.*)?",
            line,
        )
        if match is not None and not match[1].startswith(THEIRS):
            first, *parts = match[1].split(".")
            thing: Any = offered[first] if first in offered else getattr(sr, first)
            for part in parts:
                thing = getattr(thing, part)
            try:
                names = [name for name in inspect.signature(thing).parameters if name != "self"]
            except ValueError:
                names = []
            found[match[1]] = names
    return found


PUBLIC = public_callables()


def cases() -> list[tuple[str, str, Any]]:
    """(callable, parameter, value): all values where a parameter's name occurs first, then two."""
    found: list[tuple[str, str, Any]] = []
    seen: set[str] = set()
    for name, (_, arguments) in CALLS.items():
        for parameter in arguments or PUBLIC[name]:
            full = f"{name}.{parameter}"
            if full in TAKES_ANYTHING:
                continue
            values = OTHERWISE[full] if full in OTHERWISE else WRONG[parameter]
            if full not in OTHERWISE and parameter in seen:
                values = tuple({type(value): value for value in values}.values())[:2]
            if full not in OTHERWISE:
                seen.add(parameter)
            found += [(name, parameter, value) for value in values]
    return found


CASES = cases()


def test_every_public_callable_and_parameter_is_here():
    assert PUBLIC.keys() == CALLS.keys() | MADE_BY_US | NEEDS_LIBTPU
    for name, (_, arguments) in CALLS.items():
        assert name == "patch" or list(arguments) == PUBLIC[name], name


# What compiles patterns in each call, and why.
COMPILES_EACH_TIME = {
    "Rules": "the object is the user's own",
    "Rules.with_axes": "the same",
    "read_rules": "the same",
    "Plan.from_lock": "the same",
    "suggest": "it tries patterns that it writes, which nobody gave",
    "solve": "the same",
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_right_is_taken_and_its_pairs_are_compiled_once(name, monkeypatch):
    function, arguments = CALLS[name]
    if name == "patch":
        return
    function(**arguments)
    make, compiled = matcher.compile_patterns, []

    def counted(patterns, modes):
        compiled.extend(patterns)
        return make(patterns, modes)

    monkeypatch.setattr(matcher, "compile_patterns", counted)
    # Equal pairs, in which nothing is the same object as before.
    equal = {at: pickle.loads(pickle.dumps(it)) if isinstance(it, list) else it
             for at, it in arguments.items()}  # fmt: skip
    function(**equal)
    assert bool(compiled) == (name in COMPILES_EACH_TIME)


def named(case: tuple[str, str, Any]) -> str:
    return f"{case[0]}-{case[1]}-{type(case[2]).__name__}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_wrong_value_is_told_by_the_name_of_its_parameter(case):
    name, parameter, value = case
    function, arguments = CALLS[name]
    with pytest.raises((TypeError, ValueError, KeyError, re.error)) as caught:
        function(**{**arguments, parameter: value})
    message = str(caught.value)
    assert re.search(CALLED.get(parameter, parameter), message), message
    assert len(message) < 1000
    for foreign in ("incompatible", "pybind11", "_core", "has no attribute", "std::"):
        assert foreign not in message
    assert type(caught.value) is not AttributeError


TAKING_TREES: dict[str, Callable[[Any], Any]] = {
    "plan": lambda tree: sr.plan(tree, RULES, SIZES),
    "for_optimizer": PLAN.for_optimizer,
    "named_shardings": lambda tree: sr.named_shardings(tree, RULES, SIZES),
    "shard": lambda tree: sr.shard(tree, RULES, MESH),
    "with_sharding_constraint": lambda tree: sr.with_sharding_constraint(tree, RULES, MESH),
    "gather": sr.gather,
    "coverage": sr.Rules(RULES).coverage,
    "audit": lambda tree: sr.audit(tree, PLAN),
}


def message(function, *arguments):
    with pytest.raises(TypeError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("taking", TAKING_TREES)
def test_a_path_is_no_tree_of_arrays(taking):
    for path in ("ckpt", Path("ckpt"), b"ckpt"):
        told = message(TAKING_TREES[taking], path)
        assert "ckpt" in told
        assert "no tree of arrays; give a pytree of arrays" in told


def test_an_optimizer_is_no_state():
    optax = pytest.importorskip("optax")
    for optimizer in (optax.adam(1e-3), optax.chain(optax.clip(1.0), optax.sgd(0.1))):
        for function in (PLAN.for_optimizer, TAKING_TREES["plan"], sr.gather):
            assert "give the optimizer's state, jax.eval_shape(optimizer.init, params)" in message(
                function, optimizer
            )
            told = message(function, {"train": {"tx": optimizer}})
            assert "at train/tx" in told
            assert "jax.eval_shape(optimizer.init, params)" in told
        told = message(PLAN.for_optimizer, optimizer.init)
        assert "(a function), which is no tree of arrays; give what it returns" in told
        state = jax.eval_shape(optimizer.init, TREE)
        assert len(PLAN.for_optimizer(state)) == len(jax.tree.leaves(state))


def test_a_model_is_told_what_to_give_instead():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    def is_leaf(node):
        return jax.tree_util.all_leaves([node])

    model = linen.Dense(3)
    told = message(TAKING_TREES["plan"], model)
    assert "give its parameters, jax.eval_shape(model.init, key, inputs)['params']" in told
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    if is_leaf(layer):  # flax before 0.12
        assert "give its state, nnx.state(model)" in message(TAKING_TREES["plan"], layer)
    else:
        assert sr.plan(layer, [(".*", ())], SIZES).paths == ["bias/value", "kernel/value"]


MAY_BE_TREES: Any = ({}, [], (), None, 3, np.ones(()), {"a": None}, {"step": 3})


@pytest.mark.parametrize("taking", ["for_optimizer", "named_shardings", "coverage"])
@pytest.mark.parametrize("tree", MAY_BE_TREES, ids=str)
def test_what_may_be_a_tree_is_taken(taking, tree):
    if taking == "for_optimizer" and tree is None:
        assert "state is None; give the optimizer's state" in message(TAKING_TREES[taking], tree)
        return
    TAKING_TREES[taking](tree) if taking != "named_shardings" else sr.named_shardings(
        tree, [(".*", ())], SIZES
    )


@pytest.mark.parametrize("tree", MAY_BE_TREES, ids=str)
def test_a_plan_of_numbers_or_of_none_is_no_plan(tree):
    has_arrays = isinstance(tree, np.ndarray) or tree in ({}, [], ())
    if has_arrays:
        assert len(TAKING_TREES["plan"](tree)) == (tree is MAY_BE_TREES[5])
    else:
        assert "no leaf" in message(TAKING_TREES["plan"], tree)


def test_a_tree_of_shapes_is_no_tree_of_arrays():
    shapes = {"layers": [{"w": (8, 8)}]}
    told = message(TAKING_TREES["plan"], shapes)
    for part in ("tree", "'layers/0/w/0'", "a tuple of them is no shape", "jax.eval_shape"):
        assert part in told
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes, is_leaf=lambda node: isinstance(node, tuple))  # fmt: skip
    assert len(TAKING_TREES["plan"](abstract)) == 1


@pytest.mark.parametrize("taking", TAKING_TREES)
@pytest.mark.parametrize(
    ("tree", "where", "instead"),
    [
        ({"model": {"path": "ckpt"}}, "'ckpt' (a str) at model/path", "read_model"),
        ({"a": [None, {"f": print}]}, "at a/1/f", "pytree of arrays"),
        ([[THING], "x"], "(a Thing) at 0/0", "pytree of arrays"),
    ],
    ids=["text", "function", "object"],
)
def test_what_has_no_array_in_it_is_no_tree_of_arrays(taking, tree, where, instead):
    told = message(TAKING_TREES[taking], tree)
    assert where in told
    assert "no array anywhere" in told
    assert instead in told


def test_what_stands_beside_arrays_is_taken_as_jax_takes_it():
    optax = pytest.importorskip("optax")
    tree = {"f": print, "name": "x", "at": Path("x"), "opt": optax.adam(1e-3), "w": np.ones((8, 8))}
    assert len(sr.plan(tree, [("w", "tp"), (".*", ())], SIZES)) == 6
    found = sr.named_shardings(tree, RULES, SIZES)
    assert jax.tree.structure(found) == jax.tree.structure(tree)


class TrainState(NamedTuple):
    """It can be made and stepped, as an optimizer can, but is a node of arrays."""

    params: Any
    step: Any

    @classmethod
    def init(cls, params):
        return cls(params, 0)

    def update(self, grads):
        return self


@pytest.mark.parametrize("taking", TAKING_TREES)
def test_a_named_tuple_with_init_and_update_is_a_tree(taking):
    """It was refused as an optimizer."""
    for tree in (TrainState(TREE, np.int32(1)), {"opt": TrainState.init(TREE)}):
        TAKING_TREES[taking](tree)


def test_what_is_deep_inside_of_registered_nodes_is_told():
    equinox = pytest.importorskip("equinox")

    class Holder(equinox.Module):
        inner: Any

    optax = pytest.importorskip("optax")
    for tree, where in (
        (Holder([Holder("ckpt")]), "inner/0/inner"),
        (Holder(optax.adam(1)), "inner"),
    ):
        told = message(TAKING_TREES["named_shardings"], tree)
        assert f"at {where}, and no array anywhere" in told


def test_what_jax_has_as_a_node_is_a_tree_whatever_it_can_do():
    equinox = pytest.importorskip("equinox")

    class Trainer(equinox.Module):
        w: Any
        kind: Any

        def init(self):
            return self

        update = init

    tree = {"trainer": Trainer(np.ones((8, 8)), Thing)}
    assert sr.plan(tree, [(".*", ())], SIZES).paths[0] == "trainer/w"


def test_drop_ins_take_whatever_eformer_takes():
    assert sr.match_partition_rules(RULES, "ckpt") == P()
    assert sr.match_partition_rules(RULES, [print, None]) == [P(), None]


@pytest.mark.parametrize("size", ["b", 2**63, 10**5000, -1, 2.5, None], ids=type)
def test_a_dimension_that_is_none_is_named_with_its_path(size):
    leaf = SimpleNamespace(shape=(size, 8), dtype=np.dtype("float32"))
    with pytest.raises((TypeError, ValueError), match="^w: .*(dimension|more bytes)") as caught:
        sr.plan({"w": leaf}, RULES, SIZES)
    assert len(str(caught.value)) < 300


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def test_a_value_without_a_text_can_be_named():
    assert "Unprintable" in shown(Unprintable())
    assert len(shown(10**10_000)) < 100
    assert len(shown({0: "x" * 10**6})) < 120
