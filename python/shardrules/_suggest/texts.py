"""Rules as the text of a TOML file or of Python code, with a note above each.

Patterns have names in them that come from files, so what a terminal or a parser would act upon is
escaped. Costs per rule. Must not know why a rule says what it says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardrules._correction import RuleSpec, rule_spec
from shardrules._files.logical import LOGICAL_DIALECTS
from shardrules._files.rules import DIALECTS
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.resolver import axes_in
from shardrules._specs import Fsdp, entries_of, entry_axes, fsdp
from shardrules._text import printable

if TYPE_CHECKING:
    from shardrules._plan.findings import Declared
    from shardrules._rules.patterns import Pattern
    from shardrules._rules.rules import Rules


def pattern_shown(pattern: Pattern) -> str:
    """A pattern for a message."""
    return pattern if isinstance(pattern, str) else repr(pattern)


def toml_text(
    rules: Rules | LogicalRules, declared: Declared, heading: str, notes: Sequence[str]
) -> str:
    """See `Suggestion.to_toml`."""
    dialect = rules.dialect
    is_logical = isinstance(rules, LogicalRules)
    known = LOGICAL_DIALECTS if is_logical else DIALECTS
    if known.get(dialect.name.lower()) != dialect:
        raise ValueError(
            f"to_toml: the dialect {dialect.name} is one of your own, which a rule file cannot "
            "name; use to_python"
        )
    if not isinstance(rules, LogicalRules):
        _check_sayable("to_toml", rules)
    lines = [f"# {heading}", *['kind = "logical"'] * is_logical]
    lines += [f"dialect = {_toml(dialect.name)}"]
    lines += [
        f"{name} = {toml_list(values)}"  # type: ignore[arg-type]
        for name, values in declared.items()
        if values
    ]
    if not len(rules):
        lines.append("rules = []")
    for (pattern, value), note in zip(rules, notes, strict=True):
        write = toml_logical_rule if is_logical else toml_rule
        lines += ["", *write(pattern, value, note)]
    return "\n".join(lines) + "\n"


def _check_sayable(what: str, rules: Rules) -> None:
    """Checks that each rule is a pattern, a spec and units; rules of `like` may say more.

    Raises:
        ValueError: One has flags, a correction, a memory kind or the like, which would be lost.
    """
    for number, (pattern, value) in enumerate(rules):
        wanted = rule_spec(value)
        is_plain = wanted == RuleSpec(wanted.spec, units=wanted.units)
        if isinstance(wanted.spec, Fsdp):
            is_plain &= wanted.spec == fsdp(wanted.spec.axes)
        if not is_plain or isinstance(pattern, re.Pattern):
            raise ValueError(
                f"{what}: rule {number} {pattern_shown(pattern)} has more than a pattern, a spec "
                "and units, which would be lost: mend its own file with shardrules check --fix, or "
                "use Suggestion.rules"
            )


def toml_rule(pattern: Pattern, value: Any, note: str) -> list[str]:
    """The lines of a rule, with a note above it."""
    written = f"pattern = {toml_list(plain_pattern(pattern))}"
    return [f"# {note}", "[[rules]]", written, *_toml_spec(value)]


def toml_logical_rule(name: Any, axes: Any, note: str) -> list[str]:
    """Returns the lines of a rule for a logical axis name, with a note above it."""
    written = axes if isinstance(axes, str) else axes_in(axes)
    return [f"# {note}", "[[rules]]", f"name = {_toml(name)}", f"axes = {toml_list(written)}"]


def plain_pattern(pattern: Pattern) -> str | tuple[str, ...]:
    """A pattern as files have it."""
    return pattern if isinstance(pattern, tuple) else str(pattern)


def _toml_spec(value: Any) -> list[str]:
    wanted = rule_spec(value)
    if isinstance(wanted.spec, Fsdp):
        return [f"spec = {{ fsdp = {toml_list(wanted.spec.axes)} }}"]
    entries = [toml_list(entry_axes(entry)) for entry in entries_of(wanted.spec)]
    single = [_toml(one[0]) if len(one := entry_axes(e)) == 1 else text
              for e, text in zip(entries_of(wanted.spec), entries, strict=True)]  # fmt: skip
    lines = [f"spec = [{', '.join(single)}]"]
    if wanted.units:
        lines.append(f"units = [{', '.join(str(unit or 1) for unit in wanted.units)}]")
    return lines


def toml_list(value: str | Iterable[Any]) -> str:
    """A TOML string, or a list of strings."""
    if isinstance(value, str):
        return _toml(value)
    return f"[{', '.join(_toml(one) for one in value)}]"


def _toml(text: str) -> str:
    """A TOML string: as it is, if it can stand between apostrophes."""
    if text.isprintable() and printable(text) == text:
        if "\\" not in text and '"' not in text and text.replace("_", "").isalnum():
            return f'"{text}"'
        if "'" not in text:
            return f"'{text}'"
    return '"' + "".join(map(_toml_character, text)) + '"'


def _toml_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    # A runner of a CI system would obey ##[name].
    if character.isprintable() and character != "#":
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def python_text(rules: Rules | LogicalRules, heading: str, notes: Sequence[str]) -> str:
    """See `Suggestion.to_python`."""
    is_logical = isinstance(rules, LogicalRules)
    if not isinstance(rules, LogicalRules):
        _check_sayable("to_python", rules)
    written = [python_rule(*rule, is_logical=is_logical) for rule in rules]
    imports = [] if is_logical else ["from jax.sharding import PartitionSpec as P"]
    if not is_logical and any("sr." in rule for rule in written):
        imports.append("import shardrules as sr")
    lines = [f"# {heading}", *imports, *["" for _ in imports[:1]], "rules = ["]
    for rule, note in zip(written, notes, strict=True):
        lines += [f"    # {note}", f"    {rule},"]
    return "\n".join([*lines, "]"]) + "\n"


def python_rule(pattern: Any, value: Any, *, is_logical: bool) -> str:
    """Returns a rule as Python code."""
    if is_logical:
        return f"({_python(pattern)}, {_python(value)})"
    return f"({_python_pattern(pattern)}, {_python_spec(value)})"


def _python_pattern(pattern: Pattern) -> str:
    if isinstance(pattern, tuple):
        return f"({', '.join(map(_python_pattern, pattern))},)"
    return _python_text(str(pattern), "r")


def _python_text(text: str, prefix: str = "") -> str:
    """A Python string: between quotes as it is, if that is the same text and safe to print."""
    written = f'{prefix}"{text}"'
    try:
        if text.isprintable() and printable(text) == text and ast.literal_eval(written) == text:
            return written
    except (SyntaxError, ValueError):
        pass
    return ascii(text).replace("#", "\\x23")


def _python_spec(value: Any) -> str:
    if isinstance(value, Fsdp):
        axes = value.axes[0] if len(value.axes) == 1 else value.axes
        return f"sr.fsdp({_python(axes)})"
    if isinstance(value, RuleSpec):
        more = f", units={_python(value.units)}" if value.units else ""
        return (
            f"sr.RuleSpec({_python_spec(value.spec)}{more})" if more else _python_spec(value.spec)
        )
    return f"P({', '.join(map(_python, entries_of(value)))})"


def _python(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' if len(value) == 1 else ''})"
    return _python_text(value) if isinstance(value, str) else ascii(value)
