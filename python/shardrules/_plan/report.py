"""How a plan is shown: as a line and a table, as JSON, and as a page of HTML with sections.

`Explanation` shows one leaf: how each rule met its path, and which axes it does not get.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shardrules._base.rule_specs import rule_spec_shown
from shardrules._base.specs import spec_shown
from shardrules._base.text import (
    and_more,
    answer,
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    printable_json,
    printable_lines,
    record,
)
from shardrules._plan.answers import Column, Section, Table
from shardrules._plan.kinds import (
    DEFAULT_LARGE,
    Kind,
    decided_shown,
    dtype_shown,
    is_replicated,
    kind_json,
    placement_shown,
    problem_shown,
)
from shardrules._plan.memory import DeviceBytes
from shardrules._rules.patterns import pattern_shown
from shardrules._rules.resolver import rule_lines

if TYPE_CHECKING:
    from shardrules._plan.companions import Companion
    from shardrules._plan.fold import Folded
    from shardrules._plan.plan import Plan
    from shardrules._rules.rules import Rules

_MOST_ROWS: Final = 60
_COLUMNS: Final = (
    Column("path"),
    Column("leaves", is_right=True),
    Column("shape"),
    Column("dtype"),
    Column("rule", is_right=True),
    Column("spec"),
    Column("bytes", is_right=True),
    Column("per device", is_right=True),
)
_RULE_COLUMNS: Final = tuple(
    map(Column, ("rule", "pattern", "spec", "leaves won", "bytes", "per device"))
)


def heading(plan: Plan) -> str:
    """Return the plan in a line."""
    return f"{_size_shown(plan)}: {plan.bytes_per_device()}"


def _size_shown(plan: Plan) -> str:
    return printable(
        f"{counted(len(plan.paths), 'leaf')}, {bytes_shown(plan.total_bytes)} on "
        f"{mesh_shown(plan.axis_sizes)} ({counted(plan.devices, 'device')})"
    )


def plan_parts(plan: Plan) -> list[Any]:
    """Return the heading, and a table of the first rows."""
    rest = and_more(len(plan.folded), _MOST_ROWS, "row")
    return [heading(plan), plan_table(plan, plan.folded[:_MOST_ROWS]), *rest]


def plan_table(plan: Plan, folded: Iterable[Folded]) -> Table:
    """Return a row for each of these folded paths, as texts for people."""
    return Table(_COLUMNS, (_plan_cells(plan, row) for row in folded))


def _plan_cells(plan: Plan, folded: Folded) -> tuple[str, ...]:
    kind, leaves = plan.kinds[folded.group], len(folded.rows)
    return (
        printable(folded.pattern),
        f"{leaves:,}",
        "-" if kind.shape is None else str(list(kind.shape)),
        printable(dtype_shown(kind)),
        printable(decided_shown(kind)),
        printable(problem_shown(kind) or placement_shown(kind)),
        bytes_shown(kind.bytes * leaves),
        bytes_shown(kind.device_bytes * leaves),
    )


def plan_json(plan: Plan, memory: DeviceBytes, hbm: int | None) -> str:
    """Return the plan as a JSON object, with a row for each folded path."""
    leaves = [
        {
            "path": row.pattern,
            "leaves": len(row.rows),
            **kind_json(kind),
            "rule": kind.rule,
            **({} if kind.names is None else {"names": kind.names, "rules": kind.dim_rules}),
            "bytes": kind.bytes * len(row.rows),
            "device_bytes": kind.device_bytes * len(row.rows),
            "lost": [loss.message for loss in kind.losses],
        }
        for row in plan.folded
        for kind in (plan.kinds[row.group],)
    ]
    content: dict[str, Any] = {
        "version": 1,
        "mesh": plan.axis_sizes,
        "leaves": len(plan.paths),
        "bytes": plan.total_bytes,
        "device_bytes": {"total": memory.max, **memory._asdict()},
        "fingerprint": plan.fingerprint(),
        "folded": leaves,
    }
    if (fits := memory._fits(hbm)) is not None:
        content["fits"] = fits
    return printable_json(content)


class Page(NamedTuple):
    """What sections know of the page that they are on."""

    plan: Plan
    bytes: DeviceBytes
    """Those of the plan, with what training adds."""
    hbm: int | None


@runtime_checkable
class HasSection(Protocol):
    """Anything that a page can show beside a plan."""

    def _section(self, page: Page) -> Section:
        """Return its section.

        Raises:
            ValueError: It is about another mesh, other leaves or other bytes than the page.
        """
        ...


_FILES: Final = Path(__file__).parent / "page"
# Scripts and styles count by their hashes alone.
_POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; "
    "base-uri 'none'; form-action 'none'"
)
# Elements have no styles of their own: the policy knows the page's style sheet alone.
_COLOURED: Final = re.compile('(?<=<b) style="[^"]*"(?=>)')
# None of them may be markup or end the element; in JSON they occur in strings only.
_IN_SCRIPTS: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def plan_page(page: Page, sections: Iterable[HasSection], title: str) -> str:
    """Return the page of a plan, its findings, and what else has sections.

    It works offline: no part of it may fetch anything.
    """
    from string import Template

    parts = [each._section(page) for each in sections]
    findings = [part for part in parts if part.title == "Findings"]
    first = findings or [page.plan.check()._section(page)]
    rules = Section("Rules", (_rule_table(page.plan),))
    rest = [rules, *(part for part in parts if part.title != "Findings")]
    script, styles = _data_text("page.js"), _data_text("page.css")
    return Template(_data_text("page.html")).substitute(
        policy=_POLICY.format(scripts=_script_hash(script), styles=_script_hash(styles)),
        title=_escaped(title),
        styles=styles,
        facts="".join(f"<p>{_escaped(line)}</p>" for line in _facts(page)),
        findings="".join(map(_section_html, first)),
        sections="".join(map(_section_html, rest)),
        fingerprint=page.plan.fingerprint(),
        data=_embedded_json(_leaves_data(page.plan)),
        script=script,
    )


def _facts(page: Page) -> list[str]:
    """Return the plan, its bytes with what training adds, and whether they fit, as lines."""
    lines = [_size_shown(page.plan), str(page.bytes)]
    if (fits := page.bytes._fits(page.hbm)) is not None:
        lines.append(f"{'fits' if fits else 'DOES NOT FIT'} into {bytes_shown(page.hbm or 0)}")
    return lines


def _section_html(section: Section) -> str:
    title, parts = _escaped(section.title), "".join(map(_part_html, section.parts))
    return (
        f'<section><h2>{title}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{title}">{_COLOURED.sub("", parts)}</div></section>'
    )


def _part_html(part: Any) -> str:
    """Return a text or a table whole, and of an answer what a notebook shows."""
    if isinstance(part, str):
        return f"<pre>{_escaped(part)}</pre>"
    return str(part.html() if isinstance(part, Table) else part._repr_html_())


def _escaped(text: str) -> str:
    from html import escape

    return escape(printable_lines(text.split("\n")))


def _rule_table(plan: Plan) -> Table:
    """Return what each rule decides, and its bytes; last what no rule does, if there is any."""
    rules = [
        (str(i), pattern_shown(rule[0]), _rule_value_shown(plan, i))
        for i, rule in enumerate(plan.rules)
    ]
    texts = [*rules, ("-", "no rule is needed", "P()"), ("-", "no rule decides", "-")]
    sums = np.zeros((len(texts), 3), object)
    for kind, count in zip(plan.kinds, plan.counts.tolist(), strict=True):
        ruleless = -2 if kind.status == "placed" else -1
        # Logical rules share a leaf, each with a dimension of it.
        for row in kind.deciders or (ruleless,):
            sums[row] += (count, count * kind.bytes, count * kind.device_bytes)
    rows = [
        (*cells, f"{leaves:,}", bytes_shown(size), bytes_shown(device_bytes))
        for cells, (leaves, size, device_bytes) in zip(texts, sums.tolist(), strict=True)
        if leaves or cells[0] != "-"
    ]
    return Table(_RULE_COLUMNS, rows)


def _rule_value_shown(plan: Plan, rule: int) -> str:
    """Return what a rule asks for: a spec, and its memory kind if it has one."""
    if plan._leaves.path_rules is None:
        return spec_shown(plan._spec_of_rule(rule))
    return rule_spec_shown(plan.rules[rule][1])


def _leaves_data(plan: Plan) -> dict[str, Any]:
    """Return the leaves, for the treemap and the table."""
    specs: dict[tuple[str, bool], int] = {}
    return {
        "kinds": [_kind_data(kind, plan, specs) for kind in plan.kinds],
        "specs": [{"text": text, "replicated": replicated} for text, replicated in specs],
        "rows": [("".join(row.parts), row.group, len(row.rows)) for row in plan.folded],
    }


def _kind_data(kind: Kind, plan: Plan, specs: dict[tuple[str, bool], int]) -> dict[str, Any]:
    replicated = is_replicated(kind, plan.axis_sizes)
    return {
        "rule": decided_shown(kind) if kind.rule is None else f"rule {kind.rule}",
        # A text: a browser's numbers are exact up to 2**53.
        "shape": "-" if kind.shape is None else str(kind.shape),
        "dtype": dtype_shown(kind),
        "spec": specs.setdefault((placement_shown(kind), replicated), len(specs)),
        "notes": [*filter(None, [kind.origin]), *(loss.message for loss in kind.losses)],
        "problem": problem_shown(kind),
        "bytes": kind.bytes,
        "held": kind.device_bytes,
        "large": replicated and kind.bytes >= DEFAULT_LARGE,
    }


def _data_text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _script_hash(text: str) -> str:
    import base64
    import hashlib

    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _embedded_json(data: Any) -> str:
    """JSON in ASCII, U+2028 and lone surrogates escaped, that cannot leave its element."""
    # What json does not know are NumPy's integers.
    text = json.dumps(_printable(data), separators=(",", ":"), default=int)
    return text.translate(_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    """Make all texts printable: a mark of direction would turn a name around."""
    if isinstance(value, str):
        return printable_lines(value.split("\n"))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [*map(_printable, value)] if isinstance(value, list | tuple) else value


Outcome = Literal[
    "wins", "no match", "too late", "not needed", "ambiguous",
    "dim taken", "axis taken", "indivisible", "absent",
]  # fmt: skip


@record
class Tried(NamedTuple):
    """The result of trying one rule on a path, or a logical rule on a dimension with its name.

    Example:
        >>> import jax, shardrules as sr
        >>> rules = sr.LogicalRules([("mlp", "tp"), ("embed", "tp")])
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> plan = sr.plan(tree, rules, {"tp": 2}, names={"w": ("embed", "mlp")})
        >>> [(one.rule, one.pattern, one.outcome) for one in plan.explain("w").tried]
        [(1, 'embed', 'axis taken'), (0, 'mlp', 'wins')]
    """

    rule: int
    pattern: Any
    """The rule's pattern, or logical name."""
    outcome: Outcome
    """"wins"; "no match"; or it matches, but an earlier rule wins ("too late"), the leaf needs no
    rule ("not needed"), or several rules match where only one may ("ambiguous"). Of a logical rule:
    another rule has the dimension ("dim taken"), another dimension has one of the axes ("axis
    taken"), or the correction leaves none of them, since they do not divide the dimension
    ("indivisible") or are "absent" from the mesh."""
    dim: int | None = None
    axes: Any = None
    """The mesh axes of a logical rule."""
    to: int | None = None
    """The rule or the dimension that a logical rule loses to."""


