"""Time lines of layers: what is hidden behind what is computed, by hand and of recorded programs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import shardrules as sr
from shardrules._program.collectives import exchanges
from shardrules._program.hlo import Hlo
from shardrules._program.step_seconds import LEAST_CYCLES, program_time
from tests.support.browser import chromium

FOLDER = Path(__file__).parents[1] / "data" / "hlo"
CLOCK, PEAK = 1e9, 1e12
GATHERED = 8 * 1024 * 4 * 7 // 8
"""Bytes that a device sends to gather f32[8,1024] over eight."""
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
HIDDEN = f"""\
  %start = (f32[1,1024], f32[8,1024]) all-gather-start(%w), channel_id=1, {GROUPS}
  %a = f32[8] copy(%x), metadata={{op_name="jit(f)/jvp(attention)/dot_general"}}, backend_config={{"estimated_cycles":"1000"}}
  %done = f32[8,1024] all-gather-done(%start)
"""
EXPOSED = f"""\
  %gathered = f32[8,1024] all-gather(%w), channel_id=1, {GROUPS}
  %a = f32[8] copy(%x), metadata={{op_name="jit(f)/jvp(attention)/dot_general"}}, backend_config={{"estimated_cycles":"1000"}}
"""
# Both are started before anything is computed, and the links have one after the other.
TWO = HIDDEN + f"""\
  %start.2 = (f32[1,1024], f32[8,1024]) all-gather-start(%w), channel_id=2, {GROUPS}
  %start.3 = (f32[1,1024], f32[8,1024]) all-gather-start(%w), channel_id=3, {GROUPS}
  %b = f32[8] copy(%x), metadata={{op_name="jit(f)/jvp(mlp)/dot_general"}}, backend_config={{"estimated_cycles":"1000"}}
  %done.3 = f32[8,1024] all-gather-done(%start.3)
  %done.2 = f32[8,1024] all-gather-done(%start.2)
"""  # fmt: skip
# The start and the end of a collective on a TPU are fusions, as is what it goes on beside.
FUSED = """\
  %begin = (f32[1,1024], f32[8,1024]) fusion(%w), kind=kCustom, calls=%started
  %beside = f32[8] fusion(%x), kind=kOutput, calls=%goes_on, metadata={op_name="jit(f)/jvp(mlp)/dot_general"}, backend_config={"estimated_cycles":"1000"}
  %end = f32[8,1024] fusion(%begin), kind=kCustom, calls=%ended
"""


def of_chain(computation, target):
    line = (
        f"%{computation}.gather = f32[8,1024] all-gather(%p.{computation}), channel_id=1, {GROUPS}, "
        'frontend_attributes={chain_id="4"}'
    )
    return f"""\
%{computation} (p.{computation}: f32[1,1024]) -> f32[8,1024] {{
  %p.{computation} = f32[1,1024] parameter(0)
  {line}
  ROOT %{computation}.root = f32[8,1024] custom-call(%{computation}.gather), custom_call_target="{target}"
}}

"""


CHAIN = (
    of_chain("started", "AsyncCollectiveStart")
    + of_chain("goes_on", "Other")
    + of_chain("ended", "AsyncCollectiveDone")
)


def module(lines, trips=3, before=""):
    """Return a module with a loop of these lines, and a copy behind it."""
    return f"""\
HloModule step, is_scheduled=true, num_partitions=8

{before}%body (p: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %w = f32[1,1024] constant({{...}})
{lines}  ROOT %r = f32[8] negate(%x)
}}

