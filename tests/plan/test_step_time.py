"""The time of a step: each term against arithmetic by hand, and the choices of those who train."""

from __future__ import annotations

import dataclasses
from math import prod

import jax
import pytest

import shardrules as sr
from shardrules import demo
from tests.support import corpus

# Round numbers: 100 TFLOP/s, 1 TB/s of memory, 100 GB/s inside a node of 8, 10 GB/s between them.
NODE = sr.Hardware("node", {"bfloat16": 1e14, "int8": 2e14}, 10**12, 1e12, "NVLink", 1e11, 8, 1e10)
WIDTH = 4096
MATRIX = 2 * WIDTH**2


def layers(count=1, dtype="bfloat16"):
    up = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), dtype)
    down = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), dtype)
    return {f"layer_{i}": {"up": {"kernel": up}, "down": {"kernel": down}} for i in range(count)}


FSDP = [("kernel", "fsdp")]
TENSOR = [("up", (None, "tp")), ("down", ("tp", None))]


def test_compute_is_six_operations_for_each_element_and_token():
    plan = sr.plan(layers(2), FSDP, {"fsdp": 4})
    time = plan.step_time(tokens=2**20, hardware=NODE)
    assert time.compute == pytest.approx(6 * 2**20 * 2 * 8 * WIDTH**2 / 4 / 1e14)
    half = plan.step_time(tokens=2**20, hardware=NODE, efficiency=0.5)
    assert half.compute == 2 * time.compute
    assert time.total == time.compute
    assert (time.utilization, half.utilization) == (pytest.approx(1), pytest.approx(0.5))
    int8 = plan.step_time(tokens=2**20, hardware=NODE, schedule={"activations": "int8"})
    assert int8.compute == time.compute / 2


def test_work_that_no_axis_divides_is_done_again():
    plan = sr.plan(layers(), FSDP, {"fsdp": 2, "tp": 4})
    time = plan.step_time(tokens=2**20, hardware=NODE)
    alone = plan.on_mesh({"fsdp": 2}).step_time(tokens=2**20, hardware=NODE)
    assert time.compute == alone.compute
    assert time.utilization == pytest.approx(1 / 4)


def test_memory_is_what_products_and_the_update_read_and_write():
    plan = sr.plan(layers(), FSDP, {"fsdp": 4})
    tokens = 2**10
    time = plan.step_time(
        tokens=tokens, hardware=NODE, gradients="float32", optimizer=("float32", "float32")
    )
    kernels = 2 * 4 * MATRIX
    activations = 2 * 2 * (tokens / 4) * 5 * WIDTH
    held = (1 + 2 + 2 + 2) * kernels / 4
    assert time.memory == pytest.approx((3 * (kernels + activations) + 2 * held) / 1e12)


def test_a_kernel_without_a_sign_of_its_input_reads_as_much():
    kernel = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), "bfloat16")
    for spec in (("fsdp", "tp"), ("tp", "fsdp")):
        known, unknown = (
            sr.plan(tree, [("", spec)], {"fsdp": 4, "tp": 2}).step_time(tokens=2**16, hardware=NODE)
            for tree in ({"up": {"kernel": kernel}}, {"a": kernel})
        )
        assert unknown.uncounted == ("a",)
        assert unknown.memory == known.memory
        assert unknown.compute == known.compute


def test_parameters_are_gathered_twice_and_gradients_scattered_in_the_time_of_compute():
    plan = sr.plan(layers(), FSDP, {"fsdp": 8})
    time = plan.step_time(tokens=2**10, hardware=NODE)
    assert time.sent == {("fsdp",): pytest.approx(3 * 2 * 4 * MATRIX * 7 / 8 / 1e11)}
    assert (time.alone, time.total, time.dominant) == (0, time.sent["fsdp",], "fsdp")
    after = plan.step_time(tokens=2**10, hardware=NODE, overlap=["params"])
    assert after.alone == pytest.approx(time.sent["fsdp",] / 3)
    assert after.total == pytest.approx(
        max(after.compute, after.memory, 2 * after.alone) + after.alone
    )


def test_activations_are_sent_alone():
    plan = sr.plan(layers(), TENSOR, {"dp": 2, "tp": 4})
    time = plan.step_time(tokens=2**20, hardware=NODE)
    # An all-reduce forward and one backward, of the width of each token in bfloat16.
    assert time.sent["tp",] == pytest.approx(2 * 2 * 2**19 * WIDTH * 2 * 3 / 4 / 1e11)
    assert time.alone == time.sent["tp",]
    assert time.total == pytest.approx(
        max(time.compute, time.memory, time.sent["dp",]) + time.alone
    )
    hidden = plan.step_time(
        tokens=2**20, hardware=NODE, overlap=["params", "gradients", "activations"]
    )
    assert hidden.total == pytest.approx(hidden.compute)


