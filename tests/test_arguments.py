"""Every parameter of every public function, with values that it cannot be: what the error says."""

import math
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from examples import demo
from shardrules._base.text import shown
from shardrules._rules import matcher
from tests.support import api
from tests.support.files import header_file

TREE = {"w": np.ones((8, 8), np.float32)}
RULES = [("w", ("tp",))]
SIZES = {"tp": 1}
MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))
LOGICAL = [("embed", "tp")]
PLAN = sr.plan(TREE, RULES, SIZES)
ONES = np.ones(3)
COMPILED = jax.jit(lambda x: x).lower(ONES).compile()
PROGRAM = sr.inspect(COMPILED, (None,))
DOUBLED = jax.jit(lambda x: x * 2)
STEP = sr.trace(lambda params, x: params["w"].sum() * x, PLAN, np.ones(3))
CHECKPOINT = Path(tempfile.mkdtemp()) / "model.safetensors"
CHECKPOINT.write_bytes(header_file({"w": {"dtype": "U8", "shape": [8, 8], "data_offsets": [0, 64]}}, bytes(64)))
# Something whose text is far too long for a message.
HUGE = {f"layer{i}": {"kernel": np.ones(2)} for i in range(20_000)}


class Thing:
    """Of no type that anything takes."""


THING = Thing()
ODD = (3, THING, HUGE)
NOT_TEXT = (*ODD, b"x", 0, ["w"])
NOT_NAME = (*NOT_TEXT, None)
NOT_TRUTH = (*ODD[1:], "no", 2, np.ones(2), [])
NOT_SIZE = ("8", 1.5, -1, 2**64, 10**5000, THING, HUGE, False, [])
NOT_COUNT = (*NOT_SIZE, 0)
NOT_NUMBER = ("8", THING, HUGE, [], np.ones(2))
NOT_BYTES = ("8 boxes", -1, *NOT_NUMBER[1:])
NOT_RATE = (*NOT_NUMBER, None, -1.0, math.inf, math.nan)
NOT_TREE = ("ckpt", b"x", Path("ckpt"), print, Thing, THING, iter([]), {"f": print}, math)
NOT_CHOICE = (*ODD, "drp", 0, [])
NOT_FILE = (*ODD, 0, [])
NOT_LIST = (*ODD, 0, "tp", [3], [None])
NOT_MADE = (*ODD, 0, "text", [0])
NOT_PLAN = (*ODD, 0, "plan", {})
NOT_STEP = (*ODD, "step")
NOT_DTYPE = (*ODD, 0, "f23", [])
NOT_MEMORY = (*ODD, "pinned_hsot", "host", "", 0, False, b"device", ["device"], {})
NOT_DECIDERS = ("tp", 3, THING, {"w": 3}, {"v": P()}, [("w",)], {"w": {"x": P()}}, ())
NOT_PAIRS = (*ODD, "w", 0, {}, [3], ["ab"], [("w",)], [(3, "tp")], [("w", 3.5j, 1)])
NOT_RULES = (*NOT_PAIRS, P("tp"))
NOT_MESH = (*ODD, "tp=2", 0, {}, [], {"tp": 0}, {"tp": "2"}, {"tp": 2**63}, {3: 2}, {"tp": 2**24 + 1},
            {"a": 2**30, "b": 2}, {"tp": 10**5000}, {"tp": 2.0}, (2, 2))  # fmt: skip
