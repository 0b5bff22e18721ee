"""What a prompt, a notebook and pickle show of every public value, in one table."""

import copy
import enum
import html
import inspect
import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardrules as sr
from tests.support import api

SIZES = {"fsdp": 2, "tp": 2}
TREE = {
    "layers": [{"wq": {"kernel": jax.ShapeDtypeStruct((64, 32), "float32")}}] * 2,
    "<script>alert(1)</script>": jax.ShapeDtypeStruct((8, 8), "float32"),
    "odd": jax.ShapeDtypeStruct((7,), "float32"),
}
RULES = [("kernel", ("fsdp", "tp")), ("script", ()), ("odd", "tp"), ("never", ())]
LOGICAL = sr.LogicalRules([("embed", "fsdp"), ("mlp", ("tp",)), ("heads", None)])


UP = jax.ShapeDtypeStruct((64, 256), "float32")


def program():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    x = jax.ShapeDtypeStruct((64,), "float32", sharding=jax.NamedSharding(mesh, jax.P("tp")))
    return sr.inspect(jax.jit(lambda x: x.sum()).lower(x).compile(), (None,))


MAKERS: dict[str, Callable[[], Any]] = {
    "plan": lambda: sr.plan(TREE, RULES, SIZES),
    "named": lambda: sr.plan({"w": UP}, LOGICAL, SIZES, names={"w": ("embed", "mlp")}),
    "swept": lambda: made("plan").sweep(hbm=95 * 10**9),
    "swept steps": lambda: sr.sweep(lambda mesh, n: (lambda x: x * 2, (np.ones(n),)), {"fsdp": 2}, hbm="1GB", n=[8]),
    "other": lambda: made("plan").on_mesh({"fsdp": 4, "tp": 1}),
    "suggestion": lambda: sr.suggest({"up": {"kernel": UP}}, {"tp": 4}),
    "program": program,
    "step": lambda: sr.trace(
        lambda params, x: x @ params["up"]["kernel"], {"up": {"kernel": UP}}, jax.ShapeDtypeStruct((8, 64), "float32")
    ),
    "solution": lambda: sr.solve(made("step"), {"fsdp": 4}, hardware="v5p"),
}


@cache
def made(name):
    return MAKERS[name]()


# What is asked for: a prompt shows the text. Beside each, a part of that.
ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "Plan": (lambda: made("plan"), "layers/{0,1}/wq/kernel"),
    "Findings": (lambda: made("plan").check(), "warning[dead]: "),
    "Explanation": (lambda: made("plan").explain("odd"), "rule 2: 'odd' wins"),
    "Sweep": (lambda: made("swept"), "fits"),
    "PlanDiff": (lambda: made("plan").diff(made("other")), "~ odd  P() -> P('tp')"),
    "Transfer": (lambda: made("plan").transfer(made("other")), " received in all"),
    "Suggestion": (lambda: made("suggestion"), "rule 0 up/kernel: 1 leaf of 65.5 kB"),
    "Rules": (lambda: made("plan").rules, "rule 0: 'kernel' -> P('fsdp', 'tp')"),
    "LogicalRules": (lambda: LOGICAL, "rule 1: 'mlp' -> ('tp',)"),
    "DeviceBytes": (lambda: made("plan").bytes_per_device(), " on the fullest device"),
    "Program": (lambda: made("program"), "each device sends "),
    "Memory": (lambda: made("program").memory, " on each device: "),
    "ProgramTime": (
        lambda: sr.types.ProgramTime(3.0, 1.0, (("train.py:3", 3.0),), 0.0, ()),
        "a step takes 2.61 s to 4.00 s by the compiler's estimate"),
    "StepSweep": (lambda: made("swept steps"), "fits: 1"),
    "Proof": (lambda: sr.prove(lambda x: x * 2, jnp.ones(8)), " on each device, on one device by XLA for CPU"),
    "Step": (lambda: made("step"), "dimensions of the arguments, by what must be sharded alike"),
    "Solution": (lambda: made("solution"), " a step on fsdp=4"),
    "Coverage": (lambda: made("plan").coverage, "rule 3: dead, matches no leaf"),
}  # fmt: skip
# What stands in lists: one short line, as of any NamedTuple.
RECORDS: dict[str, Callable[[], Any]] = {
    "Finding": lambda: made("plan").check()[0],
    "SweepRow": lambda: made("swept")[0],
    "StepSweepRow": lambda: made("swept steps")[0],
    "Change": lambda: made("plan").diff(made("other"))[0],
    "TransferRow": lambda: made("plan").transfer(made("other"))[0],
    "Reason": lambda: made("suggestion").reasons[0],
    "CutReason": lambda: made("suggestion").reasons[0].dims[0],
    "Tried": lambda: made("plan").explain("odd").tried[0],
    "Loss": lambda: made("plan").explain("odd").kind.losses[0],
    "Kind": lambda: made("plan").explain("odd").kind,
    "RuleFile": lambda: sr.types.RuleFile(made("plan").rules, {}, sr.LORA, "own.toml"),
    "Collective": lambda: made("program").collectives[0],
    "Buffer": lambda: made("program").memory.buffers[0],
    "Totals": lambda: made("program").memory.totals,
    "DimensionClass": lambda: made("step").dimensions[0],
    "Work": lambda: made("step").work[0],
    "ClassChoice": lambda: made("solution").choices[0],
    "Activation": lambda: made("solution").activations[0],
    "Candidate": lambda: made("solution").candidates[0],
    "StepCost": lambda: made("solution").candidates[0].predicted,
    "Place": lambda: made("program").collectives[0].place,
}
# What users write: the `repr` is how, without what they leave out.
WRITTEN: dict[str, tuple[Callable[[], Any], str]] = {
    "Correction": (lambda: sr.Correction(rank="keep"), "Correction(rank='keep')"),
    "RuleSpec": (lambda: sr.RuleSpec("tp", units=(2,)), "RuleSpec(spec='tp', units=(2,))"),
    "Dialect": (
        lambda: sr.dialects.Dialect("own", ".", sr.Correction(), scalars="none"),
        "Dialect(name='own', separator='.', correction=Correction(), scalars='none')"),
    "LogicalDialect": (
        lambda: sr.dialects.LogicalDialect("own", last_wins=True, keeps_unknown=False),
        "LogicalDialect(name='own', last_wins=True, keeps_unknown=False)"),
    "Companion": (lambda: sr.Companion("_scale$", "", dims=(0,)), "Companion(pattern='_scale$', base='', dims=(0,))"),
    "Rename": (lambda: sr.Rename("model", "m"), "Rename(name='model', path='m')"),
    "Hardware": (lambda: sr.Hardware.named("v5p"), "Hardware(name='v5p', flops_per_second={"),
    "Topology": (lambda: sr.Topology("v5p:8x8x8"), "Topology(name='v5p:8x8x8')"),
}  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    **{name: make for name, (make, _) in ANSWERS.items()},
    **RECORDS,
    **{name: make for name, (make, _) in WRITTEN.items()},
}


