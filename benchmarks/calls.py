"""The functions of ours that the ten commonest calls enter, in how many files; and sizes of wheels.

The numbers are the same whatever else the machine does. A command's have its imports in them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final
from zipfile import ZipFile

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.harness import Row

PACKAGE: Final = str(Path(sr.__file__).parent)
RULES: Final = [("kernel", P("fsdp", "tp")), (".*", P())]
BARS: Final = {"plan": 150, "plan.check": 250}
MODEL: Final = {"params": [["a/kernel", [8, 8], "F32"], ["b", [8], "F32"], ["c", [], "F32"]]}
COMMAND: Final = """
import json, sys
package, files = sys.argv.pop(1), []
def hook(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        files.append(frame.f_code.co_filename)
sys.setprofile(hook)
from shardrules._cli import main
try:
    main()
finally:
    sys.setprofile(None)
    print(json.dumps(files), file=sys.stderr)
"""


def rows() -> Iterator[Row]:
    """Yield a row for each call on five arrays, the second of its kind; then one of a command."""
    for name, call in _calls().items():
        call()
        yield _row(f"`{name}`, five arrays, again", _files_entered(call), BARS.get(name))
    with TemporaryDirectory() as folder:
        model, rules = Path(folder, "model.json"), Path(folder, "rules.json")
        model.write_text(json.dumps(MODEL))
        rules.write_text('{"rules": [["kernel", ["fsdp", "tp"]], [".*", []]]}')
        words = ["check", str(model), "-r", str(rules), "-m", "fsdp=4,tp=2"]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, PACKAGE, *words],
            capture_output=True,
            text=True,
            check=True,
        )
    files = json.loads(done.stderr.splitlines()[-1])
    yield _row("`shardrules check`, three arrays, from its imports on", files, 700)
    for wheel in sorted(Path(__file__).parents[1].glob("dist/*.whl")):
        with ZipFile(wheel) as file:
            installed = sum(one.file_size for one in file.infolist()) / 1e6
        size, note = wheel.stat().st_size / 1e6, f"{installed:.1f} MB when installed; bar 5 MB"
        yield Row(f"{wheel.name}, which `make dist` built", size, "MB", 1.0, note)


def _row(name: str, files: list[str], bar: int | None) -> Row:
    return Row(name, len(files), "calls", bar, f"in {len(set(files))} files")


def _files_entered(call: Callable[[], Any]) -> list[str]:
    """Return the file of each function of ours that a call enters."""
    files = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


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
