"""`verify`: whether an executable does what was planned.

Checks what it is given, and asks one function for each family of findings. Costs a few look-ups per
leaf beside XLA's time to print the executable. Must not know how findings are shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._arguments import check_real, in_order
from shardrules._plan.findings import Findings
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._text import bytes_shown, counted
from shardrules._verify.calls import call_of
from shardrules._verify.executable import Executable
from shardrules._verify.gathered import gathered, peak
from shardrules._verify.inputs import wanted
from shardrules._verify.placements import dropped, placements
from shardrules._verify.states import changed, not_donated, states, undonated

if TYPE_CHECKING:
    from shardrules._verify.inputs import Wanted


@in_order("compiled", "plan")
def verify(
    compiled: Any,
    inputs: Any,
    outputs: Any = None,
    *,
    hbm: int | None = None,
    large: int = DEFAULT_LARGE,
) -> Findings:
    """Finds where a compiled function differs from the plan, and what that costs.

    Nothing is run. The page "Findings" says from where each finding is read.

    | kind | level | what |
    |---|---|---|
    | input | error, info | arguments that the executable takes in another sharding than planned;
      info for those that jit has dropped, as the function does not use them |
    | output | error | results that come out in another sharding than planned |
    | fixed-point | error, warning | a state that comes out otherwise than it goes in; a warning if
      only its likeness tells that it is one |
    | memory-kind | error | arguments or results in another memory than planned |
    | donation | error, warning | donated arguments whose memory no result takes; a warning if they
      are not states; a warning for large states that are not donated |
    | gathered | error, warning, info | planned arrays of which a device gets more than its part:
      an error if they are returned so; a warning if a loop holds layers, devices do the same work
      with them, or they are experts; info for what FSDP does |
    | peak | error | more memory than `hbm` |

    A warning of donation, gathered or peak may also say that the backend does not tell.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the same of `flax.nnx.jit` or
            `equinox.filter_jit`.
        inputs: A tuple with an entry for each positional argument: a Plan, a tree of PartitionSpecs
            or shardings, one of these for all of the argument, or None for what is not looked at.
            Behind these there may be a dict for keyword arguments.
        outputs: The same for what the function returns. Default: nothing is planned for it.
        hbm: Bytes of memory of a device, for `peak`. Default: it is not asked.
        large: Minimum bytes on a device of what is `gathered`, and of states that are not donated.
            Default: 16 MiB.

    Returns:
        All findings, the worst first.

    Raises:
        TypeError: It is not a compiled function, or something else is planned.
        ValueError: A plan does not fit its argument or the mesh.

    Example:
        >>> import jax, shardrules as sr
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "fsdp")], mesh)
        >>> step = jax.jit(lambda params, x: x @ params["w"])
        >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
        >>> compiled = step.lower(plan.abstract(), x).compile()
        >>> print(sr.verify(compiled, (plan, None), jax.sharding.PartitionSpec()))
        nothing found: 1 of 2 inputs planned, 1 of 1 output planned; peak memory not asked for
        >>> sr.verify(compiled, (plan, None)).raise_for("error")
    """
    if hbm is not None:
        check_real("hbm", hbm)
    check_real("large", large)
    executable = Executable(call_of(compiled, inputs))
    planned_in, planned_out = wanted(executable, inputs, outputs)
    found = states(executable, inputs, outputs)
    return Findings(
        [
            *placements(executable.inputs, planned_in, executable.call.library),
            *placements(executable.outputs, planned_out, executable.call.library),
            *dropped(executable.inputs, planned_in, executable.kept),
            *changed(executable, found),
            *undonated(executable, found),
            *not_donated(executable, found, large),
            *gathered(executable, planned_in, planned_out, found, large),
            *peak(executable, hbm),
        ],
        _scope(planned_in, planned_out, hbm, is_compared=outputs is not None),
    )


def _scope(
    inputs: list[Wanted | None],
    outputs: list[Wanted | None],
    hbm: int | None,
    *,
    is_compared: bool,
) -> str:
    """What is looked at, in words."""
    texts = [
        f"{len(planned) - planned.count(None):,} of {counted(len(planned), side)} planned"
        for side, planned in (("input", inputs), ("output", outputs))
    ]
    if not is_compared and outputs.count(None) == len(outputs):
        texts[1] = "no output compared, as outputs= is not given"
    room = "not asked for" if hbm is None else f"within {bytes_shown(hbm)}"
    return f"{', '.join(texts)}; peak memory {room}"
