"""What an installation must be able to do: run by `make dist` where there is only a wheel.

    cd /elsewhere && python -I .../tests/packaging/smoke.py

Tests nothing but that the parts are there and fit together; it must not need pytest nor this
repository. What belongs to an extra is tried where the extra is installed; where it is not, its
message must say how to get it.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import eformer

RULES = [("embed", P("tp", "fsdp")), (r"layers/\d+/.*kernel", P("fsdp", "tp")), (".*", P())]
TREE = {
    "embed": jax.ShapeDtypeStruct((512, 128), "bfloat16"),
    "layers": [{"wq": {"kernel": jax.ShapeDtypeStruct((128, 30), "bfloat16")}}] * 3,
}
MESH = {"fsdp": 8, "tp": 4}


def library() -> None:
    assert sr.__version__ == version("shardrules")
    assert (Path(sr.__file__).parent / "py.typed").exists()
    for match in (sr.match_partition_rules, eformer.match_partition_rules):
        specs = match(RULES, TREE)
        assert specs["embed"] == P("tp", "fsdp")
        assert specs["layers"][1]["wq"]["kernel"] == P("fsdp", "tp")
    assert sr.spec_for("layers/0/wq/kernel", (128, 30), RULES, MESH) == P("fsdp", None)
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    shardings = sr.named_shardings(TREE, RULES, one)
    assert isinstance(shardings["embed"], NamedSharding)
    arrays = sr.shard({"embed": np.ones((8, 8), np.float32)}, RULES, one)
    assert sr.gather(arrays)["embed"].sum() == 64


def planning() -> None:
    plan = sr.plan(TREE, RULES, MESH)
    assert "layers/{0..2}/wq/kernel" in str(plan)
    assert sr.Plan.from_lock(plan.lock()).fingerprint() == plan.fingerprint()
    assert "</html>" in plan.to_html()


def command_line(directory: Path) -> None:
    model, rules = directory / "model.json", directory / "rules.json"
    arrays = [["embed", [512, 128], "BF16"], ["layers/0/wq/kernel", [128, 30], "BF16"]]
    model.write_text(json.dumps({"model": "small", "params": arrays}))
    rules.write_text(json.dumps({"rules": [["embed", ["tp", "fsdp"]], [".*", []]]}))
    help_ = _run("--help")
    assert "sweep" in help_.stdout
    on_mesh = ("--rules", str(rules), "--mesh", "fsdp=8,tp=4")
    planned = _run("plan", str(model), *on_mesh, "--format", "json")
    assert planned.returncode == 0, planned.stderr
    json.loads(planned.stdout)


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    (script,) = Path(sys.executable).parent.glob("shardrules*")
    environment = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.run([script, *args], capture_output=True, encoding="utf-8", env=environment, check=False)


def main() -> None:
    library()
    planning()
    with tempfile.TemporaryDirectory() as directory:
        command_line(Path(directory))
    extras = [name for name in ("yaml",) if find_spec(name)]
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"smoke: Python {python}, JAX {jax.__version__}, extras of {extras or 'none'}: passed")


if __name__ == "__main__":
    main()