NOT_CORRECTION = (*ODD, "drop", 0, {}, [], False)
NOT_DIALECT = (*ODD, "eformer", 0, {}, sr.Correction())
NOT_LOGICAL = (3, 0, [3], ["ab"], [("a",)], THING, "ab", [([], "tp")], sr.Rules(RULES), PLAN, {"w": P("tp")})
NOT_LOCK = (*ODD, None, 0, [], "no such file", "{}", "{" * 5000, "x" * 10**5)
NOT_NAMES = (3, "embed", THING, {"w": 3}, [3])
# By the parameter's name, or the callable's and its, what it cannot be.
WRONG: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in {
        "at link Rules.all_matches.path Rules.first_match.path spec_for.path mesh_axis layer hidden_key": NOT_TEXT,
        "name separator title": NOT_NAME,
        "pattern": (*NOT_NAME, "("),
        "base": (*NOT_NAME, r"\9"),
        "Rename.name": (*NOT_TEXT, "(?P<x>.)", "{"),
        "Rename.path": (*ODD, 0, [], "{x}", "no axis"),
        "Rename.dims": (*ODD, 0, [], "a", "a -> a -> a", "(a", "a) -> a", "a a -> a", "a -> (b a)",
                        "a -> (a b)", "a[0] -> a", ""),
        "Step.explain.path": (*NOT_TEXT, "no such leaf"),
        "Plan.explain.path": (*NOT_TEXT, "no such leaf", "x" * 10**5),
        "hardware Hardware.named.name": (*NOT_TEXT, "no such device"),
        "Topology.name": (*ODD, None, "v5q:8x8", "v5p", "v5p:3x3x3", "v5p-7", "v5e:64x64", "h100", "h100:64"),
        "donate values strict optional last_wins keeps_unknown tries_next keeps_size_one shared "
        "Correction.pad": (*NOT_TRUTH, None),
        "nested": NOT_TRUTH,
        "fallback level indivisible rank unconstrained keys "
        "precedence unmatched Dialect.scalars Dialect.min_size": (*NOT_CHOICE, None),
        "scalars": NOT_CHOICE,
        "match": (3, 0, "search", [], ["silly"], [3], THING, HUGE),
        "dtype gradients": NOT_DTYPE,
        "memory_kind": NOT_MEMORY,
        "memory_budget min_bytes min_rank devices": NOT_SIZE,
        "max_bytes_in_flight shard_bytes": ("5 parsecs", -1, None, THING, HUGE, False, []),
        "head_dim": NOT_COUNT,
        "memory_bytes link_devices torus_dimensions slices": (*NOT_COUNT, None),
        "Plan.sweep.devices": (*(size for size in NOT_SIZE if not isinstance(size, str)), "v5q:8"),
        "axis": ("0", None, 1.5, -1, 64, THING, HUGE),
        "min_size": NOT_NUMBER,
        "large hbm": NOT_BYTES,
        "memory_bytes_per_second link_bytes_per_second dcn_bytes_per_second": (*NOT_RATE, 0),
        "tolerance": (*NOT_RATE, True),
        "rtol": (*NOT_NUMBER, -1.0, math.inf, math.nan, True),
        "rehearse.args": (*ODD, "args", [ONES], (ONES, ONES), (ONES[1:],)),
        "efficiency": (*NOT_NUMBER, 0, -1, 1.5),
        "flops_per_second": (3, None, [], {}, {3: 1.0}, {"bf17": 1.0}, {"int8": 0}, {"int8": "1"}, THING),
        "file Plan.lock.path Program.lock.path Plan.to_html.path": NOT_FILE,
        "write_manifest.path save.path": (*NOT_FILE, None),
        "read_model.path read_rules.path": (*NOT_FILE, None, b"x"),
        "more": (*NOT_FILE, b"x"),
        "source": (*ODD, None, b"x", [], "no such file"),
        "lock": NOT_LOCK,
        "Program.diff.other": (*NOT_LOCK, PLAN),
        "tree state model batch": NOT_TREE,
        "save.tree": (3, "tree", {}, THING),
        "logical_to_mesh.tree": (3, "embed", THING, [THING, 3]),
        # As eformer's, they give P() to whatever has no shape; flax's take any value.
        "match_partition_rules.tree Rules.match.tree with_logical_constraint.tree": (),
        "rules": NOT_RULES,
        "Rules.rules": (*NOT_RULES, None),
        "named_shardings.rules plan.rules spec_for.rules Plan.with_rules.rules": NOT_PAIRS,
        "reshard.rules shard.rules with_sharding_constraint.rules": NOT_DECIDERS,
        "load.rules": (*NOT_DECIDERS, None),
        "logical_to_mesh.rules with_logical_constraint.rules": NOT_LOGICAL,
        "logical_axis_rules.rules": (*NOT_LOGICAL, iter(())),
        "LogicalRules.rules": (3, 0, "w", None, [3], ["ab"], [("a",)], THING, [([], "tp")],
                               [("w", 3)], [("w", [3])], P("w")),
        "mesh": NOT_MESH,
        "Plan.on_mesh.mesh": (*NOT_MESH, None),
        "meshes": (3, 0, THING, [3], [{}], [{"tp": 0}], [None], SIZES),
        "spec": ("tp", 3, None, THING, {"w": 3}, {"v": P()}, RULES, P("no axis"), P(None, None, None)),
        "shape": (3, 0, "ab", (2.5,), (-1,), (2**63,), (None,), ("8",), THING, {8: 8}, (10**5000,)),
        "correction": NOT_CORRECTION,
        "Dialect.correction LogicalDialect.correction": (*NOT_CORRECTION, None),
        "dialect": NOT_DIALECT,
        "LogicalRules.dialect logical_to_mesh.dialect": (*NOT_DIALECT, sr.dialects.EFORMER),
        "companions": (*NOT_LIST, sr.LORA[0]),
        "lines": (*ODD, 0, "12", [0], [2.5], [None]),
        "renames replicated sources optional_axes data_axes": NOT_LIST,
        "axes": (*NOT_LIST, [], ["tp", "tp"]),
        "zero1": (*ODD, 0, [], "no such axis"),
        "Rules.with_axes.axes LogicalRules.with_axes.axes": (
            3, None, "tp", THING, {"no axis": "a"}, {3: "a"}, {"tp": 3}, {"tp": [3]}),
        "fsdp.axis": (*ODD, None, [], [3], ("tp", "tp")),
        "within": (3, 0, [3], THING, {}, {"tp"}, ["tp", "tp"]),
        "optimizer": (*ODD, "adam", 0, ["adam"], [None], [[]]),
        "levels": (3, 0, [], "error", THING, {"dead": "fatal"}, {"silly": "error"}, {"dead": THING}),
        "units": (*ODD, 0, "12", [0], [-1], [2**63], ["8"], [1.5], [True]),
        "dims": (*ODD, "tp", [-1], [1.5], [THING], [..., 0], [[]], [True]),
        "resize": (3, 0, "in", [], THING, {"in": "8"}, {"in": -1}, {"no dimension": 8}, {3: 8}),
        "sizes": (3, 0, "in", [], THING, {"in": 0}, {"in": "8"}, {"in": (8, 0)}, {"no axis": 8}),
        "names": NOT_NAMES,
        "logical_names": (3, "embed", THING),
        "libraries": (3, None, "keras", THING, []),
        "only": (*ODD, "(", "no such path"),
        "missing": ("w", THING, ["w"], {"w": 0}),
        "progress": (*ODD, 0, "bar", []),
        "budget": (3, 0, [], "fsdp=1GB", THING, {3: 1}, {"no such axis": 1}, {"total": "much"},
                   {"total": -1}, {"total": THING}, {"total": True}),
        "sections": (*NOT_LIST, [PLAN], [None]),
        "time": (*NOT_MADE, []),
        "other plan": (*NOT_PLAN, None),
        "step": (*NOT_STEP, None, PLAN),
        "on": (*ODD, "v5q:8x8x8", {"tp": 0}, PLAN),
        "compiled": (*NOT_STEP, None, jax.jit(print)),
        "inputs": (*ODD, 0, None, "w", {}, PLAN, (), (3,), (None, None), ("w",), ([P()],)),
        "step_on": (*ODD, "step_on", None),
        "sweep.on": (*(size for size in NOT_COUNT if not isinstance(size, str)), None, "v5q:8x8x8", {"tp": 0}, PLAN),
        "prove.inputs": (*ODD, 0, "w", {}, PLAN),
        "outputs": (*ODD, 0, "w", {"w": 3}, [P()], (P(), P())),
    }.items()
    for name in names.split()
}  # fmt: skip
# What an error may say instead of the parameter's name.
CALLED = {
    "rules": "specs|rule", "levels": "level", "replicated": "replicated|pattern",
    "meshes": "mesh", "path": "path|group", "other": "other|lock",
    "logical_names": "names|spec", "libraries": "librar", "tree": "tree|names", "model": "model|tree",
    "pattern": "pattern|position", "roles": "roles|position", "base": "base|group",
    "source": "source|no such file",
    "sizes": "sizes|dims", "on": "on|mesh axis|topology",
}  # fmt: skip