@pytest.mark.parametrize(
    ("mesh", "over", "inside"),
    [
        ({"fsdp": 64}, (), {"fsdp": 8}),
        ({"fsdp": 8, "tp": 8}, (), {"fsdp": 1, "tp": 8}),
        ({"fsdp": 16, "tp": 4}, (), {"fsdp": 2, "tp": 4}),
        ({"tp": 4, "fsdp": 16}, (), {"tp": 1, "fsdp": 8}),
        ({"fsdp": 12}, (), {"fsdp": 6}),
        ({"dp": 2, "fsdp": 4}, ("dp",), {"dp": 1, "fsdp": 4}),
        ({"fsdp": 4, "dp": 2}, ("dp",), {"fsdp": 4, "dp": 1}),
        ({"fsdp": 2, "tp": 2}, ("fsdp", "tp"), {"fsdp": 1, "tp": 1}),
    ],
)
def test_bytes_between_nodes_are_counted_device_by_device(mesh, over, inside):
    """An all-gather in two steps, between nodes and then inside of them, played through.

    Each device has a shard; it gets those of its peers in other nodes, then all of its own node's.
    """
    plan = sr.plan(layers(), [("kernel", tuple(mesh))], mesh)
    batch = {"batch_axes": tuple(mesh), "gathers": 1}
    time = plan.step_time(tokens=2**10, hardware=NODE, axes_over_dcn=over, schedule=batch)
    (axes,) = time.sent
    devices = prod(mesh[axis] for axis in axes)
    near = prod(inside[axis] for axis in axes)
    shard = 2 * 4 * MATRIX // devices
    between = (devices // near - 1) * shard
    within = (near - 1) * shard * (devices // near)
    assert between + within == (devices - 1) * shard
    # The gradients' reduce-scatter goes the same way back.
    assert time.sent[axes] == pytest.approx(2 * max(between / 1e10, within / 1e11))


def test_the_torus_gives_each_mesh_axis_a_dimension_and_the_largest_the_rest():
    torus = dataclasses.replace(NODE, link="ICI", link_devices=4096, torus_dimensions=3)
    sent = {}
    for mesh in ({"fsdp": 64, "dp": 1}, {"fsdp": 64, "dp": 8}, {"fsdp": 2, "dp": 1}):
        plan = sr.plan(layers(), FSDP, mesh)
        schedule = {"gathers": 2, "batch_axes": ("fsdp",)}
        time = plan.step_time(tokens=2**10, hardware=torus, schedule=schedule)
        sent[tuple(mesh.values())] = time.sent["fsdp",] / (1 - 1 / mesh["fsdp"])
    whole = 3 * 2 * 4 * MATRIX / 1e11
    # All three dimensions; two, beside dp; and one, as two devices have no more.
    assert sent[64, 1] == pytest.approx(whole)
    assert sent[64, 8] == pytest.approx(whole * 3 / 2)
    assert sent[2, 1] == pytest.approx(whole * 3)


def test_fsdp_on_a_v5p_slice_needs_as_many_tokens_as_the_book_says():
    """ "How to Scale Your Model", Training: compute-bound from FLOP/s / (bytes/s of all links).

    With 4.59e14 and three axes of 1.8e11 these are 850 tokens a chip; with Google's 2.0e11, 765.
    """
    plan = sr.plan(layers(), FSDP, {"fsdp": 512})
    bounds = {}
    for links in (600e9, 540e9):
        device = dataclasses.replace(sr.Hardware.named("v5p"), link_bytes_per_second=links)
        chosen = [
            plan.step_time(tokens=512 * tokens, hardware=device).dominant
            for tokens in range(700, 900, 5)
        ]
        bounds[links] = range(700, 900, 5)[chosen.index("compute")]
        assert chosen == sorted(chosen, reverse=True)
    assert bounds == {600e9: 765, 540e9: 850}


def test_text_has_all_terms_and_all_assumptions():
    plan = sr.plan(layers(), FSDP, {"fsdp": 8})
    text = str(plan.step_time(tokens=2**20, hardware="H100", axes_over_dcn=["fsdp"]))
    for part in ("compute", "memory", "sent over fsdp", "hardware=H100", "axes_over_dcn=fsdp",
                 "overlap=params,gradients", "efficiency=1.0", "tokens=1048576", "gathers=2"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes_over_dcn": ["data"]}, "axes_over_dcn: the mesh fsdp=8 has no axis 'data'"),
        ({"overlap": ["parms"]}, "overlap.*'parms'; it must be one of 'params', 'gradients'"),
        ({"efficiency": 0}, "efficiency is 0"),
        ({"efficiency": 40}, "above 0 and at most 1"),
        ({"hardware": "v6p"}, "hardware|there are no figures for 'v6p'"),
        ({"schedule": {"expert_per_token": 8}}, "schedule.*'experts_per_token'"),
        ({"schedule": {"activations": "float64"}}, "H100 has no figure for products in float64"),
        ({"schedule": {"tokens": 3}}, "schedule: an argument is 'tokens'"),
    ],
)
def test_what_is_wrong_is_told(wrong, message):
    plan = sr.plan(layers(), FSDP, {"fsdp": 8})
    with pytest.raises(ValueError, match=message):
        plan.step_time(**{"tokens": 2**20, "hardware": "H100", **wrong})


EASYDEL = "easydel__deepseek_v3-DeepseekV3Config-v0.2.0"
ADAM = {"gradients": "bfloat16", "optimizer": ("float32", "float32")}
SPARSE = {"experts_per_token": 8}


def best(model, rules, axes, schedule=None, **asked):
    plan = sr.plan(corpus.manifest(model).nested(corpus.abstract), rules, dict.fromkeys(axes, 1))
    names = [axis for axis in axes if axis != "sp"]
    fixed = {"sp": 1} if "sp" in axes else None
    rows = plan.sweep(axes=names, fixed=fixed, schedule=schedule, **ADAM, **asked)
    assert all(row.time is not None for row in rows)
    return rows


@pytest.mark.parametrize("hardware", ["H100", "v5p"])
def test_deepseek_v3_on_512_devices(hardware):
    """DeepSeek trained it without tensor parallelism, for its traffic (2024, section 3.2).

    A step had 15,360 sequences of 4,096 tokens. Of 512 H100, tp=8 is inside a node, tp=64 is not.
    """
    rules = [*demo.EXPERTS, *corpus.rules(EASYDEL)]
    rows = best(corpus.DEEPSEEK, rules, ("fsdp", "tp", "sp"), devices=512, tokens=15_360 * 4096,
                hardware=hardware, schedule=SPARSE)  # fmt: skip
    assert rows[0].mesh == {"fsdp": 512, "tp": 1, "sp": 1}
    assert rows[0].fits
    assert rows[0].time.dominant == "compute"
    place = [row.mesh["tp"] for row in rows]
    assert place == sorted(place)
    assert rows[place.index(64)].time.total > 10 * rows[0].time.total


@pytest.mark.parametrize(
    ("hardware", "devices", "tokens"), [("H100", 512, 4 << 20), ("v5p", 1024, 4 << 20)]
)
def test_llama_405b_at_many_tokens_a_device(hardware, devices, tokens):
    """Thousands of tokens a device: FSDP's traffic is hidden behind compute."""
    rows = best("easylm-llama-3.1-405b", corpus.rules("EasyLM__llama"), ("dp", "fsdp", "mp"),
                devices=devices, tokens=tokens, hardware=hardware)  # fmt: skip
    assert rows[0].mesh == {"dp": 1, "fsdp": devices, "mp": 1}
    assert rows[0].time.dominant == "compute"
    assert rows[0].fits


def test_what_is_faster_by_a_hair_does_not_fill_the_memory():
    """8,192 H100 and 16 M tokens, as when Llama's training began (2024, table 4).

    A mesh that is 4 % faster on paper, and holds 76 GB of 80, leaves no room for activations.
    """
    rows = best("easylm-llama-3.1-405b", corpus.rules("EasyLM__llama"), ("dp", "fsdp", "mp"),
                devices=8192, tokens=16 << 20, hardware="H100")  # fmt: skip
    assert rows[0].mesh["mp"] <= 8
    assert rows[0].bytes < 8 * 10**9
    assert min(row.time.total for row in rows if row.fits) < rows[0].time.total


def test_llama_405b_at_few_tokens_a_device():
    """256 tokens a device: pure FSDP is bound by its traffic, so tensor parallelism pays.

    "How to Scale Your Model", Training: from 850 tokens a v5p chip down to a hundred, FSDP is mixed
    with tensor parallelism, of the order of 10. It sends activations beside compute.
    """
    rows = best("easylm-llama-3.1-405b", corpus.rules("EasyLM__llama"), ("fsdp", "mp"), devices=4096,
                tokens=256 * 4096, hardware="v5p", overlap=["params", "gradients", "activations"])  # fmt: skip
    assert 2 <= rows[0].mesh["mp"] <= 16
    (pure,) = [row for row in rows if row.mesh["mp"] == 1]
    assert pure.time.dominant == "fsdp"
    assert pure.time.total > 1.2 * rows[0].time.total


@pytest.mark.parametrize("hardware", ["H100", "v5p"])
def test_mixtral_fits_only_with_tensor_parallelism_of_a_node(hardware):
    """EasyDeL's rules cut the 8 experts by fsdp, so that fsdp=8 is the most that cuts them.

    What fits beside Adam has tp in addition, at most 8 of it: a node's.
    """
    rules = corpus.rules("easydel__mixtral-MixtralConfig-v0.1.4")
    rows = best("easydel-mixtral-8x22b", rules, ("dp", "fsdp", "tp", "sp"), devices=128,
                tokens=4 << 20, hardware=hardware, schedule={"experts_per_token": 2})  # fmt: skip
    assert rows[0].fits
    assert rows[0].mesh["tp"] <= 8
    assert rows[0].mesh["fsdp"] <= 8
    least = min(row.mesh["tp"] for row in rows if row.fits)
    assert rows[0].mesh["tp"] == least


@pytest.mark.parametrize(
    ("model", "rules", "axes"),
    [
        ("flax-gpt2", "easydel__gpt2-GPT2Config-v0.2.0", ("dp", "fsdp", "tp", "sp")),
        ("flax-gpt-j-6b", "EasyLM-yizhongw__gptj", ("dp", "fsdp", "mp")),
        ("lwm-7b-scanned", "LWM__llama-scan_layersFalse", ("dp", "fsdp", "tp", "sp")),
    ],
)
@pytest.mark.parametrize("hardware", ["A100", "v5e", "7x"])
def test_small_models_are_cut_by_data_axes_alone(model, rules, axes, hardware):
    """Half a million tokens on 8 devices: data parallelism or FSDP, as every recipe for them has."""
    rows = best(model, corpus.rules(rules), axes, devices=8, tokens=1 << 19, hardware=hardware)
    assert rows[0].mesh[{"mp", "tp"}.intersection(axes).pop()] == 1
    assert rows[0].fits


def test_without_tokens_hardware_says_what_fits():
    plan = sr.plan(layers(), FSDP, {"fsdp": 8})
    (row,) = plan.sweep(hardware="v5e")
    assert (row.fits, row.time) == (True, None)
    (row,) = plan.sweep(hardware="v5e", hbm=1)
    assert row.fits is False
    with pytest.raises(ValueError, match="tokens: the time of a step needs hardware="):
        plan.sweep(tokens=1)
    for given in (
        {"axes_over_dcn": ("fsdp",)},
        {"efficiency": 0.5},
        {"overlap": ()},
        {"schedule": {}},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(given))}: it is for the time of a step"):
            plan.sweep(hardware="v5e", **given)