@answer
class Explanation(NamedTuple):
    """Why a leaf gets what it gets; `str` says it in words."""

    path: str
    source: str
    """The path that the rules meet: the leaf's own, or that of the leaf that it follows."""
    kind: Kind
    """The leaf's spec, bytes and losses."""
    tried: tuple[Tried, ...]
    """Each rule, in order; for logical rules, of each dimension those for its name."""
    mesh: str
    """The mesh as the command line has it: fsdp=8,tp=4."""
    companions: tuple[Companion, ...] = ()
    """The companions that find the leaf; each but the first finds the base of the one before."""
    bases: tuple[str, ...] = ()
    """Per companion the path to which it leads."""
    leaves: int = 1
    """How many leaves are meant, of which this is the first; all get the same."""
    by_names: bool = False
    """Whether the rules are for logical axis names."""

    def __str__(self) -> str:
        kind = self.kind
        what = f"shape {kind.shape}  {dtype_shown(kind)}  {bytes_shown(kind.bytes)}"
        lines = [
            f"{self.path}  {what if kind.shape is not None else 'not an array'}",
            *([f"  the first of {counted(self.leaves, 'leaf')}"] if self.leaves > 1 else []),
            *self._companion_lines(),
            *(self._name_lines() if self.by_names else self._rule_lines()),
        ]
        if kind.wanted is not None:
            say = "rules say " if self.by_names else "rule says "
            lines.append(f"  the {say} {spec_shown(kind.wanted)}")
        if kind.origin is not None:
            lines.append(f"  derived        {kind.origin}")
        if kind.status == "placed":
            device_bytes = bytes_shown(kind.device_bytes)
            lines.append(
                f"  on {self.mesh}  {placement_shown(kind)}, {device_bytes} on each device"
            )
            lines += [
                f"  lost           {loss.message} (costs {bytes_shown(loss.bytes)} on each device)"
                for loss in kind.losses
            ]
        else:
            lines.append(f"  PROBLEM        {kind.message}")
            lines += [f"  fix            {kind.fix}"] if kind.fix else []
        return printable_lines(lines)

    def _companion_lines(self) -> list[str]:
        lines = []
        link = "it"
        for companion, base in zip(self.companions, self.bases, strict=True):
            lines.append(f"  companion      {companion.pattern!r} finds {link}")
            link = base
        if lines and self.source != link:
            counts = "its own" if self.source == self.path else f"that of {self.source}"
            lines[-1] += f"; but no rule meets its base {link}, so {counts} counts"
        return lines if self.source == self.path else [*lines, f"  follows        {self.source}"]

    def _rule_lines(self) -> list[str]:
        matching = [tried for tried in self.tried if tried.outcome != "no match"]
        missed = len(self.tried) - len(matching)
        if not matching:
            needs_none = self.kind.status == "placed" and self.kind.origin is None
            return [f"  no rule matches, of {missed}{'; the leaf needs none' * needs_none}"]
        words = {
            "wins": "wins",
            "too late": f"matches, but comes after rule {self.kind.rule}",
            "not needed": "matches, but the leaf needs no rule",
            "ambiguous": "matches",
        }
        lines = [
            f"  rule {tried.rule}: {tried.pattern!r} {words[tried.outcome]}" for tried in matching
        ]
        verb = "does" if missed == 1 else "do"
        others = f"  {counted(missed, 'other rule')} {verb} not match"
        return [*lines, others] if missed else lines

    def _name_lines(self) -> list[str]:
        names = self.kind.names
        if names is None:
            if self.kind.origin is not None or self.kind.shape is None:
                return []
            return ["  it has no logical axis names, so no rule is for it"]
        rows = ((row.rule, row.dim or 0, row.axes, row.outcome, row.to) for row in self.tried)
        return [f"  {line}" for line in rule_lines(names, rows)]