def saved(tree, path, **named):
    return sr.save(tree, tempfile.mkdtemp() + "/m" if path == "m" else path, **named)


# Each public callable with the arguments that it must have, and those that others are wrong beside.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Companion": (sr.Companion, {"pattern": "a", "base": "b", "dims": (0,)}),
    "Correction": (sr.Correction, {}),
    "Dialect": (sr.dialects.Dialect, {"name": "x", "separator": "/", "correction": sr.Correction()}),
    "Findings.at_least": (PLAN.check().at_least, {"level": "error"}),
    "Findings.raise_for": (PLAN.check().raise_for, {"level": "error"}),
    "Findings.to_github": (PLAN.check().to_github, {}),
    "Hardware": (sr.Hardware, {
        "name": "x", "flops_per_second": {"bfloat16": 1.0}, "memory_bytes": 1,
        "memory_bytes_per_second": 1.0, "link": "x", "link_bytes_per_second": 1.0,
        "link_devices": 1, "dcn_bytes_per_second": 1.0}),
    "Hardware.named": (sr.Hardware.named, {"name": "v5p"}),
    "LogicalDialect": (sr.dialects.LogicalDialect, {"name": "x", "last_wins": True, "keeps_unknown": False}),
    "LogicalRules": (sr.LogicalRules, {"rules": [("w", "tp")]}),
    "LogicalRules.with_axes": (sr.LogicalRules(LOGICAL).with_axes, {"axes": {"tp": ("kv", "rep")}}),
    "Plan.bytes_per_device": (PLAN.bytes_per_device, {"optimizer": ["int8"]}),
    "Plan.check": (PLAN.check, {}),
    "Plan.diff": (PLAN.diff, {"other": PLAN}),
    "Plan.explain": (PLAN.explain, {"path": "w"}),
    "Plan.for_optimizer": (PLAN.for_optimizer, {"state": TREE}),
    "Plan.from_lock": (sr.Plan.from_lock, {"lock": PLAN.lock()}),
    "Plan.lock": (PLAN.lock, {}),
    "Plan.on_mesh": (PLAN.on_mesh, {"mesh": SIZES}),
    "Plan.sweep": (PLAN.sweep, {"devices": 4, "optimizer": ["int8"]}),
    "Plan.to_html": (PLAN.to_html, {"optimizer": ["int8"]}),
    "Plan.transfer": (PLAN.transfer, {"other": PLAN}),
    "Plan.with_rules": (PLAN.with_rules, {"rules": RULES}),
    "Program.diff": (PROGRAM.diff, {"other": PROGRAM}),
    "Program.lock": (PROGRAM.lock, {}),
    "Proof.raise_for": (sr.prove(DOUBLED, np.ones(3)).raise_for, {}),
    "Rename": (sr.Rename, {
        "name": "{layer}", "path": "{part:q|k}", "dims": "(part out) in -> layer in out",
        "sizes": {"out": (8, 4)}}),
    "RuleSpec": (sr.RuleSpec, {"spec": "tp"}),
    "Rules": (sr.Rules, {"rules": RULES}),
    "Rules.all_matches": (sr.Rules(RULES).all_matches, {"path": "w"}),
    "Rules.coverage": (sr.Rules(RULES).coverage, {"tree": TREE}),
    "Rules.first_match": (sr.Rules(RULES).first_match, {"path": "w"}),
    "Rules.match": (sr.Rules(RULES).match, {"tree": TREE}),
    "Rules.with_axes": (sr.Rules(RULES).with_axes, {"axes": {"tp": ("kv", "rep")}}),
    "Step.explain": (STEP.explain, {"path": "w"}),
    "Topology": (sr.Topology, {"name": "v5p:2x2x1"}),
    "audit": (sr.audit, {"tree": TREE, "plan": PLAN.on_mesh(MESH)}),
    "fsdp": (sr.fsdp, {"axis": "fsdp"}),
    "gather": (sr.gather, {"tree": TREE}),
    "inspect": (sr.inspect, {"compiled": COMPILED, "inputs": (None,)}),
    "load": (sr.load, {"source": CHECKPOINT, "rules": RULES, "mesh": MESH}),
    "logical_axis_rules": (lambda rules: sr.logical_axis_rules(rules).__enter__(), {"rules": LOGICAL}),
    "logical_to_mesh": (sr.logical_to_mesh, {"tree": ("embed",), "rules": LOGICAL}),
    "match_partition_rules": (sr.match_partition_rules, {"rules": RULES, "tree": TREE}),
    "named_shardings": (sr.named_shardings, {"tree": TREE, "rules": RULES, "mesh": SIZES}),
    "patch": (lambda libraries: sr.patch(libraries), {}),
    "plan": (sr.plan, {"tree": TREE, "rules": RULES, "mesh": SIZES}),
    "sweep": (lambda step_on, **named: sr.sweep(step_on, **named), {"step_on": lambda mesh: (DOUBLED, (ONES,)), "on": SIZES}),
    "rehearse": (lambda step_on, mesh, **named: sr.rehearse(step_on, mesh, **named), {"step_on": lambda mesh: (DOUBLED, (ONES,)), "mesh": SIZES}),
    "prove": (lambda args=(ONES,), **named: sr.prove(named.pop("step"), *args, **named), {"step": DOUBLED}),
    "read_model": (sr.read_model, {"path": demo.MODEL}),
    "read_rules": (lambda path, more=demo.RULES, **named: sr.read_rules(path, more, **named), {"path": demo.RULES}),
    "reshard": (sr.reshard, {"tree": TREE, "rules": RULES, "mesh": MESH}),
    "resolve_mesh": (sr.resolve_mesh, {"mesh": SIZES}),
    "save": (saved, {"tree": {"w": np.ones(4)}, "path": "m"}),
    "shard": (sr.shard, {"tree": TREE, "rules": RULES, "mesh": MESH}),
    "shard_local": (sr.shard_local, {"batch": TREE, "spec": P("tp"), "mesh": MESH}),
    "solve": (sr.solve, {"step": STEP, "on": SIZES, "hardware": "v5p"}),
    "spec_for": (sr.spec_for, {"path": "w", "shape": (8, 8), "rules": RULES, "mesh": SIZES}),
    "stacked": (sr.stacked, {"at": "layers"}),
    "suggest": (sr.suggest, {"model": TREE, "devices": 8, "dialect": sr.dialects.EFORMER}),
    "trace": (lambda args=(ONES,), **named: sr.trace(named.pop("step"), *args, **named), {"step": DOUBLED}),
    "verify": (sr.verify, {"compiled": COMPILED, "inputs": (None,)}),
    "with_logical_constraint": (sr.with_logical_constraint, {
        "tree": np.ones(8), "logical_names": ("embed",), "rules": LOGICAL, "mesh": MESH}),
    "with_sharding_constraint": (sr.with_sharding_constraint, {"tree": TREE, "rules": RULES, "mesh": MESH}),
    "write_manifest": (sr.write_manifest, {"tree": TREE, "path": "/dev/null"}),
}  # fmt: skip
# Values and records that the package makes, for reading; and errors.
MADE_BY_US = {
    *api.public_names("shardrules.types"),
    "FileError",
    "FindingsError",
    "OutOfMemory",
    "Plan",
    "Solution.constraints",
}
# What needs a compiler; tests/tpu and tests/cuda call them.
NEEDS_LIBTPU = {*(f"Topology.{name}" for name in ("links", "mesh", "meshes"))}  # fmt: skip
# Any hashable object may be a spec; leaves may be anything where a library's are.
TAKES_ANYTHING = {"prove.args", "sweep.choices", "trace.args", "RuleSpec.spec"}
PUBLIC = api.callables()


