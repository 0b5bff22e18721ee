"""HTML page of a step: its arrays, and each class of dimensions in its colour; fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Final

from shardrules._base.text import printable

if TYPE_CHECKING:
    from shardrules._estimate.buffers import Memory
    from shardrules._program.step.step import Step

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1c2024; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem .2rem 0; text-align: left; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
.dim { display: inline-block; white-space: nowrap; padding: 0 .45rem; margin: 1px;
  border-radius: .3rem; color: #111;
  background: hsl(var(--hue) 70% 84%); border: 1px solid hsl(var(--hue) 45% 55%); }
.dim.plain { background: #eee; border-color: #bbb; }
@media print { .scroll { overflow: visible; } .dim { white-space: normal; } }
@media (prefers-color-scheme: dark) { body { color: #e6e8ea; background: #16181a; } }
"""
_TURN: Final = 137.508
"""Degrees between the hues of classes: no two near ones are alike."""
_LINES: Final = 20


def step_page(step: Step, memory: Memory) -> str:
    """Return the page: arrays by their dimensions, work by line, memory at the peak."""
    hues = {row: n * _TURN % 360 for n, row in enumerate(_classes(step))}
    title = escape(printable(f"The step {step.name}"))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{_STYLE}</style><main><h1>{title}</h1>",
        f"<p>{step.flops:.3g} FLOPs on all devices.",
        "Dimensions of one colour must be sharded alike.",
        "<h2>Arrays</h2>",
        _html_table("Arrays", ("array", "dtype", "dimensions"), _arrays(step, hues)),
        "<h2>Work</h2>",
        _html_table("Work", ("FLOPs", "operation", "pass", "line"), _work(step)),
        f"<h2>Memory at the peak</h2><p>{escape(printable(str(memory).splitlines()[0]))}",
        _html_table("Memory", ("bytes", "array", "what", "line"), _buffers(memory)),
        *(f"<p>Not looked into: {escape(printable(text))}" for text in step.unmodelled),
        "</main>",
    ]
    return "\n".join(parts) + "\n"


def _classes(step: Step) -> Iterator[int]:
    """Yield the classes of the arguments' dimensions, each once, those of most arrays first."""
    equations = step._equations
    count: dict[int, int] = {}
    for number in equations.body.inputs:
        for dim in equations.values[number].dims:
            for name in equations.dims.classes(dim):
                count[name] = count.get(name, 0) + 1
    yield from sorted(count, key=lambda name: -count[name])


def _arrays(step: Step, hues: dict[int, float]) -> Iterator[tuple[str, ...]]:
    equations, roles = step._equations, step._roles.of
    for path, number in zip(step._paths, equations.body.inputs, strict=True):
        value = equations.values[number]
        dims = []
        for size, dim in zip(value.shape, value.dims, strict=True):
            boxes = [
                f'<span class="dim" style="--hue: {hues[name]:.0f}">'
                f"{escape(roles.get(name, '') or 'no role')} {equations.dims.sizes[name]:,}</span>"
                for name in equations.dims.classes(dim)
            ]
            dims.append(" x ".join(boxes) or f'<span class="dim plain">{size:,}</span>')
        dtype = escape(str(getattr(value.dtype, "name", value.dtype)))
        yield f"<code>{escape(printable(path))}</code>", dtype, " ".join(dims)


def _work(step: Step) -> Iterator[tuple[str, ...]]:
    for row in step.work[:_LINES]:
        yield (
            f"{row.flops:.3g}",
            escape(row.operation),
            escape(row.part),
            escape(printable(row.line)),
        )


def _buffers(memory: Memory) -> Iterator[tuple[str, ...]]:
    for row in memory.buffers[:_LINES]:
        place = "" if row.place is None else str(row.place)
        yield f"{row.bytes:,}", escape(row.shape), escape(printable(row.what)), escape(place)


def _html_table(name: str, heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table that is scrolled where it is wider than the page, by keys too."""
    head = "".join(f"<th scope=col>{text}" for text in heads)
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {name}">'
    lines = ["<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows]
    return "\n".join([f"{box}<table><tr>{head}", *lines, "</table></div>"])
