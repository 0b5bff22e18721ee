"""Counts the collectives of an optimized HLO text, line by line, with nothing of the library.

It knows the forms of the recorded texts alone, and stops at what it does not know: a second,
independent reading to compare a reader with.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64"), 64),
}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[[^\]]*\][^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\}|\{\})"
)


class Line(NamedTuple):
    """An instruction, as text in its parts."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    rest: str

    def attribute(self, key: str) -> str:
        match = re.search(rf"\b{key}=%?([\w.-]+)", self.rest)
        return match[1] if match else ""


class Computation(dict[str, Line]):
    """Instructions by name, and the name of the root."""

    root = ""


Module = dict[str, Computation]


def parse(text: str) -> tuple[Module, str]:
    """The computations, and the entry's name."""
    module: Module = {}
    entry = ""
    current = None
    for row in text.split("\n"):
        if current is None:
            header = re.match(r"(ENTRY )?%([^\s(]+) \(.*\{$", row)
            if header:
                current = module[header[2]] = Computation()
                entry = header[2] if header[1] else entry
        elif row.startswith("}"):
            current = None
        else:
            is_root, line = _line(re.sub(r"/\*.*?\*/", "", row))
            current[line.name] = line
            current.root = line.name if is_root else current.root
    return module, entry


def _line(row: str) -> tuple[bool, Line]:
    is_root = row.lstrip().startswith("ROOT ")
    name, _, value = row.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(value, 0) + 1 if value.startswith("(") else value.index(" ")
    opened = value.index("(", end)
    closed = _closing(value, opened)
    inside = value[opened + 1 : closed]
    opcode = value[end:opened].strip()
    return is_root, Line(name[1:], value[:end], opcode, tuple(_NAME.findall(inside)), inside, value[closed + 1 :])


def _closing(text: str, opened: int) -> int:
    depth = 0
    for place in range(opened, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(text)


def size(shape: str) -> int:
    return sum(prod(int(n) for n in dims.split(",") if n) * _BITS[dtype] // 8 for dtype, dims in _ARRAY.findall(shape))


def trips(module: Module, computation: Computation, loop: Line) -> int | None:
    """Trip count that XLA knows, or of a loop that counts from a constant to another."""
    counted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if counted:
        return int(counted[1])
    condition = module[loop.attribute("condition")]
    compare = condition[condition.root]
    if compare.opcode != "compare" or "direction=LT" not in compare.rest:
        return None
    counter, bound = (condition[name] for name in compare.operands)
    if counter.opcode != "get-tuple-element" or bound.opcode != "constant":
        return None
    element = int(counter.attribute("index"))
    body = module[loop.attribute("body")]
    add = body[body[body.root].operands[element]]
    step = next(body[name] for name in add.operands if body[name].opcode == "constant")
    assert add.opcode == "add", add
    first = computation[computation[loop.operands[0]].operands[element]]
    while first.opcode == "copy":
        first = computation[first.operands[0]]
    assert first.opcode == "constant", first
    return -(-(int(bound.literal) - int(first.literal)) // int(step.literal))


def _calls(module: Module, computation: Computation) -> Iterator[tuple[str, int | None, bool, Line]]:
    """Called computations whose instructions are executed: name, how often, if in a branch."""
    for line in computation.values():
        if line.opcode == "while":
            yield line.attribute("body"), trips(module, computation, line), False, line
        elif line.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
            names = _NAME.findall(branches[1]) if branches else []
            for key in ("true_computation", "false_computation"):
                names += [line.attribute(key)] if line.attribute(key) else []
            for name in names:
                yield name, 1, True, line
        elif line.opcode == "call":
            yield line.attribute("to_apply"), 1, False, line
        elif line.opcode in ("fusion", "fusion-start", "async-start"):
            yield line.attribute("calls"), 1, False, line


def collectives(text: str) -> list[dict[str, Any]]:
    """A row for each collective that is executed, in the order of a walk from the entry."""
    module, entry = parse(text)
    rows: list[dict[str, Any]] = []

    def walk(name: str, times: int | None, is_branch: bool, caller: Line | None) -> None:
        computation = module[name]
        for line in computation.values():
            row = _row(computation, line)
            if row and not _is_continued(line):
                scatter = name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scatter else row["kind"]
                is_operand = kind == "reduce-scatter"
                rows.append(
                    {
                        **row,
                        "computation": name,
                        "caller": caller.name if caller else None,
                        "kind": kind,
                        "bytes": row["operand_bytes" if is_operand else "result_bytes"],
                        "times": times,
                        "branch": is_branch,
                    }
                )
        for callee, count, is_taken, line in _calls(module, computation):
            product = None if times is None or count is None else times * count
            walk(callee, product, is_branch or is_taken, line)

    walk(entry, 1, False, None)
    return rows


def _is_continued(line: Line) -> bool:
    """Whether this is a later part of a gather that a fusion began before."""
    return '"async_collective_fusion_config"' in line.rest and '"flag_start":"-1"' not in line.rest


def _row(computation: Computation, line: Line) -> dict[str, Any] | None:
    kind = line.opcode.removesuffix("-start")
    if kind not in KINDS:
        assert not line.opcode.startswith(KINDS) or line.opcode.endswith("-done"), line
        return None
    result = line.shape
    if line.opcode.endswith("-start"):
        result = next(x.shape for x in computation.values() if line.name in x.operands)
    groups = _GROUPS.search(line.rest)
    assert groups, line
    operands = line.operands[:1] if kind == "ragged-all-to-all" else line.operands
    return {
        "kind": kind,
        "name": line.name,
        "opcode": line.opcode,
        "operand_bytes": sum(size(computation[name].shape) for name in operands),
        "result_bytes": size(result),
        "groups": groups[1],
    }


def totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Payload bytes of a run by kind; what runs in a loop of unknown length is counted once."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row["kind"]] += row["bytes"] * (row["times"] or 1)
    return dict(sorted(sums.items()))
