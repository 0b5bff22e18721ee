"""What a user's type checker makes of the public API; read by mypy and pyright, never run.

An expected error is a `type: ignore` with its code: strict mypy reports one that is not needed.
"""

from dataclasses import dataclass, replace
from typing import Any, assert_type

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection
from shardrules.compat import eformer

RULES = [("kernel", PartitionSpec("fsdp", "tp")), (".*", PartitionSpec())]
MESH = {"fsdp": 8, "tp": 4}
PARAMS = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}


def rules() -> None:
    compiled = sr.Rules(RULES, sr.dialects.EFORMER, memory_budget=1 << 20)
    assert_type(compiled.first_match("a/b"), int | None)
    assert_type(compiled.all_matches("a/b"), list[int])
    assert_type(compiled.dialect, sr.dialects.Dialect)
    assert_type(compiled.coverage(PARAMS), sr.types.Coverage)
    sr.Rules("kernel")  # type: ignore[arg-type]
    compiled.first_match(1)  # type: ignore[arg-type]
    compiled.first_mach("a/b")  # type: ignore[attr-defined]


def files() -> None:
    read = sr.read_rules("rules.toml", dialect=sr.dialects.NNX)
    assert_type(read, sr.types.RuleFile)
    model = sr.read_model("model", nested=True)
    planned = sr.plan(model, read.rules, MESH, companions=read.companions)
    assert_type(planned.check(**read.declared), sr.types.Findings)
    sr.read_rules(3)  # type: ignore[arg-type]


def shardings() -> None:
    assert_type(sr.match_partition_rules(RULES, PARAMS), Any)
    assert_type(eformer.match_partition_rules(RULES, PARAMS), Any)
    sr.named_shardings(PARAMS, sr.Rules(RULES, correction=sr.Correction(indivisible="error")), MESH)
    sr.named_shardings(PARAMS, [(".*", sr.fsdp("fsdp", within=PartitionSpec("tp")))], MESH)
    sr.fsdp(("data", "fsdp"), min_byte=2**20)  # type: ignore[call-arg]
    sr.named_shardings(PARAMS, RULES, mesh=8)  # type: ignore[arg-type]
    sr.Correction(no_such_choice="drop")  # type: ignore[call-arg]


# A misspelt choice is seen before anything runs.
def choices() -> None:
    LibraryCorrection(absent="drop", indivisible="prefix", rank="keep", pad=False)
    LibraryCorrection(absent="drp")  # type: ignore[arg-type]
    sr.Correction(indivisible="truncate")  # type: ignore[arg-type]
    sr.Correction(rank="prefix")  # type: ignore[arg-type]
    sr.Correction(unconstrained="remove")  # type: ignore[arg-type]
    sr.Correction(pad="no")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), match=("exact", "search"), scalars="size 1")
    sr.dialects.Dialect("own", "/", sr.Correction(), keys="paths")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), match=("find",))  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), precedence="last")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), scalars="rank 1")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), min_size="first")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), rank="drop")  # type: ignore[arg-type]
    sr.dialects.Dialect("own", "/", sr.Correction(), unmatched="keep")  # type: ignore[arg-type]
    sr.RuleSpec("tp", units=(None, 128), memory_kind="pinned_host", optional_axes=("tp",))
    sr.RuleSpec("tp", memory_kind="pinned_hsot")  # type: ignore[arg-type]
    sr.RuleSpec("tp", optional_axes="tp")  # type: ignore[arg-type]
    replace(sr.dialects.KERAS, match=("exact", "find"))  # type: ignore[arg-type]
    findings = sr.plan(PARAMS, RULES, MESH).check(levels={"dead": "off", "uncut": "error"})
    findings.at_least("warning")
    findings.at_least("warn")  # type: ignore[arg-type]
    sr.plan(PARAMS, RULES, MESH).check(levels={"dead": "none"})  # type: ignore[dict-item]
    sr.plan(PARAMS, RULES, MESH).check(levels={"deed": "off"})  # type: ignore[dict-item]


