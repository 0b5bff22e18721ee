"""`sweep`: asks the compiler what it makes of a step on each mesh, with each choice of the user."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

from jax.sharding import AbstractMesh, Mesh

from shardrules._base.arguments import as_tuple, integer, memory_bytes, strings
from shardrules._base.text import (
    brief,
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    record,
    seconds_shown,
    shown,
)
from shardrules._place.mesh import AnyMesh, as_mesh
from shardrules._plan.answers import Answer, Column, Table
from shardrules._plan.plan import Plan
from shardrules._plan.sweep import factorizations, few_heads_notes
from shardrules._program.compiler import is_of_cpus
from shardrules._program.lowering import check_step_on, step_parts
from shardrules._program.memory import Buffer, OutOfMemory
from shardrules._program.topologies.topology import Topology, topology_of, topology_shown
from shardrules._program.verify.prove import BY_CPU, AskedProof, asked_in_order
from shardrules._program.work import ProgramTime

_AXES: Final = ("fsdp", "tp")
SweptOn: TypeAlias = "Topology | str | int | Mesh | AbstractMesh | Mapping[str, int]"
"""Devices whose meshes are tried."""
_COLUMNS: Final = (
    Column("time / batch", is_right=True),
    Column("roofline", is_right=True),
    Column("sent", is_right=True),
    Column("over"),
    Column("HBM", is_right=True),
    Column("memory"),
    Column("why"),
)


@record
class StepSweepRow(NamedTuple):
    """What the compiler makes of a step on one mesh, with one value of each choice."""

    mesh: dict[str, int]
    choices: dict[str, Any]
    peak: int | None
    """Bytes that a device needs, as `Proof.memory` has them; None if it could not be compiled."""
    fits: bool | None
    """Whether a device has them; None if that is not known."""
    sent: dict[str, int]
    """Bytes that a device sends in a step, by mesh axes, such as {"fsdp": 10, "fsdp,tp": 4}."""
    time: ProgramTime | None
    """Bounds of a step's seconds, a roofline; None without described TPUs, or if it was refused."""
    why: str = ""
    """The largest array of what does not fit; or the error of what could not be compiled."""

    @property
    def seconds(self) -> float | None:
        """`time.longest`, where nothing that is sent is hidden; by the choice `batch`, if any."""
        return None if self.time is None else self.time.longest / self.choices.get("batch", 1)


class StepSweep(Answer[StepSweepRow]):
    """A row for each mesh and choice, the best first; `sweep` says which that is."""

    summary: str = ""
    """The devices, and how many rows fit; whether all of them have been tried."""
    is_whole: bool = True
    """False if an interrupt came before all were tried."""
    _heads: tuple[str, ...] = ()
    """As `few_heads_notes` of the plans among the arguments."""

    @property
    def heading(self) -> str:
        """The summary."""
        return self.summary

    @property
    def notes(self) -> list[str]:
        """Lines with axes of more devices than arrays have heads."""
        return [printable(line) for line in self._heads]

    def _json(self) -> dict[str, Any]:
        return {"summary": self.summary, "is_whole": self.is_whole}

    def _row_json(self, row: StepSweepRow) -> dict[str, Any]:
        return (
            row._asdict()
            | {"choices": {name: _plain(value) for name, value in row.choices.items()}}
            | {"time": row.time and row.time.to_json(), "seconds": row.seconds}
        )

    def _body(self) -> list[Table | str]:
        """Return a row for each mesh and choice, without the columns that no row has."""
        names = list(dict.fromkeys(name for row in self for name in row.choices))
        columns = [Column("mesh"), *map(Column, names), *_COLUMNS]
        cells: list[list[Any]] = [
            [
                mesh_shown(row.mesh),
                *(brief(row.choices.get(name)) for name in names),
                row.seconds and "batch" in row.choices and seconds_shown(row.seconds),
                row.time
                and f"{seconds_shown(row.time.shortest)} to {seconds_shown(row.time.longest)}",
                row.sent and bytes_shown(sum(row.sent.values())),
                ", ".join(f"{axes} {bytes_shown(size)}" for axes, size in row.sent.items()),
                row.peak and bytes_shown(row.peak),
                _verdict(row),
                row.why,
            ]
            for row in self
        ]
        filled = [i for i, _ in enumerate(columns) if any(line[i] for line in cells)]
        texts = ([printable(line[i] or "") for i in filled] for line in cells)
        return [Table([columns[i] for i in filled], texts)]


