"""The graph of values of an optimized HLO module: arrays, and what each is made of.

A node is an array, by number. Tuples, calls, fusions and both halves of asynchronous operations are
no nodes: an array within them is made directly of those outside. An array that a loop carries is
one node, made of what the loop begins with and of what a trip returns; so is the result of a
conditional, and the parameter of a computation with several callers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, TypeVar

from shardrules._program.computation import Instruction, Shape
from shardrules._program.hlo import Exchange, Hlo

Tree = int | tuple["Tree", ...]
"""Value of an instruction: a node, or the values of a tuple's elements."""

_Fact = TypeVar("_Fact")
_Node = TypeVar("_Node")
# Calls of TPUs' programs that only move what is in them; others are products.
_HELPERS: Final = {
    "AllocateBuffer": "constant",
    "AssumeGatherIndicesInBound": "copy",
    "ConcatBitcast": "concatenate",
    "GatherScatterIndicesBitpacked": "copy",
}
_TARGET: Final = re.compile(r'custom_call_target="(\w+)"')
_LAYOUT: Final = re.compile(r"\b[a-z][a-z0-9]*\[[0-9,<=]*\](?:\{([\d,]*))?")
_NOTHING: Final = Shape("token", ())
_MOST_RULES: Final = 1000
"""Times that a rule is asked for each value on average, before loops count as endless."""