# Planning is imported on first use, which a type checker must not notice.
def planning() -> None:
    plan = sr.plan(PARAMS, RULES, MESH)
    assert_type(plan, sr.Plan)
    assert_type(plan.check(), sr.types.Findings)
    assert_type(plan.lock(), str)
    assert_type(plan.bytes_per_device(gradients="bfloat16"), sr.types.DeviceBytes)
    assert_type(sr.Plan.from_lock(plan.lock()), sr.Plan)
    assert_type(plan.transfer(plan), sr.types.Transfer)
    assert_type(plan.transfer(plan)[0], sr.types.TransferRow)
    plan.transfer(MESH)  # type: ignore[arg-type]
    plan.for_optimizer(PARAMS, zero1="dp")
    assert_type(plan.sweep(devices=8)[0], sr.types.SweepRow)
    plan.bytes_per_device(gradient="bfloat16")  # type: ignore[call-arg]
    plan.check(levels={"dead": "off"})
    plan.check(levels={"daed": "off"})  # type: ignore[dict-item]
    plan.check(levels={"dead": "of"})  # type: ignore[dict-item]
    plan.check().at_least("warnings")  # type: ignore[arg-type]
    assert_type(plan.kinds[0].losses, tuple[sr.types.Loss, ...])
    assert plan.kinds[0].status != "misfits"  # type: ignore[comparison-overlap]
    _ = sr.no_such_name  # type: ignore[attr-defined]


@dataclass
class State:
    """A train state of a user's."""

    params: dict[str, jax.Array]
    step: int


# What keeps a tree's structure keeps its type; where leaves become others, it is Any.
def trees(state: State, mesh: Mesh, plan: sr.Plan) -> None:
    assert_type(sr.shard(state, RULES, mesh, donate=True), State)
    assert_type(sr.shard(state.params, PartitionSpec("tp"))["kernel"], jax.Array)
    assert_type(sr.gather(state), State)
    assert_type(sr.gather(state).step, int)
    assert_type(sr.with_sharding_constraint(state, plan.specs()), State)
    assert_type(sr.with_logical_constraint(state.params["kernel"], ("embed", "mlp")), jax.Array)
    assert_type(sr.reshard(state, RULES, mesh, renames=[sr.Rename("a", "b")]), Any)
    assert_type(sr.load("model.safetensors", RULES, mesh, tree=state), Any)
    assert_type(sr.shard_local({"tokens": 1}, PartitionSpec("dp")), Any)
    assert_type(sr.named_shardings(state, RULES, mesh), Any)
    assert_type(plan.specs(), Any)
    assert_type(plan.shardings(), Any)
    assert_type(plan.abstract(), Any)
    _ = sr.shard(state, RULES, mesh).parms  # type: ignore[attr-defined]
    _ = sr.gather(state).params["kernel"].shap  # type: ignore[attr-defined]
    sr.reshard(state, RULES, mesh, donate="yes")  # type: ignore[arg-type]


# The records that a decorator makes are the classes that they look like.
def shown(plan: sr.Plan) -> None:
    assert_type(plan.explain("kernel"), sr.types.Explanation)
    assert_type(plan.explain("kernel").path, str)
    assert_type(plan.check()[0], sr.types.Finding)
    assert_type(plan.check()[0]._replace(level="info").leaves, int)
    assert_type(plan.check().scope, str)
    assert_type(sr.Rules(RULES).coverage(PARAMS).dead, tuple[int, ...])
    sr.types.Change("a", 1, None, None, True, 3)  # type: ignore[call-arg]


def placement(sharding: NamedSharding) -> None:
    sr.with_sharding_constraint(PARAMS, sharding)
    sr.shard(PARAMS)  # type: ignore[call-arg]
    with sr.patch("eformer"):
        pass
    assert_type(sr.__version__, str)