def _verdict(row: StepSweepRow) -> str:
    """Say in words whether it fits; "" if that is not known."""
    if row.peak is None:
        return "not compiled"
    return {None: "", True: "fits", False: "does not fit"}[row.fits]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else brief(value)


def sweep(
    step_on: Callable[..., Any],
    /,
    on: SweptOn,
    axes: Sequence[str] | None = None,
    *,
    hbm: float | str | None = None,
    **choices: Iterable[Any],
) -> StepSweep:
    """Ask the compiler what it makes of a step on each mesh, with each of the user's choices.

    Each row is what `prove` says of that step, by a compiler of its own, two at once; nothing is
    run. On a terminal, stderr shows how far it is. An interrupt returns the rows that are there.

    Args:
        step_on: A function that takes a mesh, and the choices as keywords, and returns (step,
            arguments, outputs) or (step, arguments), as `prove` takes them.
        on: A Topology of TPUs or GPUs, or its name: all meshes of these axes that exist there. A
            number of devices: all meshes of so many, by XLA for CPU. Or one mesh, or its sizes.
        axes: Axes of the meshes. Default: ("fsdp", "tp"); not beside one mesh.
        hbm: Memory of a device, such as "90GB". Default: that of the Topology.
        **choices: Values of each keyword, such as batch=[256, 512], remat=[True, False]; all of
            them are tried with all others.

    Returns:
        A `StepSweep`. What fits comes first, the least `seconds` first, which are for one of
        `batch` if there is such a choice; without a time by the bytes that are sent. Then what
        does not fit, and what could not be compiled, and why.

    Raises:
        ImportError: The compiler is not installed, as for `Topology`.
        TypeError: `step_on` takes no such keyword, or returns no step.
        ValueError: There is no such mesh, or a choice without values.

    Example:
        >>> import jax, shardrules as sr
        >>> def step_on(mesh, batch):
        ...     tree = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
        ...     plan = sr.plan(tree, [("w", "fsdp")], mesh)
        ...     rows = jax.NamedSharding(mesh, jax.P("fsdp"))
        ...     x = jax.ShapeDtypeStruct((batch, 64), "float32", sharding=rows)
        ...     return lambda params, x: x @ params["w"], (plan, x)
        >>> rows = sr.sweep(step_on, {"fsdp": 4}, batch=[128, 256])
        >>> [(row.choices, row.sent) for row in rows]
        [({'batch': 256}, {'fsdp': 12288}), ({'batch': 128}, {'fsdp': 12288})]
    """
    return swept(step_on, on, axes, choices, hbm=hbm, show=_progress)


def swept(
    step_on: Callable[..., Any],
    on: SweptOn,
    axes: Sequence[str] | None,
    choices: Mapping[str, Iterable[Any]],
    *,
    hbm: float | str | None,
    show: Callable[[str], None],
) -> StepSweep:
    """See `sweep`; `show` is told how far it is."""
    check_step_on(step_on)
    values = _checked_choices(step_on, choices)
    room = None if hbm is None else memory_bytes("hbm", hbm)
    meshes = _meshes(on, axes)
    cases = [
        (mesh, dict(zip(values, choice, strict=True)))
        for mesh in meshes
        for choice in product(*values.values())
    ]
    rows: list[StepSweepRow] = []
    plans: list[Plan] = []
    results = asked_in_order(cases, partial(_asked, step_on, room, plans))
    with suppress(KeyboardInterrupt), closing(results) as asked:
        show(f"0 of {len(cases)} programs")
        for row, compiler in asked:
            rows.append(row if compiler is None else _answered(row, compiler))
            show(f"{len(rows)} of {len(cases)} programs")
    if not rows:
        raise KeyboardInterrupt
    topology = topology_of(meshes[0])
    devices = f"{meshes[0].size:,} devices" if topology is None else topology_shown(topology)
    summary = f"{counted(len(rows), 'program')} on {devices}{BY_CPU * is_of_cpus(meshes[0])}"
    if is_cut := len(rows) < len(cases):
        summary += f"; not whole, as it was interrupted: {len(cases):,} were to be tried"
    rows.sort(key=_rank)
    if rows[0].time is None and rows[0].peak is not None and rows[0].fits is not False:
        summary += "; no time is known of these devices: what sends least comes first"
    verdicts = Counter(filter(None, map(_verdict, rows)))
    summary = "; ".join([summary, *(f"{word}: {count:,}" for word, count in verdicts.items())])
    heads = few_heads_notes(plans)
    return StepSweep(rows, summary=summary, is_whole=not is_cut, _heads=heads)


