"""How long collectives take: over links, between nodes and on a torus, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest

import shardrules as sr
from shardrules._program.solve.price import Machine

# Round numbers: 100 GB/s inside a node of 8, 10 GB/s between them.
NODE = sr.Hardware("node", {"bfloat16": 1e14}, 10**12, 1e12, "NVLink", 1e11, 8, 1e10)
PAYLOAD = 2**30


def seconds(mesh, axes, hardware):
    """The seconds of an all-gather of so many bytes over some axes."""
    machine = Machine(hardware, mesh)
    return machine.seconds("all-gather", axes, machine.sent("all-gather", axes, PAYLOAD))


def test_a_ring_sends_all_but_its_own_part_and_of_a_sum_twice_that():
    sent = Machine(NODE, {"dp": 2, "tp": 4}).sent
    assert sent("all-reduce", ["tp"], PAYLOAD) == 2 * PAYLOAD * 3 / 4
    assert sent("all-gather", ["dp"], PAYLOAD) == PAYLOAD / 2


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
    found = seconds(mesh, list(mesh), NODE)
    assert found == pytest.approx(max(between / 1e10, within / 1e11))


def test_the_torus_gives_each_mesh_axis_a_dimension_and_the_largest_the_rest():
    torus = dataclasses.replace(NODE, link="ICI", link_devices=4096, torus_dimensions=3)
    sent = {
        tuple(mesh.values()): seconds(mesh, ["fsdp"], torus) / (1 - 1 / mesh["fsdp"])
        for mesh in ({"fsdp": 64, "dp": 1}, {"fsdp": 64, "dp": 8}, {"fsdp": 2, "dp": 1})
    }
    whole = PAYLOAD / 1e11
    # All three dimensions; two, beside dp; and one, as two devices have no more.
    assert sent[64, 1] == pytest.approx(whole)
    assert sent[64, 8] == pytest.approx(whole * 3 / 2)
    assert sent[2, 1] == pytest.approx(whole * 3)
