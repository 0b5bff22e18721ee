"""`shardrules prove`: what the compiler makes of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import click

from shardrules._cli import options
from shardrules._cli.options import FILE, KeyValues, Option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.findings import Findings
    from shardrules._program.program import Program


def _not_sent(key: str) -> str:
    return "" if key != "device" else f"{key} is of check, which counts what is planned"


_BUDGET: Final = KeyValues("what=bytes", options.BYTES.read, _not_sent)


@command("my_package.train:step_on --on v5p:8x8x8 --mesh fsdp=64,tp=8 --budget peak=90GB",
    has_jobs=True)  # fmt: skip
def prove(
    *, function: options.Function,
    on: Annotated[str | None, options.on(help=f"The devices to compile for: {options.DEVICES}. "
        "Without it XLA for CPU is asked: a TPU's partitioner may choose otherwise.")],
    slices: options.Slices, mesh: options.Mesh,
    axis_types: Annotated[str, Option("--axis-types", type=click.Choice(["auto", "explicit"]),
        default="auto", help="Type of the mesh axes.")],
    rules: options.StepRules,
    hbm: Annotated[int | None, options.hbm(help="Memory that the step may need on a device, such "
        "as 90GB. Default: that of the devices of --on.")],
    budget: Annotated[dict[str, int], Option("--budget", type=_BUDGET,
        help="Maximum bytes that a device sends in a step, over a mesh axis (fsdp=25GB), by a kind "
        "of collective (all-gather=20GB) or in all (total=40GB), or needs at once (peak=90GB); "
        "repeatable.")],
    large: Annotated[int, Option("--large", type=options.BYTES, default="16MiB",
        help="Minimum bytes on a device of a gathered array to be reported.")],
    fail_on: options.FailOn,
    time: Annotated[bool, Option("--time", is_flag=True, needs=("on",),
        help="Compile the step to its end, which takes minutes for a large one, and add the time "
        "that the compiler expects.")],
    lock: Annotated[str | None, Option("--lock", type=FILE,
        help="Compare the bytes that are sent, and the peak, with those in this file.")],
    update_lock: Annotated[bool, Option("--update-lock", is_flag=True, in_job=False,
        needs=("lock",), help="Write the file of --lock, instead of comparing with it.")],
    format: Annotated[str, options.formats("text", "json", "github")],
) -> int:  # fmt: skip
    """Ask the compiler for TPUs or GPUs that need not be there what it makes of a step.

    Without FUNCTION, it does so for all jobs of the project file that have one.
    Exits with 1 for findings of at least the level --fail-on, and if the step does not fit.
    """
    from shardrules._base.io import FileError
    from shardrules._base.text import printable_json
    from shardrules._cli import process, sources
    from shardrules._program.memory import OutOfMemory
    from shardrules._program.verify.prove import head_of, prove, time_shown

    if lock and not update_lock and not Path(lock).exists():
        raise FileError(f"{lock}: no such file; write it with --update-lock")
    devices = _mesh_to_prove_on(mesh, on, slices, axis_types)
    step, arguments, *outputs = sources.step_on(function, devices, rules)
    if time:
        process.let_signals_end()
    try:
        with process.working(f"asking the compiler for {on or 'CPUs'}"):
            proof = prove(
                step, *arguments, on=devices, outputs=outputs[0] if outputs else None,
                large=large, hbm=hbm, budget=budget, time=time,
            )  # fmt: skip
    except OutOfMemory as refusal:
        print(f"does not fit: {refusal}")
        return 1
    if lock:
        findings = _with_lock(lock, proof.program, proof.findings, is_new=update_lock)
        proof = proof._replace(findings=findings)
    if format == "json":
        print(printable_json(proof.to_json()))
        return process.exit_code(proof.findings, fail_on)
    process.print_beside(format, head_of(proof), *proof.notes, proof.program, time_shown(proof))
    return process.show_findings(proof.findings, format, fail_on)


def _mesh_to_prove_on(sizes: options.Sizes, on: str | None, slices: int, axis_types: str) -> Any:
    """Return the mesh: on the devices of --on, or without any, for XLA for CPU."""
    from jax.sharding import AbstractMesh, AxisType

    from shardrules._program.topologies.topology import Topology

    types = (AxisType.Explicit if axis_types == "explicit" else AxisType.Auto,) * len(sizes)
    if on is not None:
        return Topology(on, slices).mesh(sizes, axis_types=types)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def _with_lock(lock: str, program: Program, findings: Findings, *, is_new: bool) -> Findings:
    """Write the lock of a program, or add what has grown since it was written."""
    from shardrules._cli.process import hint
    from shardrules._plan.findings import Findings

    if is_new:
        program.lock(lock)
        hint(f"{lock}: what the step sends and needs, for later runs to compare with")
        return findings
    grown = program.diff(Path(lock))
    return Findings([*findings, *grown], f"{findings.scope}; {grown.scope}")
