"""Compares a compiled function with the plan: `verify`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from shardrules._base.arguments import byte_size, check_type, memory_bytes
from shardrules._base.io import collector_paused
from shardrules._base.mistakes import in_order
from shardrules._base.text import brief, bytes_shown, counted, nearest
from shardrules._place.mesh import AnyMesh
from shardrules._plan.findings import Finding, Findings
from shardrules._plan.kinds import DEFAULT_LARGE
from shardrules._program.executable import Executable, states
from shardrules._program.hlo import hlo_errors
from shardrules._program.inputs import other_kinds, planned_targets
from shardrules._program.libraries import call_of
from shardrules._program.lock import KINDS, most_sent
from shardrules._program.program import Program, batches
from shardrules._program.verify.placements import (
    changed,
    closed_over,
    dropped,
    large_results,
    not_donated,
    nothing_planned,
    placements,
    undonated,
    without_sharding,
)
from shardrules._program.verify.unexpected import (
    computed_alike,
    differing,
    gathered,
    kept_activations,
    unexpected,
)


@in_order("compiled", "plan")
def verify(
    compiled: Any,
    inputs: Any,
    outputs: Any = None,
    *,
    hbm: float | str | None = None,
    large: float | str = DEFAULT_LARGE,
    budget: Mapping[str, int | str] | None = None,
) -> Findings:
    """Find where a compiled function differs from the plan, and what that costs.

    Nothing is run. The page "Findings" says what each kind means.

    | you have | it looks |
    |---|---|
    | rules, and a tree of shapes | `plan.check()` |
    | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
    | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
    | live arrays | `sr.audit(params, plan)` |
    | a small step, and this machine | `sr.rehearse(step_on, {"fsdp": 4, "tp": 2})` |

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the same of `flax.nnx.jit` or
            `equinox.filter_jit`.
        inputs: A tuple with an entry for each positional argument: a Plan, a tree of PartitionSpecs
            or shardings, one of these for all of the argument, or None for what is not looked at.
            Behind these there may be a dict for keyword arguments.
        outputs: The same for what the function returns. Default: nothing is planned for it.
        hbm: Bytes of memory of a device, as a number or "95 GB", for `peak`. Default: it is not
            asked.
        large: Minimum bytes on a device of what is `gathered`, and of states that are not donated.
            Default: 16 MiB.
        budget: Bytes, as a number or "25 GB", by what they are of: "peak" is the memory that a
            device needs at most; all else is what a device sends in a step: "total", mesh axes
            ("fsdp"), a kind of collective ("all-gather"), or both ("fsdp all-gather"). An axis
            counts each collective over it, also over it and others; "data,fsdp" those over both.

    Returns:
        All findings, the worst first.

    Raises:
        TypeError: It is not a compiled function, or something else is planned.
        ValueError: A plan does not fit its argument or the mesh, or the budget is for an axis that
            the mesh lacks; or the backend does not show what it has compiled.

    Example:
        >>> import jax, shardrules as sr
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "fsdp")], mesh)
        >>> step = jax.jit(lambda params, x: x @ params["w"])
        >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
        >>> compiled = step.lower(plan.abstract(), x).compile()
        >>> print(sr.verify(compiled, (plan, None), jax.sharding.PartitionSpec(), hbm=95e9))
        nothing found: 1 of 2 inputs planned, 1 of 1 output planned; peak memory within 95.0 GB
        >>> sr.verify(compiled, (plan, None)).raise_for("error")
    """
    with collector_paused():  # until what is read is gone
        return findings_and_program(compiled, inputs, outputs, hbm=hbm, large=large, budget=budget)[
            0
        ]


def findings_and_program(
    compiled: Any,
    inputs: Any,
    outputs: Any,
    *,
    hbm: float | str | None,
    large: float | str,
    budget: Mapping[str, int | str] | None,
    log: str = "",
    unplaced: Sequence[Sequence[bool]] = (),
) -> tuple[Findings, Program]:
    """Return what `verify` finds, and the report of `inspect`.

    `log` has XLA's warnings; `unplaced` says for each leaf of each argument whether nothing placed
    it.
    """
    if hbm is not None:
        hbm = memory_bytes("hbm", hbm)
    large = byte_size("large", large)
    executable = Executable(call_of(compiled, inputs))
    limits = limits_of({} if budget is None else budget, executable.mesh)
    library = executable.call.library
    in_targets, out_targets = planned_targets(executable, inputs, outputs)
    of_step = states(executable, inputs, outputs)
    program = Program(executable, of_step, batches(in_targets, of_step))
    with hlo_errors():
        findings = [
            *(() if limits else nothing_planned(in_targets + out_targets)),
            *placements(executable.inputs, in_targets, library),
            *placements(executable.outputs, out_targets, library),
            *without_sharding(executable, in_targets, unplaced, large),
            *dropped(executable.inputs, in_targets, executable.kept),
            *closed_over(executable, large),
            *_for_other_devices(executable, (inputs, outputs)),
            *differing(executable),
            *large_results(executable.outputs, out_targets, of_step, large),
            *changed(executable, of_step),
            *undonated(executable, of_step),
            *not_donated(executable, of_step, large),
            *gathered(program, in_targets, large),
            *unexpected(program, large, log),
            *computed_alike(program, in_targets),
            *kept_activations(program, large),
            *chain.from_iterable(_over_budget(program, limit) for limit in limits),
        ]
        if hbm is not None:
            findings += _over_peak(program, "peak", hbm)
    scope = [
        f"{len(targets) - targets.count(None):,} of {counted(len(targets), side)} planned"
        for side, targets in (("input", in_targets), ("output", out_targets))
    ]
    if outputs is None and not any(out_targets):
        scope[1] = "no output compared, as outputs= is not given"
    peak = "not compared, as hbm= is not given" if hbm is None else f"within {bytes_shown(hbm)}"
    budgets = f"; {counted(len(limits), 'budget')} kept" if limits else ""
    return Findings(findings, f"{', '.join(scope)}; peak memory {peak}{budgets}"), program


def _for_other_devices(executable: Executable, planned: Any) -> Iterator[Finding]:
    """Yield a finding if the program is not the one that runs on the plan's devices."""
    if kinds := other_kinds(executable, planned):
        assert executable.mesh is not None
        message = (
            f"compiled for {executable.device_kind} devices, and planned on "
            f"{', '.join(kinds)}: this is not the program that will run there, whose collectives "
            "and memory are others"
        )
        fix = "compile it for those: shardrules.prove(step, ..., on=mesh)"
        yield Finding("info", "input", message, fix)


