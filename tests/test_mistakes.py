"""What users do wrong, and what they are told: what they gave, what is expected, and the line to write."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.command_line import invoke

SHAPE = jax.ShapeDtypeStruct
TREE = {
    "layers": {"0": {"wq": {"kernel": SHAPE((512, 512), "bfloat16")}, "norm": SHAPE((512,), "float32")}},
    "embed": SHAPE((1024, 512), "bfloat16"),
}  # fmt: skip
ARRAYS = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), TREE)
RULES = [("wq/kernel", ("fsdp", "tp")), ("embed", ("tp", "fsdp")), ("norm", ())]
SIZES = {"fsdp": 2, "tp": 4}
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
PLAN = sr.plan(TREE, RULES, SIZES)
PREFIXED = sr.plan({"params": TREE}, RULES, SIZES)
STATE = {"mu": {"x": SHAPE((512, 512), "float32")}}
X = SHAPE((8, 512), "bfloat16")
NARROW = SHAPE((8, 100), "bfloat16")
SLICE = sr.Topology("v5p:2x2x2")
V5P = sr.Hardware.named("v5p")


def loss(params, x):
    layer = params["layers"]["0"]
    return jnp.sum((x @ layer["wq"]["kernel"]) * layer["norm"].astype("bfloat16"))


def train(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda leaf, grad: leaf - grad.astype(leaf.dtype), params, grads)


STEP = sr.trace(train, PLAN, X)
OTHER = sr.plan({"w": SHAPE((4, 4), "float32")}, [("w", "tp")], {"tp": 2})
JITTED = jax.jit(train)
LOWERED = jax.jit(lambda x: x).lower(np.ones(4))
COMPILED = LOWERED.compile()


def linear():
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def boxed():
    leaf = SHAPE((8, 8), "float32")
    return {"w": pytest.importorskip("flax.linen").LogicallyPartitioned(leaf, ("embed", "mlp"))}


def saved(**changes):
    folder = CHECKPOINT / "model"
    if not folder.exists():
        sr.save({"wq": np.ones((4, 4), "float32"), "norm": np.ones(4, "float32")}, folder)
    return sr.load(**{"source": folder, "rules": [("wq", ("fsdp", "tp")), (".*", ())], "mesh": MESH} | changes)  # fmt: skip


USERS_STEP = """
import jax
import shardrules as sr

def step_on(mesh):
    plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", ("fsdp", "tp"))], mesh)
    return jax.jit(lambda params: params), (plan,), plan

def of_no_mesh(): return step_on(None)
def bare(mesh): return step_on(mesh)[0]
def flat(mesh): return step_on(mesh)[0], *step_on(mesh)[1], None
"""
USERS_MODEL = '{"params": [["layers/0/wq", [512, 512], "F32"]]}'


def command(*words, project=""):
    """Runs a command beside a user's files, and raises what it says."""
    files = {
        "users_step.py": USERS_STEP,
        "model.json": USERS_MODEL,
        "own.toml": 'rules = [["w", ["fsdp"]]]',
        "shardrules.toml": project,
    }
    for name, text in files.items():
        if text:
            Path(name).write_text(text)
    done = invoke(*words)
    assert done.exit_code == 2
    raise RuntimeError(done.stderr)


def step_command(function, *words):
    command("step", function, "--mesh", "fsdp=2,tp=4", *words)


def step_on(mesh, batch=8):
    plan = sr.plan({"w": SHAPE((8, 8), "float32")}, [("w", ("fsdp", "tp"))], mesh)
    return jax.jit(lambda params: params), (plan,), plan


def sharded():
    plan = sr.plan({"w": SHAPE((4, 4), "float32")}, [("w", ("fsdp",))], MESH)
    return sr.shard({"w": np.ones((4, 4), "float32")}, plan), plan


def solution():
    return sr.solve(STEP, SIZES, hardware="v5p")


