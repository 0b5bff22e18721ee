"""Peers are the oracle; where one is not installed, its tests say so and are skipped."""

import gc
import json
import os
import random
import re
import sys

import pytest
from hypothesis import HealthCheck, settings

# Before JAX starts: the tests of meshes need devices. Unoptimized, compiling takes two thirds of the time.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
)
# No test takes from the cache of the person who runs it.
os.environ["SHARDRULES_CACHE"] = "off"
# Each run tries new inputs: SHARDRULES_SEED=... repeats those of a run, in each of its processes.
os.environ["SHARDRULES_SEED"] = os.environ.get("SHARDRULES_SEED") or str(random.getrandbits(32))

import jax
import numpy as np
from hypothesis import core
from jax.sharding import Mesh

# `make test` tries few examples of each property, the nightly run many.
settings.register_profile(
    "few",
    max_examples=30,
    deadline=None,
    derandomize=False,  # which it would be where the variable CI is set
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("many", settings.get_profile("few"), max_examples=300)
settings.load_profile("few")
SEED = int(os.environ["SHARDRULES_SEED"])
core.global_force_seed = SEED


# What JAX 0.7.2 and the peers of its day do otherwise than those of today, which these tests ask for.
NOT_ON_JAX_0_7 = {
    "test_flax_core.py::test_nnx_variables_keep": "metadata of Variables are others in flax 0.12.0",
    "test_flax_core.py::test_axes_of_nnx": "metadata of Variables are others in flax 0.12.0",
    "test_flax_linen_spmd.py::test_boxes": "metadata of Variables are others in flax 0.12.0",
    "test_derive.py::test_optimizer_sharding_of_flax": "flax 0.12.0 has no optimizer_sharding",
    "test_logical_plans.py::TestWhereNamesComeFrom::test_variables_of": "Variables of flax 0.12.0",
    "test_logical_plans.py::TestWhereNamesComeFrom::test_rules_of": "Variables of flax 0.12.0",
}


# Which libraries may be missing where: a skip for want of another hides what it should have tried.
_NAMED_IN_REASON = re.compile(r"(?:could not import '([\w-]+)|^([\w.-]+) is not installed(?:$|: ))")
_IS_OLDEST = jax.__version_info__ < (0, 8)  # the group `oldest` has no other peers
_IS_NEWEST = sys.version_info >= (3, 14)  # for which they have no wheels yet
MAY_BE_MISSING = {
    "eformer": _IS_OLDEST or _IS_NEWEST,
    "fsspec": _IS_OLDEST,
    "haliax": _IS_OLDEST or _IS_NEWEST,
    "keras": _IS_OLDEST,
    "libtpu": not any(path.endswith("-tpu") for path in sys.path),  # where `make test-all` has it
    "moto": True,
    "OR-tools": _IS_OLDEST or _IS_NEWEST,
    "ortools": _IS_OLDEST or _IS_NEWEST,
    "orbax-checkpoint": _IS_OLDEST,
    "s3fs": True,
    "scalax": _IS_OLDEST,
}


def why_not_expected(reason: str) -> str | None:
    """Why a test must not be skipped for this reason; None if it may."""
    named = _NAMED_IN_REASON.search(reason)
    if not named or MAY_BE_MISSING.get(named[1] or named[2]):
        return None
    return "its library is one that this environment has to have: see tests/conftest.py"


def pytest_configure(config):
    """A test that is named runs, slow or not."""
    if config.option.markexpr == "not slow" and any("::" in name for name in config.args):
        config.option.markexpr = ""


def pytest_report_header():
    """What repeats the run's random inputs."""
    return f"SHARDRULES_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _with_unexpected_skips_as_failures((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _with_unexpected_skips_as_failures((yield))


def _with_unexpected_skips_as_failures(report):
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if why := why_not_expected(reason):
            report.outcome, report.longrepr = "failed", f"{report.nodeid}: {reason}: {why}"
    return report


def pytest_collection_modifyitems(items):
    """Skip on the oldest JAX what its table names, with the reason."""
    if not _IS_OLDEST:
        return
    for item in items:
        for name, reason in NOT_ON_JAX_0_7.items():
            if f"/{name}" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"JAX 0.7: {reason}"))


def pytest_collection_finish():
    """All that is imported leaves the collector's sight: it would go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the run and the test's name."""
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """Eight devices: dp=1, fsdp=4, tp=2."""
    return Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("dp", "fsdp", "tp"))


@pytest.fixture
def write(tmp_path):
    """write(name, content): a file of these bytes, this text, or else this as JSON; its path."""

    def call(name, data):
        if not isinstance(data, bytes):
            data = (data if isinstance(data, str) else json.dumps(data)).encode()
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return call