def public_classes() -> set[str]:
    return {
        name
        for name, one in api.public().items()
        if inspect.isclass(one) and not issubclass(one, Exception | enum.Enum)
    }


def test_the_table_has_every_public_class():
    assert set(MADE) == public_classes()
    assert all(type(make()).__name__ == name for name, make in MADE.items())


def words_of(page):
    """The words of HTML, in their order; coloured ones are parts of a word."""
    return html.unescape(re.sub("<[^>]*>", " ", re.sub("</?b[^>]*>", "", page))).split()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_prompt_and_a_notebook_show_the_text_of_an_answer(name):
    make, part = ANSWERS[name]
    value = make()
    assert part in str(value)
    assert repr(value) == str(value)  # as these are short
    page = value._repr_html_()
    assert page.startswith(("<pre>", "<details", "<table>"))
    assert "<script" not in page
    if name != "Plan":
        assert words_of(page) == str(value).split()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_one_short_line(name):
    value = RECORDS[name]()
    assert repr(value).startswith(f"{name}(")
    assert "\n" not in repr(value)
    assert len(repr(value)) < 800
    if type(value).__str__ is not object.__str__:
        assert "<script" not in value._repr_html_()
        assert words_of(value._repr_html_()) == str(value).split()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_users_write_is_shown_as_they_write_it(name):
    make, shown = WRITTEN[name]
    assert repr(make()).startswith(shown)
    if shown.endswith(")"):
        assert repr(make()) == str(make()) == shown
        assert eval(shown, api.public()) == make()


def test_a_field_that_cannot_be_compared_is_shown():
    assert repr(sr.RuleSpec(np.ones(2))) == "RuleSpec(spec=array([1., 1.]))"


def test_the_dialects_that_come_with_it_show_their_names():
    dialects = [
        name
        for name, value in api.public().items()
        if isinstance(value, sr.dialects.Dialect | sr.dialects.LogicalDialect)
    ]
    assert len(dialects) > 10
    assert [repr(getattr(sr.dialects, name)) for name in dialects] == dialects


def test_an_answer_of_pages_shows_its_first_lines_in_a_list():
    rules = sr.Rules([(f"a{i}", ()) for i in range(10_000)])
    lines = repr([rules]).split("\n")
    assert len(lines) == 61
    assert lines[-1] == "... and 9,941 more lines; print shows them]"
    assert len(str(rules).split("\n")) == 10_001
    assert rules._repr_html_().count("\n") == 59
    assert "<details><summary>" in rules._repr_html_()
    coverage = rules.coverage({"w": np.ones(2)})
    assert len(repr(coverage).split("\n")) == 61


def test_a_record_with_long_fields_is_short():
    finding = made("plan").check()[0]._replace(message="x" * 10**6, paths=("y" * 10**5,) * 10**4)
    assert len(repr(finding)) < 800
    findings = sr.types.Findings([finding] * 1000)
    assert len(findings._repr_html_()) <= 200_000
    assert "more parts; print shows them" in findings._repr_html_()
    assert "x" * 1000 in str(finding)


# They have arrays or kinds, which `==` does not compare.
WITH_IDENTITY = {"Plan", "Explanation", "PlanDiff", "Transfer", "Suggestion", "DeviceBytes", "Change",
                 "TransferRow", "Kind", "Program", "Proof", "Step"}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*MADE} - {"Step", "Solution"}))  # which have a jaxpr, that JAX does not copy
def test_everything_is_copied_and_pickled(name):
    value = MADE[name]()
    copies = [copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))]
    for again in copies:
        assert type(again) is type(value)
        assert (repr(again), str(again)) == (repr(value), str(value))
        assert name in WITH_IDENTITY or again == value
