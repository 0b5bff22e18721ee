"""`verify(budget=)`: what is over a budget is an error, and what cannot be known is told."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from tests.support.compiled import array, constrained, devices

MESH = devices(data=2, fsdp=2, tp=2)
cut = partial(constrained, MESH)


@pytest.fixture(scope="module")
def compiled():
    """A step that gathers over fsdp, sums over tp, and sums over data and fsdp together."""
    args = [array(MESH, (64, 64), axes) for axes in ("fsdp", "tp", ("data", "fsdp"))]
    return jax.jit(lambda x, w, v: (cut(cut(x) @ w), cut(v.T @ v))).lower(*args).compile()


@pytest.fixture(scope="module")
def sent(compiled):
    """Bytes by axes and kind, which other tests compare with the HLO."""
    return sr.inspect(compiled, (None,) * 3).sent


def budgeted(compiled, budget, count=3, **options):
    findings = sr.verify(compiled, (None,) * count, budget=budget, large=10**9, **options)
    return [finding for finding in findings if finding.kind == "budget"]


WRONG = [
    ({"fdsp": 1}, r"budget\['fdsp'\].*'fdsp'.*did you mean fsdp\?"),
    ({"data,tpp": 1}, r"'tpp'.*did you mean tp\?"),
    ({"fsdp all-gathr": 1}, r"did you mean all-gather\?"),
    ({"totl": 1}, r"did you mean total\?"),
    ({"xyz": 1}, r"'xyz'.*data, fsdp, tp.*all-gather.*total.*peak"),
    ({"": 1}, r"budget\[''\]"),
    ({"fsdp,": 1}, r"budget\['fsdp,'\]"),
    ({"peak": "90"}, r"budget\['peak'\] is '90': a unit is missing; write '90GB'"),
    ({"fsdp": "25 TP"}, r"budget\['fsdp'\].*'25 TP'.*96GB"),
    ({"fsdp": -1}, r"budget\['fsdp'\] is -1"),
]


@pytest.mark.parametrize(("budget", "told"), WRONG)
def test_a_wrong_budget_is_a_value_error(compiled, budget, told):
    with pytest.raises(ValueError, match=told):
        budgeted(compiled, budget)


def test_prove_tells_it_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("shardrules._program.verify.prove.CompilerChild", None)
    with pytest.raises(ValueError, match=r"did you mean fsdp\?"):
        sr.prove(lambda x: x, np.ones(8, "float32"), on={"fsdp": 2}, budget={"fdsp": 1})


@pytest.mark.parametrize("budget", [3, "fsdp=1GB", ["fsdp"], {3: 1}, {"fsdp": None}, {"fsdp": b"1"}])
def test_what_is_no_budget_is_a_type_error(compiled, budget):
    with pytest.raises(TypeError, match="budget"):
        budgeted(compiled, budget)


def test_an_axis_of_a_program_without_a_mesh():
    compiled = jax.jit(lambda x: x * 2).lower(np.ones(3)).compile()
    with pytest.raises(ValueError, match=r"'fsdp'.*no mesh"):
        budgeted(compiled, {"fsdp": 1}, 1)
    assert budgeted(compiled, {"total": 0, "all-gather": 0, "peak": "1 GB"}, 1) == []


def sums(sent, axes=(), kind=None):
    return sum(size for (on, what), size in sent.items() if set(axes) <= set(on) and kind in (None, what))


KEYS = {
    "fsdp": (("fsdp",), None),
    "tp": (("tp",), None),
    "data": (("data",), None),
    "data,fsdp": (("data", "fsdp"), None),
    " fsdp, data ": (("data", "fsdp"), None),
    "all-gather": ((), "all-gather"),
    "all-reduce": ((), "all-reduce"),
    "fsdp all-gather": (("fsdp",), "all-gather"),
    "data,fsdp all-reduce": (("data", "fsdp"), "all-reduce"),
    "total": ((), None),
}


@pytest.mark.parametrize("key", KEYS)
def test_bytes_over_a_budget_are_an_error_and_equal_bytes_are_none(compiled, sent, key):
    size = sums(sent, *KEYS[key])
    assert budgeted(compiled, {key: size}) == []
    if size:
        (finding,) = budgeted(compiled, {key: size - 1})
        assert (finding.level, finding.kind, finding.bytes) == ("error", "budget", 1)
        assert finding.message.startswith(f"{key.strip()}: each device sends ")
        assert re.search(r" by (all|reduce|collective)-\S+ of f32\[", finding.message)


def test_the_program_has_what_the_keys_are_about(compiled, sent):
    assert {("fsdp",), ("tp",)} <= {axes for axes, _ in sent}
    assert sums(sent, ("fsdp",)) > sums(sent, ("data", "fsdp")) > 0
    (finding,) = budgeted(compiled, {"tp": " 8 KB"})
    assert finding.bytes == sums(sent, ("tp",)) - 8000
    assert len(budgeted(compiled, {"tp": 8e3, "peak": np.int64(10**9), "total": 1})) == 2


def test_the_peak(compiled):
    peak = sr.inspect(compiled, (None,) * 3).memory.peak
    assert budgeted(compiled, {"peak": peak}) == []
    (finding,) = budgeted(compiled, {"peak": peak - 5})
    assert (finding.level, finding.bytes) == ("error", 5)
    assert finding.message.startswith("peak: each device needs ")


def test_an_unknown_trip_count_is_told():
    def step(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: cut(cut(jnp.sin(x)) * 2, "fsdp"), x)

    compiled = jax.jit(step).lower(array(MESH, (64, 64), "fsdp")).compile()
    (finding,) = budgeted(compiled, {"fsdp": "1 GB"}, 1)
    assert finding.level == "warning"
    assert "trip count is not known" in finding.message
    assert "all-gather of f32[64,64]" in finding.message
    (finding,) = budgeted(compiled, {"fsdp": 0}, 1)
    assert finding.level == "error"
    assert "sends at least" in finding.message
    assert budgeted(compiled, {"tp": 0}, 1) == []


def test_what_was_looked_at_is_said(compiled):
    for options, said in (
        ({"budget": {"tp": "1 GB", "peak": "2 GB"}}, "peak memory not compared, as hbm= is not given; 2 budgets kept"),
        ({"budget": {}, "hbm": 10**9}, "peak memory within 1.00 GB"),
        ({}, "peak memory not compared, as hbm= is not given"),
    ):
        assert sr.verify(compiled, (None,) * 3, **options).scope.endswith(said)