class Values:
    """Arrays of a module, numbered as they are computed, a loop's before those of its body.

    Args:
        hlo: The module; what no execution reaches, such as the sums of reductions, is left out.
    """

    def __init__(self, hlo: Hlo) -> None:
        self.hlo = hlo
        self.lines: list[Instruction] = []
        """Instruction that makes each node; of a join the loop, conditional or parameter."""
        self.opcodes: list[str] = []
        """Operation of each node, without "-start"."""
        self.computations: list[str] = []
        """Computation in which the instruction of each node is."""
        self.elements: list[int] = []
        """Index of each node among the results of its instruction."""
        self.shapes: list[Shape] = []
        """Dtype and dimensions of each array on a device."""
        self.made_of: list[list[int]] = []
        """Nodes of which each node is computed, in the order of the operands."""
        self._trees: dict[str, dict[str, Tree]] = {}
        self._parameters: dict[str, list[Tree]] = {}
        entry = hlo[hlo.entry]
        arguments = [self._nodes(hlo.entry, line, ()) for line in entry.parameters]
        self.parameters: Sequence[int] = leaves(tuple(arguments))
        """Node of each of the module's parameters."""
        self.outputs: Sequence[int] = leaves(self._run(hlo.entry, arguments))
        """Node of each of the module's results."""

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, computation: str, name: str) -> Sequence[int]:
        """List the nodes that are the result of an instruction; none of what is never executed."""
        tree = self._trees.get(computation, {}).get(name)
        return () if tree is None else leaves(tree)

    @cached_property
    def _by_name(self) -> Mapping[str, Tree]:
        return {name: tree for trees in self._trees.values() for name, tree in trees.items()}

    def at(self, name: str, path: Iterable[int]) -> int | None:
        """Return an array of an instruction by its place in a tuple; None if there is none."""
        tree = self._by_name.get(name, ())
        for place in path:
            if isinstance(tree, tuple):
                tree = tree[place] if place < len(tree) else ()
        return tree if isinstance(tree, int) else None

    def operand(self, exchange: Exchange) -> int:
        """Return the array that a collective moves, as it is before."""
        return self.of(exchange.computation, exchange.instruction.operands[exchange.number])[0]

    def results(self, exchange: Exchange) -> Sequence[int]:
        """List all arrays that the collective of an exchange returns."""
        return self.of(exchange.computation, exchange.instruction.name)

    def order(self, node: int) -> Sequence[int]:
        """List the dimensions of an array, the outermost in memory first."""
        order = _LAYOUT.findall(self.lines[node].type)[self.elements[node]]
        dims = range(len(self.shapes[node].dims))
        return [int(dim) for dim in reversed(order.split(","))] if order else dims

    @cached_property
    def returned(self) -> frozenset[int]:
        """Nodes that are results of the module."""
        return frozenset(self.outputs)

    @cached_property
    def used_by(self) -> Sequence[Sequence[int]]:
        """Nodes that are made of each node, each once."""
        users: list[list[int]] = [[] for _ in self.lines]
        for node, sources in enumerate(self.made_of):
            for source in set(sources) if len(sources) > 1 else sources:
                users[source].append(node)
        return users

    def fixpoint(self, unknown: _Fact, rule: Callable[[int, list[_Fact]], _Fact]) -> list[_Fact]:
        """Compute a fact of each node from those of what it is made of.

        Args:
            unknown: The fact before anything is known, which says nothing where facts meet.
            rule: The fact of a node by those of all nodes; facts may grow, and never shrink.

        Raises:
            LookupError: They do not settle.
        """
        facts = [unknown] * len(self)
        for node in range(len(self)):
            facts[node] = rule(node, facts)
        pending, most = list(self._joins), _MOST_RULES * len(self) + 1
        for _ in range(most):
            if not pending:
                return facts
            node = pending.pop()
            fact = rule(node, facts)
            if fact != facts[node]:
                facts[node] = fact
                pending += self.used_by[node]
        raise LookupError(f"the facts of {len(self):,} values do not settle")

    @cached_property
    def _joins(self) -> Sequence[int]:
        """Nodes that are made of later ones."""
        pairs = enumerate(self.made_of)
        return [node for node, sources in pairs if sources and max(sources) >= node]

    def _run(self, name: str, arguments: Sequence[Tree]) -> Tree:
        """Number the arrays of a computation; return its result."""
        trees, computation = self._trees.get(name), self.hlo[name]
        if trees is not None:
            if computation.root.name not in trees:
                raise LookupError(f"{name} calls itself")
            self._join(tuple(self._parameters[name]), tuple(arguments))
            return trees[computation.root.name]
        trees = self._trees[name] = {}
        is_shared = self.hlo.count_calls(name) > 1
        self._parameters[name] = []
        for line in computation:
            if line.opcode != "parameter":
                trees[line.name] = self._value(
                    name, line, [trees[operand] for operand in line.operands]
                )
                continue
            tree = arguments[line.parameter or 0]
            trees[line.name] = self._joined(name, line, tree) if is_shared else tree
        if is_shared:
            self._parameters[name] = [trees[line.name] for line in computation.parameters]
        return trees[computation.root.name]

    def _value(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        """Return the value of an instruction; of the start of something what its end returns."""
        opcode = line.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _element_of(operands[0], line.element or 0)
        if opcode in _CALLS and line.callees:
            return self._run(line.callees[0], operands)
        if opcode in _SAME or opcode.endswith("-done"):
            return operands[0]
        return _FORMS.get(opcode, Values._nodes)(self, computation, line, operands)

    def _loop(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        called, state = line.called, self._joined(computation, line, operands[0])
        self._run(called["condition"][0], [state])  # which may sum over devices, too
        self._join(state, self._run(called["body"][0], [state]))
        return state

    def _branches(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        branches = zip(line.callees, operands[1:], strict=False)
        first, *others = [self._run(body, [operand]) for body, operand in branches]
        result = self._joined(computation, line, first)
        for tree in others:
            self._join(result, tree)
        return result

    def _custom(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        target = _custom_call_target(line)
        if target.startswith("AsyncCollective"):
            if target.endswith("Done"):
                return operands[1]  # behind what is moved
            starts, results = leaves(operands[0]), leaves(self._nodes(computation, line, ()))
            before = [self.made_of[node][0] for node in starts]
            return (*before, *starts, *results[2 * len(starts) :])
        return self._nodes(computation, line, operands)

    def _each(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        """Add a node for each operand: each result is made of the one in its place."""
        # A start has its operands among its results, and what the backend needs besides.
        shapes = line.results
        first = len(operands) if len(shapes) >= 2 * len(operands) else 0
        nodes = [
            self._node(computation, line, first + i, shapes[first + i], leaves(operand))
            for i, operand in enumerate(operands)
        ]
        return nodes[0] if len(nodes) == 1 else tuple(nodes)

    def _nodes(self, computation: str, line: Instruction, operands: Sequence[Tree]) -> Tree:
        """Add a node for each result of an instruction, made of all operands."""
        made_of, shapes = leaves(operands), line.results
        if len(shapes) <= 1:
            shape = shapes[0] if shapes else _NOTHING
            return self._node(computation, line, 0, shape, made_of)
        numbered = enumerate(shapes)
        return tuple(self._node(computation, line, i, x, [*made_of]) for i, x in numbered)

    def _node(
        self, computation: str, line: Instruction, element: int, shape: Shape, made_of: list[int]
    ) -> int:
        self.computations.append(computation)
        self.lines.append(line)
        self.opcodes.append(_opcode(line))
        self.elements.append(element)
        self.shapes.append(shape)
        self.made_of.append(made_of)
        return len(self.lines) - 1

    def _joined(self, computation: str, line: Instruction, tree: Tree) -> Tree:
        """Add a node for each array of a value, to be made of others as well."""
        numbered = enumerate(line.results)

        def joined(tree: Tree) -> Tree:
            if isinstance(tree, int):
                return self._node(computation, line, *next(numbered), [tree])
            return tuple(map(joined, tree))

        return joined(tree)

    def _join(self, joined: Tree, tree: Tree) -> None:
        nodes, sources = leaves(joined), leaves(tree)
        if len(nodes) != len(sources):
            raise LookupError(f"a call has {len(sources)} arrays for {len(nodes)}")
        for node, source in zip(nodes, sources, strict=True):
            self.made_of[node].append(source)


def reached(starts: Iterable[_Node], step: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """Yield nodes of a graph, and all to which a step leads from them, each once."""
    pending, seen = list(starts), set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += step(node)


def leaves(tree: Tree | Sequence[Tree]) -> list[int]:
    """List the nodes of a value, or of several, in order."""
    if isinstance(tree, int):
        return [tree]
    nodes: list[int] = []
    for element in tree:
        if isinstance(element, int):
            nodes.append(element)
        else:
            nodes += leaves(element)
    return nodes


def _custom_call_target(line: Instruction) -> str:
    match = _TARGET.search(line.attributes)
    return match[1] if match else ""


def _opcode(line: Instruction) -> str:
    if line.opcode == "custom-call":
        return _HELPERS.get(_custom_call_target(line), line.opcode)
    return line.opcode.removesuffix("-start")


def _element_of(tree: Tree, index: int) -> Tree:
    return tree[index] if isinstance(tree, tuple) else tree


_CALLS: Final = frozenset({"async-start", "call", "fusion", "fusion-start"})
_SAME: Final = frozenset({
    "add-dependency", "async-update", "opt-barrier", "optimization-barrier",
})  # fmt: skip
_EACH: Final = ("all-gather", "all-reduce", "collective-permute", "copy", "reduce-scatter")
_FORMS: Final[Mapping[str, Callable[[Values, str, Instruction, Sequence[Tree]], Tree]]] = {
    "while": Values._loop,
    "conditional": Values._branches,
    "custom-call": Values._custom,
    **dict.fromkeys([opcode + end for opcode in _EACH for end in ("", "-start")], Values._each),
}
"""How values are made of those of the operands, but for those that are made of all of them."""
