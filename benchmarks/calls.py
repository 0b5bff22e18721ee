"""The functions of ours that the ten commonest calls enter, in how many files; and sizes of wheels.

The numbers are the same whatever else the machine does. A command's have its imports in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zipfile import ZipFile

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row
from tests.support.entered import entered, entered_by_command

RULES: Final = [("kernel", P("fsdp", "tp")), (".*", P())]
BARS: Final = {"plan": 150, "plan.check": 250}
MODEL: Final = {"params": [["a/kernel", [8, 8], "F32"], ["b", [8], "F32"], ["c", [], "F32"]]}


def rows() -> Iterator[Row]:
    """Yield a row for each call on five arrays, the second of its kind; then one of a command."""
    for name, call in _calls().items():
        call()
        with entered() as calls:
            call()
        yield _row(f"`{name}`, five arrays, again", calls, BARS.get(name))
    with TemporaryDirectory() as folder:
        model, rules = Path(folder, "model.json"), Path(folder, "rules.json")
        model.write_text(json.dumps(MODEL))
        rules.write_text('{"rules": [["kernel", ["fsdp", "tp"]], [".*", []]]}')
        words = ["check", str(model), "-r", str(rules), "-m", "fsdp=4,tp=2"]
        calls = entered_by_command(Path(folder), *words)
    yield _row("`shardrules check`, three arrays, from its imports on", calls, 700)
    for wheel in sorted(Path(__file__).parents[1].glob("dist/*.whl")):
        with ZipFile(wheel) as file:
            installed = sum(one.file_size for one in file.infolist()) / 1e6
        size, note = wheel.stat().st_size / 1e6, f"{installed:.1f} MB when installed; bar 5 MB"
        yield Row(f"{wheel.name}, which `make dist` built", size, "MB", 1.0, note)


def _row(name: str, calls: list[tuple[str, str]], bar: int | None) -> Row:
    return Row(name, len(calls), "calls", bar, f"in {len({file for file, _ in calls})} files")


def _calls() -> dict[str, Callable[[], Any]]:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    names = ("wq", "wk", "wv", "wo")
    tree: Any = {name: {"kernel": np.zeros((8, 8), "float32")} for name in names}
    tree["bias"] = np.zeros(8, "float32")
    plan = sr.plan(tree, RULES, mesh)
    placed = sr.shard(tree, plan)
    step = jax.jit(jax.lax.optimization_barrier, out_shardings=plan.shardings(), donate_argnums=0)
    compiled = step.lower(plan.abstract()).compile()
    return {
        "match_partition_rules": lambda: sr.match_partition_rules(RULES, tree),
        "named_shardings": lambda: sr.named_shardings(tree, RULES, mesh),
        "plan": lambda: sr.plan(tree, RULES, mesh),
        "plan.check": plan.check,
        "shard": lambda: sr.shard(tree, RULES, mesh),
        "with_sharding_constraint": lambda: sr.with_sharding_constraint(placed, plan),
        "audit": lambda: sr.audit(placed, plan),
        "verify": lambda: sr.verify(compiled, (plan,), plan),
        "prove": lambda: sr.prove(step, plan, on=mesh, outputs=plan),
    }