def cases() -> list[tuple[str, str, Any]]:
    """(callable, parameter, value): all values where a parameter's name occurs first, then two."""
    found: list[tuple[str, str, Any]] = []
    seen: set[str] = set()
    for name in CALLS:
        for parameter in PUBLIC[name]:
            full = f"{name}.{parameter}"
            if full in TAKES_ANYTHING:
                continue
            row = full if full in WRONG else parameter
            values = WRONG[row]
            if row in seen:
                values = tuple({type(value): value for value in values}.values())[:2]
            seen.add(row)
            found += [(name, parameter, value) for value in values]
    assert seen == WRONG.keys(), seen ^ WRONG.keys()
    return found


CASES = cases()


def test_every_public_callable_is_here():
    assert PUBLIC.keys() - MADE_BY_US == CALLS.keys() | NEEDS_LIBTPU


# What compiles patterns in each call, and why.
COMPILES_EACH_TIME = {
    "Rules": "the object is the user's own",
    "Rules.with_axes": "the same",
    "read_rules": "the same",
    "Plan.from_lock": "the same",
    "suggest": "it tries patterns that it writes, which nobody gave",
    "solve": "the same",
}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"patch"}))
def test_what_is_right_is_taken_and_its_pairs_are_compiled_once(name, monkeypatch):
    function, arguments = CALLS[name]
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
    "audit": lambda tree: sr.audit(tree, PLAN.on_mesh(MESH)),
}
taking_trees = pytest.mark.parametrize("taking", TAKING_TREES)


