"""Counts the products of a program, and those that devices along a mesh axis compute alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._program.dataflow import PRODUCTS
from shardrules._program.flow import is_product

if TYPE_CHECKING:
    from shardrules._program.computation import Computation, Instruction
    from shardrules._program.hlo import Hlo
    from shardrules._program.variation import Variation
    from shardrules._text import Place

_CONTRACTED: Final = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS: Final = re.compile(r"dim_labels=\w+_(\w+)->")


class Product(NamedTuple):
    """Matrix product or convolution of a program."""

    flops: int
    """Floating-point operations of a device in a step; a loop of unknown trip count counts once."""
    axes: frozenset[str]
    """Mesh axes along which devices compute different parts."""
    op_name: str
    place: Place | None


def products(hlo: Hlo, variation: Callable[[], Variation]) -> Iterator[Product]:
    """Yield the products that a module executes."""
    pending, seen = [hlo.entry], {hlo.entry}
    while pending:
        computation = hlo[pending.pop()]
        for instruction in computation.executed:
            if is_product(hlo, instruction):
                yield _product(hlo, variation(), computation, instruction)
            elif instruction.opcode != "fusion":
                pending += [name for name in instruction.callees if name not in seen]
                seen.update(instruction.callees)


def _product(
    hlo: Hlo, variation: Variation, computation: Computation, instruction: Instruction
) -> Product:
    inner = hlo[instruction.callees[0]] if instruction.opcode == "fusion" else computation
    factors = [instruction]
    if instruction.opcode == "fusion":
        factors = [line for line in inner.executed if line.opcode in PRODUCTS]
    once = sum(_flops(inner, factor) for factor in factors)
    times = hlo.times(computation.name)
    axes = variation.of(computation.name, instruction.operands)
    return Product(
        once * (1 if times is None else times),
        axes,
        instruction.op_name or instruction.name,
        hlo.place(instruction),
    )


def _flops(computation: Computation, product: Instruction) -> int:
    """Count the operations of a product: twice its multiplications."""
    result = product.results[0].elements
    shapes = [computation[name].results[0].dims for name in product.operands[:2]]
    if len(shapes) < 2:
        return 0
    if match := _CONTRACTED.search(product.attributes):
        sizes = [shapes[0][int(dim)] for dim in match[1].split(",") if dim]
        return 2 * result * prod(sizes)
    if match := _LABELS.search(product.attributes):
        features = dict(zip(match[1], shapes[1], strict=False)).get("o", 1)
        window: int = prod(shapes[1]) // max(1, features)
        return 2 * result * window
    # A call of a library: of (m, k) and (k, n) the root of all elements is m k n.
    return int(2 * sqrt(prod(shapes[0]) * prod(shapes[1]) * result))
