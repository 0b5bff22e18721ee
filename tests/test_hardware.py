"""The public figures of devices, against a second source; and records of one's own."""

import copy
import dataclasses
import pickle

import pytest

import shardrules as sr
from shardrules._base.hardware import public_hardware
from tests.support.folders import ROOT

# From "How to Scale Your Model" (Austin et al., 2025), chapters "TPUs" and "GPUs": bfloat16 FLOP/s,
# bytes of memory per second, bytes sent per second over all links, DCN. Its ICI figures are what is
# reached, a tenth below Google's.
BOOK = {
    "v4": (2.75e14, 1.2e12, 6 * 4.5e10, 6.25e9),
    "v5e": (1.97e14, 8.2e11, 4 * 4.5e10, 3.125e9),
    "v5p": (4.59e14, 2.8e12, 6 * 9e10, 6.25e9),
    "v6e": (9.2e14, 1.6e12, 4 * 9e10, 12.5e9),
    # Of a chip, which is two devices to JAX.
    "7x": (2.3e15 / 2, 7.4e12 / 2, 6 * 9e10 / 2, 12.5e9 / 2),
    "A100": (3.1e14, 2.0e12, 300e9, 25e9),
    "H100": (9.9e14, 3.4e12, 450e9, 50e9),
    "H200": (9.9e14, 4.8e12, 450e9, 50e9),
    "B200": (2.3e15, 8.0e12, 900e9, 50e9),
    # A chip as B200; NVL72 sends 3.6 TB/s.
    "GB200": (2.3e15, 8.0e12, 900e9, 3.6e12 / 72),
}

# GiB that a program can use, by the TPU compiler's own message about one that is too large; a v4
# chip is two of what it compiles for.
USABLE = {"v4": 2 * 15.25, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "7x": 94.74}


def test_the_memory_of_tpus_is_what_a_program_can_use():
    for name, usable in USABLE.items():
        assert usable - 0.001 < sr.Hardware.named(name).memory_bytes / 2**30 <= usable


@pytest.mark.parametrize("name", list(BOOK))
def test_figures_agree_with_a_second_source(name):
    device = sr.Hardware.named(name)
    figures = (
        device.flops_per_second["bfloat16"],
        device.memory_bytes_per_second,
        device.link_bytes_per_second,
        device.dcn_bytes_per_second,
    )
    for ours, theirs in zip(figures, BOOK[name], strict=True):
        assert ours == pytest.approx(theirs, rel=0.12)
    # GPUs multiply float32 in TF32 at half of the rate, as JAX has it by default; TPUs do it in bfloat16.
    rates = device.flops_per_second
    assert rates.get("float32") == (rates["bfloat16"] / 2 if device.link == "NVLink" else None)
    assert len(device.sources) >= 2
    assert device.torus_dimensions == {"v5e": 2, "v6e": 2}.get(name, 1 if device.link == "NVLink" else 3)


def test_all_public_devices_are_compared_and_on_the_page():
    assert list(public_hardware()) == list(BOOK)
    page = (ROOT / "docs/suggest.md").read_text(encoding="utf-8")
    assert all(page.count(f"\n| {name} | ") == 1 for name in BOOK)


def test_names_are_found_in_any_case_and_others_refused():
    assert sr.Hardware.named("h100") is sr.Hardware.named("H100")
    with pytest.raises(ValueError, match=r"there are some for v4, v5e, .*B200; give those of"):
        sr.Hardware.named("MI300X")


def test_a_record_of_ones_own():
    rack = dataclasses.replace(sr.Hardware.named("B200"), name="NVL72", link_devices=72)
    assert (rack.name, rack.link_devices, rack.memory_bytes) == ("NVL72", 72, 180 * 10**9)
    assert pickle.loads(pickle.dumps(rack)) == rack
    assert len({rack, copy.copy(rack), sr.Hardware.named("v5e")}) == 2  # it had no hash, as a field is a dict