def test_a_time_from_which_traffic_is_missing_does_not_win():
    """Of a kernel without a sign of what is contracted, activations are not counted."""
    odd = jax.ShapeDtypeStruct((256, 256, 256, 256), "bfloat16")
    plan = sr.plan({"a": odd, "b": odd}, [("a|b", ("tp", "fsdp"))], {"fsdp": 4, "tp": 4})
    rows = plan.sweep(
        tokens=2**20, hardware="H100", meshes=[{"tp": 8, "fsdp": 1}, {"tp": 1, "fsdp": 8}]
    )
    assert [row.mesh["tp"] for row in rows] == [1, 8]
    assert rows[1].time.uncounted
    assert "not counted, since roles are unknown: a" in str(rows)


def llama_without_norms(layers, heads, *, is_flat):
    """Stacked kernels of which no norm tells how many layers there are."""
    width, head = 256, 16
    queries = (heads * head,) if is_flat else (heads, head)
    layer = {
        "wq": (width, *queries),
        "wo": (*queries, width),
        "up": (width, 512),
        "down": (512, width),
    }
    return {
        name: jax.ShapeDtypeStruct((layers, *shape), "bfloat16") for name, shape in layer.items()
    }


@pytest.mark.parametrize("layers", [8, 12])
@pytest.mark.parametrize("name", ["layers", "l"])
def test_as_many_layers_as_heads_take_no_longer(layers, name):
    times = [
        sr.plan({name: llama_without_norms(layers, 12, is_flat=flat), "norm": jax.ShapeDtypeStruct((256,), "bfloat16")},
                [("", ())], {"fsdp": 8}).step_time(tokens=2**14, hardware="v6e")
        for flat in (True, False)
    ]  # fmt: skip
    assert times[0].memory == times[1].memory
    assert times[0].total == times[1].total


def test_the_text_says_that_it_is_the_least():
    plan = sr.plan({"up": {"kernel": jax.ShapeDtypeStruct((8192, 32768), "bfloat16")}},
                   [("kernel", "fsdp")], {"fsdp": 16})  # fmt: skip
    first, *_ = str(plan.step_time(tokens=2**22, hardware="v5p")).splitlines()
    assert "a step at best: at most 100% of the peak" in first