def message(function, *arguments):
    with pytest.raises(TypeError) as caught:
        function(*arguments)
    return str(caught.value)


def holder(tree):
    equinox = pytest.importorskip("equinox")

    class Holder(equinox.Module):
        inner: Any

    return Holder(tree)


def adam():
    return pytest.importorskip("optax").adam(1e-3)


STATE_OF = "give the optimizer's state, jax.eval_shape(optimizer.init, params)"
PATH = ("ckpt", "no tree of arrays; give a pytree of arrays")
NO_TREES: dict[str, tuple[Any, ...]] = {
    "text": (lambda: "ckpt", *PATH),
    "path": (lambda: Path("ckpt"), *PATH),
    "text in a dict": (
        lambda: {"model": {"path": "ckpt"}}, "'ckpt' (a str) at model/path", "no array anywhere", "read_model"),
    "function": (lambda: {"a": [None, {"f": print}]}, "at a/1/f", "no array anywhere", "pytree of arrays"),
    "object": (lambda: [[THING], "x"], "(a Thing) at 0/0", "no array anywhere", "pytree of arrays"),
    "text in nodes": (lambda: holder([holder("ckpt")]), "at inner/0/inner, and no array anywhere"),
    "optimizer": (adam, STATE_OF),
    "optimizer in a node": (lambda: holder(adam()), "at inner, and no array anywhere"),
    "optimizer in a dict": (
        lambda: {"train": {"tx": adam()}}, "at train/tx", "jax.eval_shape(optimizer.init, params)"),
    "function of an optimizer": (
        lambda: adam().init, "(a function), which is no tree of arrays; give what it returns"),
    "linen module": (
        lambda: pytest.importorskip("flax.linen").Dense(3),
        "give its parameters, jax.eval_shape(model.init, key, inputs)['params']"),
}  # fmt: skip