# What is wrong: the call, and the parts of its message, in any order: what was given, what is expected, what to write.
MISTAKES = {
    "a function as tree": (lambda: sr.plan(train, RULES, SIZES), "<function train", "jax.eval_shape(function, *arguments)"),
    "a class as tree": (lambda: sr.plan(type(linear()), RULES, SIZES), "Linear", "nnx.state(model)"),
    "shapes as tree": (lambda: sr.plan({"w": (8, 8)}, RULES, SIZES), "'w/0'", "a tuple of them is no shape", "jax.eval_shape"),
    "None as tree": (lambda: sr.plan({"w": None}, RULES, SIZES), "None alone", "jax.eval_shape"),
    "a dict of rules": (lambda: sr.plan(TREE, dict(RULES), SIZES), "not dict", "(pattern, spec) pairs", "list(rules.items())"),
    "a text as rules": (lambda: sr.plan(TREE, "fsdp,tp", SIZES), "'fsdp,tp'", "(pattern, spec) pairs"),
    "a tuple as mesh": (lambda: sr.plan(TREE, RULES, (2, 4)), "(2, 4)", "{'dp': 8, 'tp': 4}"),
    "a text as mesh": (lambda: sr.plan(TREE, RULES, "fsdp=2,tp=4"), "'fsdp=2,tp=4'", "{'dp': 8, 'tp': 4}"),
    "no mesh": (lambda: sr.plan(TREE, RULES), "no mesh", "pass mesh="),
    "devices as mesh": (lambda: sr.plan(TREE, RULES, jax.devices()), "a list", "jax.sharding.Mesh"),
    "a text as correction": (lambda: sr.plan(TREE, sr.Rules(RULES, correction="drop"), SIZES), "'drop'", "Correction(indivisible='error')"),
    "a name of companions": (lambda: sr.plan(TREE, RULES, SIZES, companions="layers"), "'layers'", "write shardrules.LORA, or [shardrules.stacked('layers')]"),
    "rules before the tree": (lambda: sr.plan(RULES, TREE, SIZES), "rules, tree, mesh", "write plan(tree, rules, mesh)"),
    "boxes with pairs": (lambda: sr.plan(boxed(), [("embed", "fsdp")], SIZES), "'embed'", "Give shardrules.LogicalRules(rules)"),
    "names for no names": (lambda: sr.plan(TREE, sr.LogicalRules([("embed", "fsdp")]), SIZES).check().raise_for("info"), "names", "Give names="),
    "a name of a dialect": (lambda: sr.Rules(RULES, "eformer"), "'eformer'", "shardrules.dialects.EASYLM"),
    "a part of no path": (lambda: PLAN.explain("kernell"), "'kernell'", "near it: layers/0/wq/kernel"),
    "a path of JAX": (lambda: PLAN.explain("['layers']['0']['wq']['kernal']"), "kernal", "near it: layers/0/wq/kernel"),
    "the state of another tree": (lambda: PREFIXED.for_optimizer(STATE), "'mu/x'", "'params/layers/0/wq/kernel'", "plan the tree that the optimizer was initialized with"),
    "a level": (lambda: PLAN.check(levels={"dead": "warn"}), "'dead' is 'warn'", "'warning'"),
    "a kind": (lambda: PLAN.check(levels={"deadd": "error"}), "'deadd'", "'dead'"),
    "one replicated": (lambda: PLAN.check(replicated="norm"), "'norm'", "sequence of patterns", "write ['norm']"),
    "bytes with another unit": (lambda: PLAN.check(large="16MBs"), "'16MBs'", "write it as 96GB"),
    "a head of no size": (lambda: PLAN.check(head_dim=0), "head_dim is 0", "an integer from 1"),
    "a level to raise for": (lambda: PLAN.check().raise_for("warn"), "'warn'", "'warning'"),
    "the wrong memory": (lambda: PLAN.check(hbm=95).raise_for(), "a device has 95 B", "take a mesh of more devices"),
    "an optimizer's name": (lambda: PLAN.bytes_per_device(optimizer="adamw"), "'adamw'", "('float32', 'float32')", "plan.for_optimizer(state)"),
    "a short dtype": (lambda: PLAN.bytes_per_device(gradients="bf16"), "'bf16'", "did you mean 'bfloat16'?"),
    "a file for to_html": (lambda: PLAN.to_html(3), "3 (an int)", "the path of a file"),
    "no lock": (lambda: sr.Plan.from_lock("no.lock"), "'no.lock'", "No such file", "check the name"),
    "no companion": (lambda: sr.plan(TREE, RULES, SIZES, companions=[sr.stacked("layrs")]).check().raise_for("warning"), "layrs", "finds no leaf", "correct its pattern"),
    "a policy": (lambda: sr.Correction(indivisible="drp"), "'drp'", "'drop'"),
    "shapes for shard": (lambda: sr.shard(TREE, RULES, MESH), "ShapeDtypeStruct", "jax.jit(init, out_shardings=plan.shardings())"),
    "text for shard": (lambda: sr.shard({"a": {"w": "text"}, "n": 3}, RULES, MESH), "leaf ['a']['w'] is 'text' (a str)", "take it out of the tree"),
    "a flag alone": (lambda: sr.shard({"w": True}, RULES, MESH), "leaf ['w'] is True", "only arrays and numbers can be placed"),
    "shapes for gather": (lambda: sr.gather(TREE), "ShapeDtypeStruct", "give the arrays themselves"),
    "sizes for shard": (lambda: sr.shard(ARRAYS, RULES, SIZES), "AbstractMesh('fsdp': 2, 'tp': 4", ".reshape(2, 4), ('fsdp', 'tp'))"),
    "rules before arrays": (lambda: sr.shard(RULES, ARRAYS, MESH), "rules, tree, mesh", "write shard(tree, rules, mesh)"),
    "tree before rules": (lambda: sr.match_partition_rules(TREE, RULES), "tree, rules", "write match_partition_rules(rules, tree)"),
    "mesh before rules": (lambda: sr.named_shardings(ARRAYS, MESH, RULES), "tree, mesh, rules", "write named_shardings(tree, rules, mesh)"),
    "rules before shape": (lambda: sr.spec_for("wq/kernel", RULES, (512, 512), SIZES), "path, rules, shape, mesh", "write spec_for(path, shape, rules, mesh)"),
    "no compiled function": (lambda: sr.verify(JITTED, (PLAN,)), "(a PjitFunction)", "jax.jit(f).lower(...).compile()"),
    "a plan alone": (lambda: sr.verify(COMPILED, PLAN), "inputs is one Plan", "such as (plan,)"),
    "plan before arrays": (lambda: sr.audit(PLAN, ARRAYS), "plan, tree", "write audit(tree, plan)"),
    "one logical name": (lambda: sr.logical_to_mesh("embed", [("embed", "fsdp")]), "'embed'", "('embed', None)"),
    "plan before the tree": (lambda: sr.reshard(PLAN, ARRAYS), "rules, tree", "write reshard(tree, rules)"),
    "a misspelt slice": (lambda: sr.Topology("v5pp:8x8x8"), "'v5pp'", "did you mean 'v5p'"),
    "no shape": (lambda: sr.Topology("v5p"), "'v5p'", "'v5p:4x4x4'"),
    "commas": (lambda: sr.Topology("v5p:8,8,8"), "'v5p:8,8,8'", "'v5p:4x4x4'"),
    "two dimensions": (lambda: sr.Topology("v5p:8x8"), "'v5p:8x8'", "3 dimensions", "'v5p:4x4x4'"),
    "no chips": (lambda: sr.Topology("v5p:0x8x8"), "'v5p:0x8x8'", "'v5p:4x4x4'"),
    "a slice's name in the cloud": (lambda: sr.Topology("v5p-8"), "'v5p-8'", "give the kind and its chips along each of 3 dimensions, such as 'v5p:4x4x4'"),
    "a row of chips": (lambda: sr.Topology("v5e:1x8"), "'v5e:1x8'", "a host has 2x2 chips", "even numbers"),
    "a torus of GPUs": (lambda: sr.Topology("h100:8x8x8"), "'h100:8x8x8'", "'h100:8x16'"),
    "a topology as mesh": (lambda: sr.plan(TREE, RULES, SLICE), "(a Topology)", "has no axes", ".mesh(fsdp=8)"),
    "a slice as mesh": (lambda: sr.plan(TREE, RULES, "v5p:2x2x2"), "'v5p:2x2x2'", ".mesh(fsdp=64, tp=8)"),
    "another product": (lambda: SLICE.mesh(fsdp=4, tp=4), "16 devices", "has 8", "product is 8, as Topology.meshes(('fsdp', 'tp'))"),
    "no axes": (lambda: SLICE.mesh(), "without axes", "{'fsdp': 8, 'tp': 4}"),
    "axes as text": (lambda: SLICE.mesh("fsdp=2,tp=4"), "'fsdp=2,tp=4'", "{'fsdp': 64, 'tp': 8}"),
    "the rest": (lambda: SLICE.mesh(fsdp=-1, tp=4), "'fsdp' is -1", "from 1"),
    "sizes for meshes": (lambda: SLICE.meshes(SIZES), "(a dict)", "sequence of strings"),
    "no devices": (lambda: sr.prove(JITTED, PLAN, X), "a mesh without devices", "on=shardrules.Topology('v5p:8x8x8')"),
    "a wrong name for on": (lambda: sr.prove(JITTED, PLAN, X, on="v5q:2x2x2"), "did you mean 'v5e' or 'v5p'?", "give a name such as 'v5p:8x8x8'"),
    "a topology as argument": (lambda: sr.prove(JITTED, PLAN, X, SLICE), "argument 2", "(a Topology)", "on=..."),
    "arguments in a tuple": (lambda: sr.prove(JITTED, (PLAN, X), on=SLICE), "argument 0", "a Plan in a tuple", "prove(step, plan, batch)"),
    "no axes for a slice": (lambda: sr.prove(JITTED, TREE, X, on=SLICE), "meshes of the arguments are none", "on=topology.mesh(fsdp=64, tp=8)"),
    "its result": (lambda: sr.prove(3.0, PLAN, X, on=SLICE), "3.0 (a float)", "give the function"),
    "compiled before": (lambda: sr.prove(COMPILED, np.ones(4), on=SLICE), "(a Compiled)", "what jax.jit makes of it"),
    "the name of a step": (lambda: sr.prove("train:step_on", PLAN, X), "'train:step_on'", "give the function"),
    "plan before step": (lambda: sr.prove(PLAN, JITTED, X), "(a Plan)", "the step comes first"),
    "inspected before it is compiled": (lambda: sr.inspect(JITTED, (None,)), "(a PjitFunction)", "jax.jit(f).lower(...).compile()"),
    "traced rules": (lambda: sr.trace(train, RULES, X), "argument 0", "which are rules", "shardrules.plan(tree, rules, mesh)"),
    "traced twice": (lambda: sr.trace(STEP, PLAN, X), "(a Step)", "give the function"),
    "traced without x": (lambda: sr.trace(train, PLAN), "missing 1 required positional argument: 'x'", "0: the tree of a plan, ['embed'] bfloat16[1024, 512]"),
    "traced a shape": (lambda: sr.trace(train, PLAN, (8, 512)), "'tuple'", "1: [0] 8, [1] 512"),
    "traced too narrow": (lambda: sr.trace(train, PLAN, NARROW), "(100,)", "(512,)", "1: bfloat16[8, 100]"),
    "traced a value": (lambda: sr.trace(lambda p, x: int(x.sum()), PLAN, X), "Abstract tracer value", "1: bfloat16[8, 512]"),
    "traced on sizes": (lambda: sr.trace(train, PLAN, X, on="fsdp=2"), "'fsdp=2'", "give a name such as 'v5p:8x8x8'"),
    "an argument's path": (lambda: STEP.explain("embd"), "'embd'", "near it: inputs/0/embed"),
    "a sweep of a slice": (lambda: PLAN.sweep(devices="v5p:8x8"), "'v5p:8x8'", "'v5p:4x4x4'"),
    "devices as text": (lambda: PLAN.sweep(devices="512"), "'512'", "'v5p:8x8x8'"),
    "a misspelt axis to sweep": (lambda: PLAN.sweep(devices=8, axes=["fsdp", "ttp"]), "'ttp'", "did you mean 'tp'"),
    "a file to save": (lambda: sr.save(ARRAYS, CHECKPOINT / "x.safetensors"), "x.safetensors", "a directory of files", "write 'x'"),
    "shapes to save": (lambda: sr.save(TREE, CHECKPOINT / "y"), "embed is a ShapeDtypeStruct", "jax.jit(init, out_shardings=...)"),
    "path before tree": (lambda: sr.save("y", ARRAYS), "path, tree", "write save(tree, path)"),
    "saved before": (lambda: (saved(), sr.save(ARRAYS, CHECKPOINT / "model")), "model exists", "save elsewhere"),
    "a tree to load": (lambda: sr.load(ARRAYS, RULES, MESH), "(a dict)", "the path of a checkpoint"),
    "another name": (lambda: saved(tree={"wk": SHAPE((4, 4), "float32")}), "wk: missing", "near it: wq", "a Rename to None"),
    "another shape": (lambda: saved(tree={"wq": SHAPE((4, 8), "float32"), "norm": SHAPE((4,), "float32")}), "[4, 8]", "[4, 4]"),
    "no array to rename": (lambda: saved(renames=[sr.Rename("wk", "wq")]), "wk: this Rename finds no array", "optional=True", "near it: wq"),
    "a pair as rename": (lambda: saved(renames=[("wq", "q")]), "('wq', 'q')", "shardrules.Rename('layers.{layer}.w'"),
    "two of one name": (lambda: saved(renames=[sr.Rename("wq", "q"), sr.Rename("norm", "q")]), "'wq'", "'norm'", "rename or leave out one"),
    "integers": (lambda: saved(dtype="int8"), "'int8'", "'bfloat16'", "quantise them"),
    "an open group to rename": (lambda: sr.Rename("w{q", "q"), "name 'w{q'", "write {{"),
    "no arrow": (lambda: sr.Rename("wq", "q", "out in"), "'out in'", "'out in -> in out'"),
    "no layers": (lambda: sr.Rename("layers.0.wq", "q", "out in -> layer in out"), "'layer'", "{layer}"),
    "no such axis": (lambda: sr.Rename("wq", "q", "(h d) i -> i h d", sizes={"hd": 128}), "'hd'", "'(h d) i -> i h d'"),
    "a function as file": (lambda: sr.read_model("own:params"), "own:params", "use the object itself"),
    "path before a manifest's tree": (lambda: sr.write_manifest("model.json", TREE), "path, tree", "write write_manifest(tree, path)"),
    "a manifest of nothing": (lambda: sr.write_manifest({}, CHECKPOINT / "model.json"), "no arrays", "that of a model"),
    "a manifest of a function": (lambda: sr.write_manifest(train, CHECKPOINT / "model.json"), "<function train", "jax.eval_shape(function, *arguments)"),
    "a part of no array": (lambda: saved(only="wz"), "wz: only finds no such path", "correct the pattern"),
    "pairs of what is missing": (lambda: saved(tree={"wq": SHAPE((4, 4), "float32")}, missing={"new": "zeros"}), "new is 'zeros'", "a tree of numbers and arrays"),
    "a renamed pair to save": (lambda: sr.save(ARRAYS, CHECKPOINT / "r", renames=[("a", "b")]), "renames[0] is ('a', 'b')", "must be a Rename"),
    "resharded onto sizes": (lambda: sr.reshard({"w": jnp.ones((4, 4))}, OTHER), "AbstractMesh('tp': 2", "('tp',))"),
    "an unknown device": (lambda: sr.Hardware.named("v5"), "'v5'", "did you mean 'v5e'"),
    "a percentage": (lambda: dataclasses.replace(V5P, efficiency=55), "efficiency is 55", "above 0 and at most 1"),
    "one rate": (lambda: dataclasses.replace(V5P, flops_per_second=459e12), "459000000000000.0", "{'bfloat16': 459e12}"),
    "solved before it is traced": (lambda: sr.solve(train, SIZES, hardware="v5p"), "<function train", "as shardrules.trace gives one"),
    "a slice's name to solve": (lambda: sr.solve(STEP, "v5p:2x2x2"), "'v5p:2x2x2'", "shardrules.Topology('v5p:8x8x8')"),
    "no devices to solve": (lambda: sr.solve(STEP, SIZES), "such as 'v5p'", "on=Topology('v5p:8x8x8')"),
    "no memory to solve": (lambda: sr.solve(STEP, SIZES, hardware="v5p", hbm=2000.0), "nothing fits", "more than the 2.00 kB", "inputs/0/embed"),
    "a solution without devices": (lambda: solution().constraints().__enter__(), "of no devices", "jax.make_mesh((2, 4), ('fsdp', 'tp'))"),
    "a solution on another mesh": (lambda: solution().constraints(MESH).__enter__(), "fsdp=1,tp=1", "the solution is for fsdp=2,tp=4"),
    "CPUs by name": (lambda: sr.prove(JITTED, PLAN, X, on="cpu"), "'cpu'", "XLA for CPU takes sizes, as {'fsdp': 4, 'tp': 2}"),
    "a number of devices to prove": (lambda: sr.prove(JITTED, PLAN, X, on=8), "on is 8 (an int)", "a dict of sizes such as {'fsdp': 64, 'tp': 8}"),
    "a plan of other axes": (lambda: sr.prove(JITTED, PLAN, X, on={"data": 8}), "no axis 'fsdp'", "rename it, add it to the mesh"),
    "step_on as step": (lambda: sr.prove(step_on, SIZES), "argument 0", "a mesh: write on=", "step, arguments, outputs = step_on(mesh)"),
    "what step_on returns as step": (lambda: sr.prove(step_on(SIZES), on=SIZES), "(a tuple)", "write step, arguments, outputs = step_on(mesh), and step, *arguments, outputs=outputs"),
    "rules for outputs": (lambda: sr.prove(JITTED, PLAN, X, on=SIZES, outputs=RULES), "outputs is [('wq/kernel'", "shardrules.plan(tree, rules, mesh)"),
    "a plan of another tree for outputs": (lambda: sr.prove(JITTED, PLAN, X, on=SIZES, outputs=OTHER), "lacks the leaf embed", "plan the tree that the function returns"),
    "one plan for inputs": (lambda: sr.prove(JITTED, PLAN.abstract(), X, on=SIZES, inputs=PLAN), "inputs is one Plan", "such as (plan, None)"),
    "a budget of one text": (lambda: sr.prove(JITTED, PLAN, X, on=SIZES, budget="90GB"), "'90GB'", "{'fsdp': '25 GB', 'peak': '90 GB'}"),
    "a budget of a plan": (lambda: sr.prove(JITTED, PLAN, X, on=SIZES, budget={"device": "9GB"}), "'device'", "the axes fsdp, tp", "total or peak"),
    "gigabytes to prove": (lambda: sr.prove(JITTED, PLAN, X, on=SIZES, hbm=16), "16 bytes", "write 16e9, or '16GB'"),
    "arguments in another order": (lambda: sr.prove(JITTED, X, PLAN, on=SIZES), "0: bfloat16[8, 512]", "1: the tree of a plan"),
    "nothing planned": (lambda: sr.prove(jax.jit(lambda x: x), np.ones(8), on=SIZES).findings.raise_for("warning"), "nothing is compared", "shardrules.prove(step, plan, batch)"),
    "swept what step_on returns": (lambda: sr.sweep(step_on(SIZES), SIZES), "(a tuple)", "def step_on(mesh), which ends with return step, (plan, batch), plan"),
    "swept a step": (lambda: sr.sweep(JITTED, 8), "(a PjitFunction)", "def step_on(mesh)"),
    "devices as text for a step": (lambda: sr.sweep(step_on, "8"), "'8'", "or a number"),
    "meshes in a list": (lambda: sr.sweep(step_on, [SIZES]), "(a list)", "one mesh"),
    "one mesh of a plan": (lambda: PLAN.sweep({"fsdp": 8}), "meshes is one mesh", "write sweep([{'fsdp': 8}])"),
    "gigabytes to sweep": (lambda: sr.sweep(step_on, SIZES, hbm=16), "16 bytes", "write 16e9, or '16GB'"),
    "mesh before step_on": (lambda: sr.rehearse(SIZES, step_on), "(a dict)", "def step_on(mesh)"),
    "a slice to rehearse": (lambda: sr.rehearse(step_on, "v5p:2x2x2"), "'v5p:2x2x2'", "a dict of axis sizes such as {'dp': 8, 'tp': 4}"),
    "a number to rehearse": (lambda: sr.rehearse(step_on, 8), "8 (an int)", "a dict of axis sizes"),
    "the mesh of the pod": (lambda: sr.rehearse(step_on, {"fsdp": 64, "tp": 64}), "4,096 devices, of at most 512", "a small mesh with the same axes"),
    "a negative tolerance": (lambda: sr.rehearse(step_on, SIZES, rtol=-1), "-1", "such as 1e-5"),
    "one argument": (lambda: sr.rehearse(step_on, SIZES, args=np.ones(3)), "(an ndarray)", "as a tuple"),
    "an argument of another shape": (lambda: sr.rehearse(step_on, SIZES, args=({"w": np.ones((4, 4), "float32")},)), "float32[4, 4]", "float32[8, 8]"),
    "shapes to audit": (lambda: sr.audit(TREE, PLAN.on_mesh(MESH)).raise_for(), "abstract and on no devices", "audit the arrays themselves"),
    "another tree to audit": (lambda: sr.audit({"v": sharded()[0]["w"]}, sharded()[1]).raise_for(), "the tree lacks 1 array", "audit the tree that was planned"),
    "one axis to split": (lambda: sr.Rules(RULES).with_axes("tp"), "'tp'", "{'tp': ('kv', 'rep')}"),
    "a misspelt axis to split": (lambda: sr.Rules(RULES).with_axes({"tpp": ("kv", "rep")}), "'tpp'", "did you mean 'tp'?"),
    "sizes for a split axis": (lambda: sr.Rules(RULES).with_axes({"tp": (2, 4)}), "2 (an int)", "a string"),
    "a split axis on the old mesh": (lambda: sr.named_shardings(TREE, sr.Rules(RULES).with_axes({"tp": ("kv", "rep")}), SIZES), "no axes 'kv', 'rep'", "add them to the mesh"),
    "an axis that no logical rule has": (lambda: sr.LogicalRules([("embed", "fsdp")]).with_axes({"tensor": ("kv", "rep")}), "'tensor'", "they name fsdp"),
    "names in a text": (lambda: sr.plan({"w": X}, sr.LogicalRules([("embed", "fsdp")]), SIZES, names={"w": "embed,mlp"}).specs(), "'embed,mlp'", "('embed', None)"),
    "axes in one text": (lambda: sr.plan(TREE, [("wq", "fsdp,tp"), (".*", ())], SIZES).specs(), "'fsdp,tp'", "did you mean 'fsdp'?"),
    "a glob": (lambda: sr.Rules([("*kernel", ("fsdp",))]), "not globs", "write '.*kernel'"),
    "a moment's axis": (lambda: PLAN.for_optimizer({"mu": TREE}, zero1="data"), "'data'", "{'fsdp': 2, 'tp': 4}"),
    "a spec that no lock holds": (lambda: sr.plan(TREE, P(P.UNCONSTRAINED), SIZES).lock(), "P(UNCONSTRAINED", "a file cannot hold", "write None for UNCONSTRAINED"),
    "logical axes that no lock holds": (lambda: sr.plan({"w": X}, sr.LogicalRules([("embed", P.UNCONSTRAINED)]), SIZES, names={"w": ("b", "c")}).lock(), "UNCONSTRAINED", "a file cannot hold", "write None for it"),
    "a lock to compare with": (lambda: PLAN.diff("plan.lock"), "'plan.lock'", "Plan.from_lock(path)"),
    "LORA in a list": (lambda: sr.plan(TREE, RULES, SIZES, companions=[sr.LORA]), "companions[0]", "those of shardrules.LORA"),
    "a file of hardware by name": (lambda: sr.solve(STEP, SIZES, hardware="my.toml"), "'my.toml'", "a shardrules.Hardware"),
    "a nickname": (lambda: sr.Topology("trillium:4x4"), "'trillium'", "did you mean 'v6e'?"),
    "an empty field": (lambda: sr.Rename("layers.0.w", "layers/{}/w"), "{} is no field", "{layer}"),
    "a permutation": (lambda: sr.Rename("a", "b", (1, 0)), "(1, 0)", "'out in -> in out'"),
    "axes without an arrow": (lambda: sr.Rename("a", "b", "(0, 1)"), "'(0, 1)'", "one '->'"),
    "numbers beside arrays to save": (lambda: sr.save({"a": np.ones(2), "step": 3}, CHECKPOINT / "k"), "step is an int", "jax.numpy.asarray(3)"),
    "an object to save": (lambda: sr.save(object(), CHECKPOINT / "k"), "an object, and no array", "give arrays"),
    "a folder that is not there": (lambda: (sr.save({"a": np.ones(2)}, CHECKPOINT / "no" / "k"), saved(source=CHECKPOINT / "no" / "m")), "m: No such file", "check the name"),
    "a head that is the embedding": (lambda: (sr.save({"embed": np.ones((4, 4), "float32")}, CHECKPOINT / "e"), saved(source=CHECKPOINT / "e", tree={"embed": SHAPE((4, 4), "float32"), "lm_head": SHAPE((4, 4), "float32")})), "lm_head: missing", "Rename('embed', 'lm_head', shared=True)"),
    "no lock of a program": (lambda: sr.inspect(COMPILED, (None,)).diff("no.lock"), "'no.lock'", "Program.lock(path) writes one"),
    "a mesh with colons": (lambda: command("check", "model.json", "-r", "x", "-m", "fsdp:8,tp:4"), "'fsdp:8'", "write fsdp=8,tp=4"),
    "a mesh with spaces": (lambda: command("check", "model.json", "-r", "x", "-m", "fsdp=8 tp=4"), "'fsdp=8 tp=4'", "write fsdp=8,tp=4"),
    "a misspelt file": (lambda: command("manifest", "modle.json"), "modle.json: No such file", "did you mean model.json?"),
    "a misspelt function": (lambda: step_command("users_step:step_no"), "has no 'step_no'", "near it: step_on"),
    "a file for a module": (lambda: step_command("users_step.py:step_on"), "no module 'users_step.py'", "install it"),
    "a path for a module": (lambda: step_command("code/users_step.py:step_on"), "not the name of an object", "write package.module:name"),
    "a function of no mesh": (lambda: step_command("users_step:of_no_mesh"), "takes 0 positional arguments but 1 was given", "it must work with these arguments"),
    "a function without rules": (lambda: step_command("users_step:step_on", "-r", "own.toml"), "takes 1 positional argument but 2 were given", "it must work with these arguments"),
    "a step alone": (lambda: step_command("users_step:bare"), "(a PjitFunction)", "write return step, (plan, batch), plan"),
    "arguments one by one": (lambda: step_command("users_step:flat"), "(PjitFunction, Plan, NoneType)", "where arguments is a tuple", "write return step, (plan, batch), plan"),
    "files without their options": (lambda: command("check", "model.json", "rules.toml", "tp=2"), "Missing option '-r'", "check model.json -r rules.toml -m fsdp=8,tp=4"),
    "a lock of a step that is not there": (lambda: command("prove", "users_step:step_on", "-m", "tp=2", "--lock", "s.lock"), "s.lock: no such file", "--update-lock"),
    "a step as model": (lambda: command("manifest", "users_step:step_on"), "step_on()", "it must work without arguments"),
}  # fmt: skip
# What needs the compiler for TPUs.
OF_DEVICES = {
    "proved on another mesh": (lambda: sr.prove(JITTED, PLAN.on_mesh(MESH), X, on=SLICE), "fsdp=1,tp=1 are 1 device", "has 8", "Topology.meshes"),
    "links of others": (lambda: SLICE.links(MESH), "other devices than v5p:2x2x2", "make it by Topology.mesh"),
    "compiled without x": (lambda: sr.prove(JITTED, PLAN, on=SLICE), "missing 1 required positional argument: 'x'", "0: the tree of a plan, ['embed'] bfloat16[1024, 512]"),
    "compiled too narrow": (lambda: sr.prove(JITTED, PLAN, NARROW, on=SLICE), "(100,)", "(512,)", "1: bfloat16[8, 100]"),
}  # fmt: skip
# Arguments in another order, where functions of several orders live side by side.
OF_ORDERS = {
    "no mesh": ("plan(tree, rules", lambda: sr.plan(RULES, TREE)),
    "a mesh by keyword": ("plan(tree, rules, mesh)", lambda: sr.plan(RULES, TREE, mesh=SIZES)),
    "keywords": ("plan(tree, rules, mesh)", lambda: sr.plan(tree=RULES, rules=TREE, mesh=SIZES)),
    "Rules last": ("named_shardings(tree, rules, mesh)", lambda: sr.named_shardings(TREE, MESH, sr.Rules(RULES))),
    "specs last": ("named_shardings(tree, rules, mesh)", lambda: sr.named_shardings(TREE, MESH, PLAN.specs())),
    "a spec first": ("shard(tree, rules, mesh)", lambda: sr.shard(P("fsdp"), ARRAYS, MESH)),
    "a spec last": ("shard(tree, rules, mesh)", lambda: sr.shard(ARRAYS, MESH, P("fsdp"))),
    "a plan first": ("shard(tree, rules", lambda: sr.shard(PLAN, ARRAYS)),
    "an array of rules": ("with_sharding_constraint(", lambda: sr.with_sharding_constraint(MESH, np.ones((8, 8)), P("fsdp"))),
    "a name": ("load(path, rules, mesh)", lambda: sr.load("model.safetensors", MESH, RULES)),
    "verified by a plan": ("verify(compiled, plan)", lambda: sr.verify(PLAN, COMPILED)),
}  # fmt: skip
ALL = (
    MISTAKES | OF_DEVICES
    | {f"{name} in another order": (call, "in another order, ", said) for name, (said, call) in OF_ORDERS.items()}
)  # fmt: skip
# They look like arguments in another order, and are other mistakes.
OF_NO_ORDER = [
    lambda: sr.plan(TREE, [("(", None)], SIZES),
    lambda: sr.plan(TREE, {"kernel": P()}, SIZES),
    lambda: sr.match_partition_rules([("nothing", P())], TREE),
    lambda: sr.plan(RULES, None, SIZES),
    lambda: sr.plan(list(TREE.items()), {"kernel": P()}, SIZES),
    lambda: sr.plan(TREE, MESH),
    lambda: sr.shard(P("fsdp"), RULES, TREE),
    lambda: sr.logical_to_mesh({"w": P("embed")}, {"embed": "fsdp"}),
]
CHECKPOINT = None


@pytest.mark.parametrize("mistake", ALL)
def test_the_message_says_what_was_given_and_what_to_write(mistake, tmp_path, monkeypatch):
    if mistake in OF_DEVICES and importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for TPUs")
    monkeypatch.setitem(globals(), "CHECKPOINT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    call, *parts = ALL[mistake]
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    notes = getattr(raised.value, "__notes__", [])
    message = "\n".join([str(raised.value), *notes])
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert not re.search(r"0x[0-9a-f]{6,}>? *$", message)


@pytest.mark.parametrize("call", OF_NO_ORDER)
def test_other_mistakes_are_no_order(call):
    with pytest.raises((TypeError, ValueError, re.error)) as error:
        call()
    assert "order" not in str(error.value)
