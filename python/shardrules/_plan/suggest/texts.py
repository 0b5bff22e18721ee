"""Writes rules as a TOML file or as Python code, with a note above each.

Patterns have names in them that come from files, so what a terminal or a parser would act upon is
escaped.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardrules._base.rule_specs import Fsdp, RuleSpec
from shardrules._base.specs import entries_of
from shardrules._base.text import printable
from shardrules._plan.codec import DIALECTS, rule_data
from shardrules._rules.patterns import Pattern, pattern_shown

if TYPE_CHECKING:
    from shardrules._plan.findings import Declared
    from shardrules._rules.rules import Rules


def toml_text(rules: Rules, declared: Declared, heading: str, notes: Sequence[str]) -> str:
    """Write a rule file, as `Suggestion.to_toml` documents."""
    dialect = rules.dialect
    if DIALECTS.get(dialect.name.lower()) != dialect:
        raise ValueError(
            f"to_toml: the dialect {dialect.name} is one of your own, which a rule file cannot "
            "name; use to_python"
        )
    lines = [f"# {heading}", f"dialect = {_toml(dialect.name)}"]
    lines += [f"{name} = {_toml_value(values)}" for name, values in declared.items() if values]
    if not len(rules):
        lines.append("rules = []")
    for (pattern, value), note in zip(rules, notes, strict=True):
        lines += ["", *toml_rule(pattern, value, note)]
    return "\n".join(lines) + "\n"


def toml_rule(pattern: Pattern, value: Any, note: str) -> list[str]:
    """Write the lines of a rule, with a note above it."""
    data = rule_data(pattern, value)
    if "units" in data:
        data["units"] = [unit or 1 for unit in data["units"]]  # TOML has no null
    pairs = [f"{key} = {_toml_value(value)}" for key, value in data.items()]
    return [f"# {note}", "[[rules]]", *pairs]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _toml(value) if isinstance(value, str) else str(value).lower()


def _toml(text: str) -> str:
    """Write a TOML string: literally, if it can stand between apostrophes."""
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


def python_text(rules: Rules, heading: str, notes: Sequence[str]) -> str:
    """Write Python code, as `Suggestion.to_python` documents."""
    _check_sayable(rules)
    texts = [python_rule(*rule) for rule in rules]
    imports = ["from jax.sharding import PartitionSpec as P"]
    if any("sr." in rule for rule in texts):
        imports.append("import shardrules as sr")
    lines = [f"# {heading}", *imports, "", "rules = ["]
    for rule, note in zip(texts, notes, strict=True):
        lines += [f"    # {note}", f"    {rule},"]
    return "\n".join([*lines, "]"]) + "\n"


def _check_sayable(rules: Rules) -> None:
    """Check that each rule is a pattern, a spec and units; rules of `like` may say more.

    Raises:
        ValueError: One has flags, a correction, a memory kind or the like, which would be lost.
    """
    for number, (pattern, value) in enumerate(rules):
        data = rule_data(pattern, value)
        has_tags = isinstance(data["spec"], dict) and data["spec"].keys() != {"fsdp"}
        if has_tags or not {"pattern", "spec", "units"} >= data.keys():
            raise ValueError(
                f"to_python: rule {number} {pattern_shown(pattern)} has more than a pattern, a "
                "spec and units, which would be lost: use to_toml, or Suggestion.rules"
            )


def python_rule(pattern: Any, value: Any) -> str:
    """Write a rule as Python code."""
    return f"({_python_text(str(pattern), 'r')}, {_python_spec(value)})"


def _python_text(text: str, prefix: str = "") -> str:
    """Write a Python string: literally between quotes, if that is safe to print."""
    literal = f'{prefix}"{text}"'
    with suppress(SyntaxError, ValueError):
        if text.isprintable() and printable(text) == text and ast.literal_eval(literal) == text:
            return literal
    return ascii(text).replace("#", "\\x23")


def _python_spec(value: Any) -> str:
    if isinstance(value, Fsdp):
        axes = value.axes[0] if len(value.axes) == 1 else value.axes
        return f"sr.fsdp({_python(axes)})"
    if isinstance(value, RuleSpec):
        spec = _python_spec(value.spec)
        return f"sr.RuleSpec({spec}, units={_python(value.units)})" if value.units else spec
    return f"P({', '.join(map(_python, entries_of(value)))})"


def _python(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' if len(value) == 1 else ''})"
    return _python_text(value) if isinstance(value, str) else ascii(value)