%cond (q: f32[8]) -> pred[] {{
  %q = f32[8] parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (y: f32[8]) -> f32[8] {{
  %y = f32[8] parameter(0)
  %while = f32[8] while(%y), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
  ROOT %o = f32[8] copy(%while), metadata={{op_name="jit(f)/transpose(jvp(head))/add"}}, backend_config={{"estimated_cycles":"500"}}
}}
"""


def time_of(text, rate, axes=None):
    hlo = Hlo(text)
    rows = [
        SimpleNamespace(
            kind=row.kind, axes=row.axes, name=row.op.instruction.name,
            sent_at_least=row.sent_once * (1 if row.times is None else row.times),
        )
        for row in exchanges(hlo, axes or {"fsdp": 8})
    ]  # fmt: skip
    return program_time(hlo, rows, CLOCK, lambda _: rate, PEAK)


def recorded(name, rate, axes=None):
    with gzip.open(FOLDER / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
        return time_of(file.read(), rate, axes)


SECONDS = 1000 / CLOCK  # of what is computed in a layer


@pytest.mark.parametrize(
    ("lines", "before", "takes", "waits"),
    [
        (HIDDEN, "", 0.5, 0.0),
        (HIDDEN, "", 1.5, 0.5),
        (EXPOSED, "", 0.5, 0.5),
        (FUSED, CHAIN, 0.5, 0.0),
        (FUSED, CHAIN, 1.5, 0.5),
    ],
)
def test_a_layer_waits_for_what_is_not_there_when_it_is_needed(lines, before, takes, waits):
    """Times are in units of what the layer computes."""
    time = time_of(module(lines, before=before), GATHERED / (takes * SECONDS))
    assert time.sending == pytest.approx(3 * takes * SECONDS)
    assert time.exposed == pytest.approx(3 * waits * SECONDS)
    assert time.scheduled == pytest.approx(
        max((1 + LEAST_CYCLES) / 2 * time.computing + time.exposed, time.shortest)
    )
    assert time.shortest <= time.scheduled <= time.longest
    (layer,) = time.timelines
    assert (layer.name, layer.times) == ("forward", 3)
    assert layer.seconds == pytest.approx((1 + waits) * SECONDS)
    assert layer.exposed == pytest.approx(waits * SECONDS)
    (sent,) = (span for span in layer.spans if span.kind == "sending")
    assert sent.what == "all-gather over fsdp"
    assert sent.seconds == pytest.approx(takes * SECONDS)
    (computed,) = (span for span in layer.spans if span.kind == "computing")
    begin = takes if lines is EXPOSED else 0
    assert (computed.begin, computed.end) == pytest.approx((begin * SECONDS, (begin + 1) * SECONDS))
    assert sent.end == pytest.approx(takes * SECONDS if lines is EXPOSED else layer.seconds)
    assert json.loads(json.dumps(time.to_json()))["timelines"][0]["spans"][0]["begin"] == 0.0


def test_links_have_one_collective_after_the_other():
    """Of three that take 0.8 of what each part computes, the last two take 1.6 beside 1."""
    time = time_of(module(TWO), GATHERED / (0.8 * SECONDS))
    (layer,) = time.timelines
    assert layer.exposed == pytest.approx(0.6 * SECONDS)
    ends = {round(span.end / SECONDS, 6) for span in layer.spans if span.kind == "sending"}
    assert ends == {1.0, 2.6}
    assert [span.what for span in layer.spans if span.kind == "computing"] == ["attention", "mlp"]


def test_without_a_loop_it_is_the_step():
    text = module("", trips=0)
    time = time_of(text[: text.index("%body")] + text[text.index("ENTRY") :].replace(
        '%while = f32[8] while(%y), condition=%cond, body=%body, '
        'backend_config={"known_trip_count":{"n":"0"}}', "%while = f32[8] negate(%y)"
    ), 1.0)  # fmt: skip
    (step,) = time.timelines
    assert (step.name, step.times, step.seconds) == ("step", 1, 500 / CLOCK)


def test_recorded_programs_hide_what_they_start_early():
    """The same step: on v5e one of three gathers is an async fusion, on v5p none."""
    hidden, exposed = recorded("mlp-v5e", 1e11), recorded("mlp-v5p", 1e11)
    gather = 8 * 2**20 * 7 / 8 / 1e11
    assert hidden.sending == exposed.sending == pytest.approx(3 * gather)
    assert exposed.exposed == pytest.approx(3 * gather)
    assert hidden.exposed == pytest.approx(2 * gather)
    # Over slow links the products beside it are not enough.
    beside = 2 * 37682 / CLOCK
    slow = recorded("mlp-v5e", 1e10)
    assert slow.exposed == pytest.approx(3 * 10 * gather - beside)
    assert "sending, of which the schedule hides 75.4 us\n" in str(slow)
    assert "sending, of which the schedule hides 0 s\n" in str(exposed)


def test_the_layers_of_a_recorded_step_are_forward_and_backward():
    sizes = {"fsdp": 4, "tp": 2}
    async_, plain = recorded("train-v5e", 1e11, sizes), recorded("train-v5p", 1e11, sizes)
    for time in (async_, plain):
        assert [(row.name, row.times) for row in time.timelines] == [
            ("forward", 3),
            ("backward", 3),
        ]
    # Each gathers seven kernels and sums two activations; of the gathers on v5e five are hidden.
    of_kind = [span.what for span in async_.timelines[0].spans if span.kind == "sending"]
    assert sorted(set(of_kind)) == ["all-gather over fsdp", "all-reduce over tp"]
    assert len(of_kind) == 9
    waiting = [span for span in async_.timelines[0].spans if span.exposed]
    assert len(waiting) == 4
    assert plain.exposed == pytest.approx(plain.sending, rel=1e-3)  # but a small permute
    assert async_.exposed < 0.8 * async_.sending


def test_a_loop_that_is_no_pass_is_a_loop():
    time = recorded("decode-v5e", 1e11, {"fsdp": 4, "tp": 2})
    assert [(row.name, row.times) for row in time.timelines] == [("loop", 4)]


def test_a_loop_of_permutes_is_a_part_of_its_layer():
    time = recorded("windowed-v5e", 1e11)
    assert [(row.name, row.times) for row in time.timelines] == [("forward", 2), ("backward", 2)]
    forward = time.timelines[0]
    assert forward.exposed == 0 < forward.sending
    assert sum(row.times * row.sending for row in time.timelines) == pytest.approx(time.sending)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The HTML report with the time lines of a recorded step."""
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    plan = sr.plan({"w": leaf}, [("w", "fsdp")], {"fsdp": 4, "tp": 2})
    file = tmp_path_factory.mktemp("report") / "page.html"
    time = recorded("train-v5e", 1e11, plan.axis_sizes)
    compiled = jax.jit(lambda params: params["w"] * 2).lower({"w": leaf}).compile()
    program = sr.inspect(compiled, (None,))
    program.axis_sizes = plan.axis_sizes  # the text is of another step
    plan.to_html(file, sections=[program, time])
    return file, time


def test_browser_shows_the_time_line_of_a_layer(report):
    file, time = report
    with chromium() as browser:
        if browser is None:
            pytest.skip("no chromium")
        page = browser.new_page()
        page.goto(file.as_uri())
        charts = page.locator(".timeline")
        assert charts.count() == 2
        label = charts.nth(0).get_attribute("aria-label")
        assert label.startswith("Time line, forward, 3 times: 169 us, of which 138 us")
        assert page.inner_text("#timelines").count("exposed: the device waits for it") == 1
        rows = page.locator("#timelines table").nth(0).locator("tbody tr").all_inner_texts()
        assert "all-reduce over tp\tsending\t21.0 us\t21.0 us" in rows
        page.hover(".timeline .slice.leaf >> nth=0")
        assert "takes" in page.inner_text("#tip")
        # Each box is within the chart, and what waits is at the end of what is sent.
        chart, boxes = charts.nth(0).bounding_box(), charts.nth(0).locator(".slice").all()
        assert len(boxes) == 3 * 9 + sum(
            span.kind == "computing" for span in time.timelines[0].spans
        )
        for box in boxes:
            place = box.bounding_box()
            assert place["x"] + place["width"] <= chart["x"] + chart["width"] + 1
            assert place["y"] + place["height"] <= chart["y"] + chart["height"] + 1