def _checked_choices(
    step_on: Callable[..., Any], choices: Mapping[str, Iterable[Any]]
) -> dict[str, tuple[Any, ...]]:
    """Return the values of each choice, all of which `step_on` takes."""
    values = {name: as_tuple(name, items, "values") for name, items in choices.items()}
    if empty := [name for name, items in values.items() if not items]:
        raise ValueError(f"{empty[0]}: there are no values to try")
    for value in values.get("batch", ()):
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"batch is {shown(value)}; it must be a number above 0")
    signature = inspect.signature(step_on)
    try:
        signature.bind(None, **values)
    except TypeError as error:
        keywords = ", ".join([*signature.parameters][1:]) or "nothing"
        name = getattr(step_on, "__name__", "step_on")
        raise TypeError(f"{name}: {error}; beside the mesh it takes {keywords}") from None
    return values


def _meshes(on: SweptOn, axes: Sequence[str] | None) -> list[AnyMesh]:
    """Return the meshes that are tried."""
    if isinstance(on, Mesh | AbstractMesh | Mapping):
        if axes is not None:
            raise ValueError("axes: on= is one mesh, which has its own")
        return [as_mesh(on, "on")]
    names = strings("axes", _AXES if axes is None else axes)
    if isinstance(on, str):
        on = Topology(on)
    if isinstance(on, Topology):
        return [on.mesh(sizes) for sizes in on.meshes(names)]
    what = "a Topology such as 'v5p:8x8x8', a number of devices, or one mesh"
    count = integer("on", on, 1, what=what)
    return [as_mesh(sizes, "on") for sizes in factorizations(count, names)]


_Case: TypeAlias = tuple[AnyMesh, dict[str, Any]]


def _asked(
    step_on: Callable[..., Any], room: int | None, plans: list[Plan], case: _Case
) -> tuple[StepSweepRow, AskedProof | None]:
    """Start the compiler of a row, and note its plans; or let it say why that cannot be done."""
    mesh, choice = case
    row = StepSweepRow(dict(mesh.shape), choice, None, None, {}, None)
    try:
        parts = step_on(mesh, **choice)
    except Exception as error:  # of the user's function, such as for heads that tp cannot cut
        return row._replace(why=_said(error)), None
    step, args, *outputs = step_parts(parts, "step_on")
    plans += [arg for arg in args if isinstance(arg, Plan)]
    try:
        return row, AskedProof(step, args, on=mesh, outputs=next(iter(outputs), None), hbm=room)
    except Exception as error:
        return row._replace(why=_said(error)), None


def _answered(row: StepSweepRow, compiler: AskedProof) -> StepSweepRow:
    """Wait for the compiler of a row."""
    try:
        proof = compiler.proof()
    except OutOfMemory as refusal:
        return row._replace(peak=refusal.required, fits=False, why=_largest_shown(refusal.buffers))
    except Exception as error:
        return row._replace(why=_said(error))
    sent: Counter[str] = Counter()
    for (names, _), size in proof.program.sent.items():
        sent[",".join(names)] += size
    memory = proof.memory
    return row._replace(
        peak=memory and memory.peak,
        fits=proof.fits,
        sent=dict(sent.most_common()),
        time=proof.time,
        why=_largest_shown(memory.buffers) if memory and proof.fits is False else "",
    )


def _said(error: Exception) -> str:
    """Return what a row says of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _largest_shown(buffers: Sequence[Buffer]) -> str:
    """Return the largest array of what does not fit, and its line."""
    if not buffers:
        return "XLA does not say for which arrays"
    largest = buffers[0]
    where = f" at {largest.place}" if largest.place else f", {largest.what}"
    return f"{bytes_shown(largest.bytes)} of it are {largest.shape}{where}"


def _rank(row: StepSweepRow) -> tuple[bool, bool, float, int]:
    cost = row.seconds
    if cost is None:
        cost = sum(row.sent.values()) / row.choices.get("batch", 1)
    return row.peak is None, row.fits is False, cost, row.peak or 0


def _progress(text: str) -> None:
    """Show on a terminal how far it is."""
    if sys.stderr.isatty():
        print(f"\x1b[K{text} ...", end="\r", file=sys.stderr, flush=True)