def explanation(plan: Plan, rows: list[int]) -> Explanation:
    """Return the explanation of the first of these rows, which get the same."""
    row = rows[0]
    kind, source = plan.kinds[plan.kind_of[row]], plan.sources[row]
    rules = plan._leaves.path_rules
    tried = _tried_names(kind, plan) if rules is None else _tried(kind, source, rules)
    links = plan._leaves.links.get(row, ())
    companions, bases = tuple(link.companion for link in links), tuple(link.base for link in links)
    mesh, path = mesh_shown(plan.axis_sizes), plan.paths[row]
    return Explanation(path, source, kind, tried, mesh, companions, bases, len(rows), rules is None)


def _tried(kind: Kind, source: str, rules: Rules) -> tuple[Tried, ...]:
    matching = set(rules.all_matches(source))
    return tuple(
        Tried(rule, rules[rule][0], _outcome(rule, kind, matching)) for rule in range(len(rules))
    )


def _tried_names(kind: Kind, plan: Plan) -> tuple[Tried, ...]:
    outcomes: list[tuple[int, int, Outcome, int | None]] = [
        *((dim, rule, "wins", None) for dim, rule in enumerate(kind.dim_rules) if rule is not None),
        *((lost.dim, lost.rule, lost.why, lost.to) for lost in kind.lost_rules),
    ]
    return tuple(
        Tried(rule, plan.rules[rule][0], outcome, dim, plan.rules[rule][1], to)
        for dim, rule, outcome, to in sorted(outcomes, key=lambda tried: tried[:2])
    )


def _outcome(rule: int, kind: Kind, matching: set[int]) -> Outcome:
    if rule == kind.rule:
        return "wins"
    if rule not in matching:
        return "no match"
    if kind.rule is not None:
        return "too late"
    return "not needed" if kind.status == "placed" else "ambiguous"
