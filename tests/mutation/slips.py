"""Slips that a user could make in a rule list, a mesh or a companion, one at a time.

Each class of slips is a generator from a case to cases that differ in one slip. Must not know what a
check says about them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.specs import entries_of, entry_axes, entry_of

Rule = tuple[Any, Any]


@dataclass(frozen=True)
class Case:
    """A model with rules on a mesh: a real one, or one with a slip in it."""

    model: str
    tree: Any = field(repr=False)
    rules: tuple[Rule, ...] = field(repr=False)
    dialect: sr.dialects.Dialect
    mesh: dict[str, int]
    stacks: tuple[str, ...] = ()
    """Paths of stacked layers, for `stacked`."""
    what: str = "as it is"
    """The slip."""
    meant: dict[str, int] | None = None
    """The mesh that was meant, if the slip is in its axes' names."""

    def plan(self, **changes: Any) -> sr.Plan:
        case = replace(self, **changes)
        rules = sr.Rules(case.rules, case.dialect)
        companions = [sr.stacked(at) for at in case.stacks]
        return sr.plan(case.tree, rules, case.mesh, companions=companions)

    def check(self, plan: sr.Plan) -> sr.types.Findings:
        return plan.check(data_axes=["dp"])


Slips = Callable[[Case], Iterator[Case]]


def _with_rule(case: Case, index: int, rule: Rule, what: str) -> Case:
    rules = (*case.rules[:index], rule, *case.rules[index + 1 :])
    return replace(case, rules=rules, what=f"rule {index} {case.rules[index]!r}: {what}")


def _with_spec(case: Case, index: int, entries: Iterable[Any], what: str) -> Case:
    return _with_rule(case, index, (case.rules[index][0], P(*entries)), what)


def _with_texts(case: Case, slip: Callable[[str], Iterable[str]], what: str) -> Iterator[Case]:
    for index, (text, spec) in enumerate(case.rules):
        for slipped in slip(text):
            if slipped != text and _compiles(slipped):
                yield _with_rule(case, index, (slipped, spec), f"{what}: {slipped!r}")


def _compiles(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def letter_wrong(case: Case) -> Iterator[Case]:
    """In each word of a pattern its middle letter doubled, or two letters swapped."""

    def slip(text: str) -> Iterator[str]:
        for number, word in enumerate(re.finditer(r"(?<!\\)[A-Za-z]{3,}", text)):
            at = (word.start() + word.end()) // 2
            doubled = text[:at] + text[at] + text[at:]
            swapped = text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :]
            yield doubled if number % 2 else swapped

    return _with_texts(case, slip, "a letter is wrong")


def _axes_by_place(case: Case) -> Iterator[tuple[int, int, str]]:
    for index, (_, spec) in enumerate(case.rules):
        for dim, entry in enumerate(entries_of(spec)):
            for axis in entry_axes(entry):
                yield index, dim, axis


def _with_axes(case: Case, index: int, dim: int, change: Callable[[str], str | None], what: str) -> Case:
    entries = list(entries_of(case.rules[index][1]))
    axes = tuple(changed for axis in entry_axes(entries[dim]) if (changed := change(axis)))
    entries[dim] = entry_of(axes)
    return _with_spec(case, index, entries, what)


def axis_misspelt(case: Case) -> Iterator[Case]:
    for index, dim, axis in _axes_by_place(case):
        wrong = axis[0] + axis[1:][::-1] if axis[1:] != axis[1:][::-1] else axis + axis[-1]
        yield _with_axes(case, index, dim, lambda a, axis=axis, wrong=wrong: wrong if a == axis else a,
                         f"axis {axis!r} written {wrong!r}")  # fmt: skip


def axis_forgotten(case: Case) -> Iterator[Case]:
    for index, dim, axis in _axes_by_place(case):
        yield _with_axes(case, index, dim, lambda a, axis=axis: None if a == axis else a,
                         f"axis {axis!r} forgotten in dim {dim}")  # fmt: skip


def rule_deleted(case: Case) -> Iterator[Case]:
    for index, rule in enumerate(case.rules):
        rules = case.rules[:index] + case.rules[index + 1 :]
        yield replace(case, rules=rules, what=f"rule {index} {rule!r} deleted")


def rule_moved_last(case: Case) -> Iterator[Case]:
    for index, rule in enumerate(case.rules[:-1]):
        rules = (*case.rules[:index], *case.rules[index + 1 :], rule)
        yield replace(case, rules=rules, what=f"rule {index} {rule!r} moved behind the last")


def general_rule_first(case: Case) -> Iterator[Case]:
    coverage = case.plan().coverage
    general = sorted(range(len(case.rules)), key=lambda rule: -coverage.matched[rule])[:3]
    for index in general:
        rules = (case.rules[index], *case.rules[:index], *case.rules[index + 1 :])
        yield replace(case, rules=rules, what=f"rule {index} {case.rules[index]!r} moved first")


def dimensions_swapped(case: Case) -> Iterator[Case]:
    for index, (_, spec) in enumerate(case.rules):
        entries = list(entries_of(spec))
        for dim in range(len(entries) - 1):
            swapped = [*entries[:dim], entries[dim + 1], entries[dim], *entries[dim + 2 :]]
            yield _with_spec(case, index, swapped, f"dims {dim} and {dim + 1} swapped")


def dimension_too_many(case: Case) -> Iterator[Case]:
    for index, (_, spec) in enumerate(case.rules):
        yield _with_spec(case, index, [None, *entries_of(spec)], "one dimension too many in front")


def dots_for_slashes(case: Case) -> Iterator[Case]:
    return _with_texts(case, lambda text: [text.replace("/", r"\.")], "dots for slashes")


def mesh_axis_renamed(case: Case) -> Iterator[Case]:
    for axis in case.mesh:
        renamed = {f"{axis}_axis" if name == axis else name: n for name, n in case.mesh.items()}
        yield replace(case, mesh=renamed, meant=case.mesh, what=f"mesh axis {axis!r} renamed")


def mesh_size_that_does_not_divide(case: Case) -> Iterator[Case]:
    for axis, size in case.mesh.items():
        if size > 1:
            for other in (3 * size, size - 1, size + 1, 5 * size):
                yield replace(case, mesh={**case.mesh, axis: other}, what=f"mesh axis {axis}={other}")


def end_of_path(case: Case) -> Iterator[Case]:
    def slip(text: str) -> list[str]:
        return [text.replace("$", "")] if "$" in text else [text + "$", "^" + text]

    return _with_texts(case, slip, "$ or ^ missing or added")


def companion_mistyped(case: Case) -> Iterator[Case]:
    for at in case.stacks:
        for wrong in (at[:-1], at + "s", at + "/*"):
            yield replace(case, stacks=(wrong,), what=f"stacked({wrong!r})")
        yield replace(case, stacks=(), what="no companion: unscanned rules")


CLASSES: dict[str, Slips] = {
    "a letter wrong in a pattern": letter_wrong,
    "an axis misspelt": axis_misspelt,
    "an axis forgotten in a spec": axis_forgotten,
    "a rule deleted": rule_deleted,
    "a rule moved behind the catch-all": rule_moved_last,
    "a general rule first": general_rule_first,
    "dimensions swapped": dimensions_swapped,
    "one dimension too many": dimension_too_many,
    "paths written with dots": dots_for_slashes,
    "a mesh axis renamed": mesh_axis_renamed,
    "a mesh size that does not divide": mesh_size_that_does_not_divide,
    "$ missing or added": end_of_path,
    "a companion mistyped, or scanned with unscanned rules": companion_mistyped,
}
