"""The whole tree compared with a clone of its dicts in C++, the least that anybody pays."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jax.sharding import PartitionSpec as P

import shardrules as sr
from benchmarks.cases import cold_match
from benchmarks.harness import Row, compared, without_collector
from tests.support import corpus

SOURCE = Path(__file__).with_name("floor.cpp")


def rows() -> Iterator[Row]:
    """Yield our match of DeepSeek-V3, with and without compiling, beside a clone of its tree."""
    clone = _built_clone()
    tree = corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract)
    pairs = corpus.rules("easydel__deepseek_v2-DeepseekV2Config-v0.0.80")
    rules = sr.Rules(pairs)
    rules.match(tree)
    calls = {"cold": lambda: cold_match(pairs, tree), "compiled before": lambda: rules.match(tree)}
    with without_collector():
        for name, call in calls.items():
            what = f"match, DeepSeek-V3 nested, {name} / the floor"
            yield compared(what, call, lambda: clone(tree, P()), runs=31, bar=1.15)


def _built_clone() -> Callable[[Any, P], Any]:
    with TemporaryDirectory() as folder:
        library = Path(folder) / "floor_clone.so"
        compiler = shlex.split(sysconfig.get_config_var("CXX") or "c++")[0]
        include = f"-I{sysconfig.get_paths()['include']}"
        options = ["-O3", "-std=c++20", "-shared", "-fPIC", include]
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(library)], check=True)
        spec = importlib.util.spec_from_file_location("floor_clone", library)
        if spec is None or spec.loader is None:
            raise ImportError(f"{library} is no extension module")
        module = importlib.util.module_from_spec(spec)
        return module.clone  # type: ignore[no-any-return]