# Budgets.

_WORDS: Final = ("total", "peak")


class Limit(NamedTuple):
    """Entry of a budget."""

    key: str
    axes: frozenset[str]
    """Mesh axes that a collective is over, alone or with others."""
    kinds: tuple[str, ...]
    bytes: int


def limits_of(budget: Any, mesh: AnyMesh | None) -> list[Limit]:
    """Parse a budget for a program on a mesh.

    Raises:
        TypeError: It is no mapping of texts to bytes.
        ValueError: A key names no axis and no kind, or a text is no number of bytes.
    """
    check_type("budget", budget, Mapping, "a dict such as {'fsdp': '25 GB', 'peak': '90 GB'}")
    axes = () if mesh is None else mesh.axis_names
    return [_limit(key, value, axes) for key, value in budget.items()]


def _limit(key: Any, value: Any, axes: Sequence[str]) -> Limit:
    check_type("a key of budget", key, str, "a mesh axis, a kind of collective, total or peak")
    name = f"budget[{brief(key)}]"
    key, size = key.strip(), byte_size(name, value)
    if key in _WORDS:
        return Limit(key, frozenset(), KINDS, size)
    words = re.split(r"[,\s]+", key)
    for word in words:
        if word not in (*axes, *KINDS):
            near = nearest(word, [*axes, *KINDS, *_WORDS])
            raise ValueError(
                f"{name}: {brief(word)} is no mesh axis and no kind of collective"
                + (f" (did you mean {near}?)" if near else "")
                + f"; the program has {'the axes ' + ', '.join(axes) if axes else 'no mesh'}; "
                f"kinds are {', '.join(KINDS)}; or write total or peak"
            )
    kinds = tuple(word for word in words if word in KINDS)
    return Limit(key, frozenset(words) - {*KINDS}, kinds or KINDS, size)


def _over_peak(program: Program, kind: Literal["budget", "peak"], most: int) -> Iterator[Finding]:
    """Yield a finding if a device needs more bytes than it has, or than it may need."""
    totals = program.totals
    if totals is None:
        message = "peak: this backend does not tell the memory of executables: it is not known"
        yield Finding("warning", kind, message, "verify the same function on another backend")
    elif (excess := totals.peak - most) > 0:
        message = (
            f"peak: each device needs {bytes_shown(totals.peak)} ({totals}), "
            f"{bytes_shown(excess)} over the {'budget' if kind == 'budget' else 'memory'} of "
            f"{bytes_shown(most)}"
        )
        fix = (
            "cut more of the arguments or activations, rematerialize, donate the state, or take a "
            "smaller batch"
        )
        yield Finding("error", kind, message, fix, bytes=excess)


def _over_budget(program: Program, limit: Limit) -> Iterator[Finding]:
    """Yield a finding if more is sent or needed than the limit, or that is not known."""
    if limit.key == "peak":
        yield from _over_peak(program, "budget", limit.bytes)
        return
    rows = [
        row for row in program.collectives if limit.axes <= {*row.axes} and row.kind in limit.kinds
    ]
    size, endless = sum(row.sent_at_least for row in rows), [r for r in rows if r.times is None]
    least = "at least " if endless else ""
    if (excess := size - limit.bytes) > 0:
        message = (
            f"{limit.key}: each device sends {least}{bytes_shown(size)} in a step, "
            f"{bytes_shown(excess)} over the budget of {bytes_shown(limit.bytes)}: "
            f"{most_sent(rows)}"
        )
        fix = "send or keep less there; or, if it is meant, raise the budget"
        yield Finding("error", "budget", message, fix, bytes=excess)
    elif endless:
        message = (
            f"{limit.key}: each device sends {bytes_shown(size)} with one iteration of each loop "
            f"whose trip count is not known: whether that is within {bytes_shown(limit.bytes)} in "
            f"a step is not known: {most_sent(endless)}"
        )
        fix = "let the loop have a constant number of iterations, or leave out this budget"
        yield Finding("warning", "budget", message, fix, bytes=size)
