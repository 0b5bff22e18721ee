"""How long collectives take: over links, between nodes and on a torus, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest

import shardrules as sr
from shardrules._program.solve.machine import machine_of, sent_seconds
from shardrules._program.solve.transmissions import merged

# Round numbers: 100 GB/s inside a node of 8, 10 GB/s between them.
NODE = sr.Hardware("node", {"bfloat16": 1e14}, 10**12, 1e12, "NVLink", 1e11, 8, 1e10)
PAYLOAD = 2**30


def seconds(mesh, axes, machine):
    """The seconds of an all-gather of so many bytes over some axes."""
    rows = merged([("all-gather", axes, "params", 1, PAYLOAD)], mesh)
    sent, alone = sent_seconds(machine, mesh, rows)
    assert alone == 0
    return sent[tuple(axes)]


def test_activations_are_sent_alone():
    mesh = {"dp": 2, "tp": 4}
    rows = merged([("all-reduce", ["tp"], "activations", 1, PAYLOAD),
                   ("all-gather", ["dp"], "params", 1, PAYLOAD)], mesh)  # fmt: skip
    sent, alone = sent_seconds(machine_of(NODE), mesh, rows)
    assert sent["tp",] == pytest.approx(2 * PAYLOAD * 3 / 4 / 1e11) == alone
    assert sent["dp",] == pytest.approx(PAYLOAD / 2 / 1e11)


@pytest.mark.parametrize(
    ("mesh", "inside"),
    [
        ({"fsdp": 64}, {"fsdp": 8}),
        ({"fsdp": 8, "tp": 8}, {"fsdp": 1, "tp": 8}),
        ({"fsdp": 16, "tp": 4}, {"fsdp": 2, "tp": 4}),
        ({"tp": 4, "fsdp": 16}, {"tp": 1, "fsdp": 8}),
        ({"fsdp": 12}, {"fsdp": 6}),
    ],
)
def test_bytes_between_nodes_are_counted_device_by_device(mesh, inside):
    """An all-gather in two steps, between nodes and then inside of them, played through.

    Each device has a shard; it gets those of its peers in other nodes, then all of its own node's.
    """
    devices, near = prod(mesh.values()), prod(inside.values())
    shard = PAYLOAD / devices
    between = (devices // near - 1) * shard
    within = (near - 1) * shard * (devices // near)
    assert between + within == (devices - 1) * shard
    found = seconds(mesh, list(mesh), machine_of(NODE))
    assert found == pytest.approx(max(between / 1e10, within / 1e11))


def test_the_torus_gives_each_mesh_axis_a_dimension_and_the_largest_the_rest():
    torus = dataclasses.replace(NODE, link="ICI", link_devices=4096, torus_dimensions=3)
    sent = {
        tuple(mesh.values()): seconds(mesh, ["fsdp"], machine_of(torus)) / (1 - 1 / mesh["fsdp"])
        for mesh in ({"fsdp": 64, "dp": 1}, {"fsdp": 64, "dp": 8}, {"fsdp": 2, "dp": 1})
    }
    whole = PAYLOAD / 1e11
    # All three dimensions; two, beside dp; and one, as two devices have no more.
    assert sent[64, 1] == pytest.approx(whole)
    assert sent[64, 8] == pytest.approx(whole * 3 / 2)
    assert sent[2, 1] == pytest.approx(whole * 3)