@taking_trees
@pytest.mark.parametrize("kind", NO_TREES)
def test_what_is_no_tree_of_arrays_is_told_what_to_give(taking, kind):
    make, *parts = NO_TREES[kind]
    told = message(TAKING_TREES[taking], make())
    assert [part for part in parts if part not in told] == [], told


# How many leaves a plan of it has; None: it is no plan.
MAY_BE_TREES: Any = [
    ({}, 0),
    ([], 0),
    ((), 0),
    (np.ones(()), 1),
    (None, None),
    (3, None),
    ({"a": None}, None),
    ({"step": 3}, None),
]


@pytest.mark.parametrize(("tree", "leaves"), MAY_BE_TREES, ids=str)
def test_what_may_be_a_tree_is_taken_but_a_plan_of_no_array_is_no_plan(tree, leaves):
    sr.named_shardings(tree, [(".*", ())], SIZES)
    TAKING_TREES["coverage"](tree)
    if tree is None:
        assert "state is None; give the optimizer's state" in message(PLAN.for_optimizer, tree)
    else:
        PLAN.for_optimizer(tree)
    if leaves is None:
        assert "no leaf" in message(TAKING_TREES["plan"], tree)
    else:
        assert len(TAKING_TREES["plan"](tree)) == leaves


def test_what_stands_beside_arrays_is_taken_as_jax_takes_it():
    tree = {"f": print, "name": "x", "at": Path("x"), "opt": adam(), "w": np.ones((8, 8))}
    assert len(sr.plan(tree, [("w", "tp"), (".*", ())], SIZES)) == 6
    assert jax.tree.structure(sr.named_shardings(tree, RULES, SIZES)) == jax.tree.structure(tree)


class TrainState(NamedTuple):
    """It can be made and stepped, as an optimizer can, but is a node of arrays."""

    params: Any
    step: Any

    @classmethod
    def init(cls, params):
        return cls(params, 0)

    def update(self, grads):
        return self


def trainer():
    equinox = pytest.importorskip("equinox")
    methods = {"__annotations__": {"w": Any}, "init": lambda self: self, "update": lambda self: self}
    return type("Trainer", (equinox.Module,), methods)(TREE["w"])


@taking_trees
def test_a_node_with_init_and_update_is_a_tree(taking):
    """It was refused as an optimizer."""
    for tree in (TrainState(TREE, np.int32(1)), {"opt": TrainState.init(TREE)}, trainer()):
        TAKING_TREES[taking](tree)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def test_a_value_without_a_text_can_be_named():
    assert "Unprintable" in shown(Unprintable())
    assert len(shown(10**10_000)) < 100
    assert len(shown({0: "x" * 10**6})) < 120
