"""Cases on plans, compared with an identity `tree_map`, and on commands as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from flax.linen import LogicallyPartitioned

import shardrules as sr
from benchmarks.harness import Row, compared, interleaved_seconds, without_collector
from examples import demo
from tests.support import corpus
from tests.support.browser import chromium, metrics_of

MESH = {"fsdp": 64, "sp": 1, "tp": 8}
RULES = "easydel__deepseek_v3-DeepseekV3Config-v0.2.0"


def rows() -> Iterator[Row]:
    """Yield all rows, each measured in its turn, without the garbage collector."""
    with without_collector():
        yield from _plans()
        yield from _sweeps()
        yield from _suggestions()
        yield from _logical_plans()
    yield from _reports()
    yield from _processes()


def _plans() -> Iterator[Row]:
    tree = corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract)
    rules = corpus.rules(RULES)
    planned = sr.plan(tree, rules, MESH)
    if planned.shardings() != sr.named_shardings(tree, rules, MESH):
        raise AssertionError("the plan and named_shardings disagree")

    def plan() -> sr.Plan:
        return sr.plan(tree, sr.Rules(rules), MESH)

    identity = partial(jax.tree_util.tree_map, lambda leaf: leaf, tree)
    yield compared("plan, DeepSeek-V3 / identity", plan, identity, runs=7)
    name = "plan, then check, DeepSeek-V3 / identity"
    yield compared(name, lambda: plan().check(), identity, runs=7, bar=2.0)


def _sweeps() -> Iterator[Row]:
    """100 meshes, by bytes."""
    tree = corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract)
    planned = sr.plan(tree, [*demo.EXPERTS, *corpus.rules(RULES)], MESH)
    meshes = [
        {"dp": 2**dp, "fsdp": 2**fsdp, "sp": 1, "tp": 2 ** (13 - dp - fsdp)}
        for dp in range(14)
        for fsdp in range(14 - dp)
    ][:100]
    counted: dict[str, Any] = {"gradients": "bfloat16", "optimizer": ["float32"] * 2}
    (seconds,) = interleaved_seconds([partial(planned.sweep, meshes, **counted)], runs=7)
    name = f"Plan.sweep over {len(meshes)} meshes by bytes, DeepSeek-V3"
    yield Row(name, seconds, "s", 1.0, f"{len(planned):,} leaves")


def _suggestions() -> Iterator[Row]:
    """Rules for 91,991 leaves, with their proof."""
    tree = corpus.manifest("deepseek-v3").flat(corpus.with_dtype)
    suggestion = sr.suggest(tree, {"fsdp": 64, "tp": 8})
    if suggestion.plan.check(**suggestion.declared).at_least("warning"):
        raise AssertionError("the suggested rules are not clean")
    (seconds,) = interleaved_seconds([lambda: sr.suggest(tree, {"fsdp": 64, "tp": 8})], runs=7)
    note = f"{len(tree):,} leaves, {len(suggestion.rules)} rules"
    yield Row("suggest, DeepSeek-V3 as published", seconds, "s", 1.0, note)


def _logical_plans() -> Iterator[Row]:
    """Plan of 45,000 leaves with logical axis names, beside them and in boxes."""
    rules = sr.LogicalRules(corpus.logical_rules("maxtext__base"), sr.dialects.MAXTEXT)
    tree = corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract)
    names = jax.tree_util.tree_map(_names_of, tree)
    boxes = jax.tree_util.tree_map(lambda leaf: LogicallyPartitioned(leaf, _names_of(leaf)), tree)
    sizes: dict[str, int] = dict.fromkeys(("fsdp", "tensor", "expert"), 8)
    beside, boxed = sr.plan(tree, rules, sizes, names=names), sr.plan(boxes, rules, sizes)
    if beside.specs() != boxed.specs():
        raise AssertionError("names beside arrays and in boxes give other specs")
    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "names beside them": (tree, lambda: sr.plan(tree, rules, sizes, names=names)),
        "in boxes of flax": (boxes, lambda: sr.plan(boxes, rules, sizes)),
    }
    for name, (tree_or_boxes, call) in cases.items():
        identity = partial(jax.tree_util.tree_map, lambda leaf: leaf, tree_or_boxes)
        what = f"plan of logical rules, {name} / identity"
        yield compared(what, call, identity, runs=7, bar=2.0)


def _names_of(leaf: Any) -> tuple[str | None, ...]:
    """Names for an array of this rank, as MaxText has them."""
    return {1: ("norm",), 2: ("embed", "mlp")}.get(len(leaf.shape), (None,) * len(leaf.shape))


def _reports() -> Iterator[Row]:
    """Yield a report of a million leaves that do not fold, in Chromium, if there is one."""
    names = ["".join(letters) for letters in product("abcdefghij", repeat=3)]
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    planned = sr.plan(dict.fromkeys(names, dict.fromkeys(names, leaf)), [("", "tp")], {"tp": 4})
    with TemporaryDirectory() as folder, chromium() as browser:
        if browser is None:
            return
        file = Path(folder) / "report.html"
        planned.to_html(file, sections=[sr.types.Findings(())])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        metrics = metrics_of(page)
        page.goto(file.as_uri())
        page.wait_for_selector("#treemap .slice")
        note = f"processor time of the page's main thread; {file.stat().st_size / 1e6:.0f} MB"
        name = "opening the report of 1,000,000 leaves that do not fold"
        yield Row(name, metrics()["TaskDuration"], "s", 2.0, note)


def _processes() -> Iterator[Row]:
    model = corpus.manifest_path("deepseek-v3")
    rules = demo.RULES
    options = ["-r", str(rules), "-m", "fsdp=64,sp=1,tp=8"]
    command = [sys.executable, "-m", "shardrules"]
    calls = [
        partial(_run, [*command, "plan", str(model), *options]),
        partial(_run, [sys.executable, "-c", "import numpy"]),
        partial(_run, [sys.executable, "-c", "import jax"]),
        partial(_run, [*command, "--help"]),
        partial(_run, [sys.executable, "-c", "pass"]),
    ]
    for call in calls:
        call()  # writes the bytecode
    plan, numpy_alone, jax_alone, help_, nothing = interleaved_seconds(calls, runs=15)
    note = f"import numpy alone: {numpy_alone:.2f} s; import jax: {jax_alone:.2f} s"
    yield Row("shardrules plan, 91,991 tensors, whole process", plan, "s", 0.4, note)
    yield Row("shardrules --help, over python -c pass", help_ - nothing, "s", 0.2, "")


def _run(command: list[str]) -> None:
    # With its bytecode, which an installed package has.
    environ = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONDONTWRITEBYTECODE"}}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
