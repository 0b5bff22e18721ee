"""Finds results whose copies differ, since a sum over devices is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jax.sharding import NamedSharding

from shardrules._base.text import and_more
from shardrules._plan.findings import Finding
from shardrules._plan.kinds import axes_used
from shardrules._program.executable import Executable

_MANUAL: Final = "shard_map"
"""In the names of operations that the program itself has put on the devices."""
_SUMS: Final = frozenset({"convolution", "custom-call", "dot", "reduce"})
_NAMED: Final = 2


def differing(executable: Executable) -> Iterator[Finding]:
    """Yield a finding for results that devices have copies of, which are not computed alike.

    XLA's own partitioner keeps copies alike; `shard_map` with `check_vma=False` leaves that to the
    program.
    """
    mesh, hlo = executable.mesh, executable.hlo
    if hlo is None or mesh is None or _MANUAL not in hlo.text:
        return
    found: dict[tuple[frozenset[str], str, tuple[int, ...]], list[int]] = {}
    for leaf, (node, sharding) in enumerate(
        zip(executable.results, executable.outputs.shardings, strict=True)
    ):
        if isinstance(sharding, NamedSharding):
            cut = axes_used(sharding.spec, mesh.shape)
            if axes := executable.variation.of([node]) - cut:
                inputs, line = _causes(executable, node, axes)
                found.setdefault((axes, line, inputs), []).append(leaf)
    for (axes, line, inputs), leaves in found.items():
        yield _finding(executable, axes, line, inputs, leaves)


def _causes(executable: Executable, node: int, axes: frozenset[str]) -> tuple[tuple[int, ...], str]:
    """Return the leaves of the inputs that make copies differ, and the line of the last sum."""
    values, variation, hlo = executable.values, executable.variation, executable.hlo
    assert hlo is not None

    def differing_sources(node: int) -> list[int]:
        return [one for one in values.made_of[node] if axes & variation.of([one])]

    made_of = list(values.reached([node], differing_sources))
    sums = (one for one in made_of if values.opcodes[one] in _SUMS)
    lines = (place for one in sums if (place := hlo.place(values.lines[one])))
    number_of = {node: number for number, node in enumerate(values.parameters)}
    parameters = [number_of[one] for one in made_of if one in number_of]
    leaves = sorted(executable.leaf_of[n] for n in parameters if n in executable.leaf_of)
    return tuple(leaves), str(next(lines, ""))


def _finding(
    executable: Executable,
    axes: frozenset[str],
    line: str,
    inputs: tuple[int, ...],
    leaves: list[int],
) -> Finding:
    names = [axis for axis in executable.mesh.shape if axis in axes]  # type: ignore[union-attr]
    along, at = " and ".join(names), f" at {line}" if line else ""
    call = ", ".join(map(repr, names))
    fix = (
        f"sum it over {along}{at}, and let shard_map check that, check_vma=True; or give it a spec "
        f"that {along} cuts"
    )
    mend = f"jax.lax.psum(x, {call if len(names) == 1 else f'({call})'})"
    if not inputs:
        message = (
            f"copies along {along} differ, by the number of the device, as random keys that are "
            "folded with it do"
        )
        return executable.outputs.finding("info", "differs", message, fix, leaves)
    paths = [executable.inputs.paths[leaf] for leaf in inputs]
    sources = ", ".join([*paths[:_NAMED], *and_more(len(paths), _NAMED, "other")])
    message = (
        f"copies along {along} will differ: each is computed from its own part of {sources}, and "
        f"nothing on the way sums, gathers or exchanges over {along}"
    )
    return executable.outputs.finding("error", "differs", message, fix, leaves, mend=mend)
