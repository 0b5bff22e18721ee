"""What a command takes, from the signature of its function: types, defaults and help for argparse.

Costs a few milliseconds. Must not know any command, nor what a word means.
"""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, ArgumentTypeError, HelpFormatter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, NoReturn, get_args, get_origin, get_type_hints

__all__ = ["Argument", "Option", "Parser", "UsageError", "meant", "parser_of"]

_HELP: Final = ("-h", "--help")
_WORDS: Final = {str: "TEXT", int: "INTEGER", Path: "PATH"}
"""How help calls a value of each type."""


class UsageError(Exception):
    """Words that a command line does not take."""


class Argument:
    """An argument by its place, as the annotation of a parameter.

    Args:
        help: Its line in the help.
    """

    def __init__(self, *, help: str) -> None:
        self.help = help


class Option(Argument):
    """An option, as the annotation of a parameter. A list is an option that is repeatable.

    Args:
        flags: Its names. Default: that of the parameter.
        help: Its line in the help.
        min: The least integer. Default: any.
    """

    def __init__(self, *flags: str, help: str, min: int | None = None) -> None:
        super().__init__(help=help)
        self.flags, self.min = flags, min


class Parser(ArgumentParser):
    """A parser that takes no abbreviations, and raises UsageError for what it does not take."""

    def __init__(self, **given: Any) -> None:
        shape = partial(HelpFormatter, max_help_position=32)
        super().__init__(allow_abbrev=False, formatter_class=shape, **given)
        self.valued: set[str] = set()
        """The options that take a value."""

    def parse(self, words: Iterable[str]) -> dict[str, Any] | None:
        """The arguments by name; None if the words asked for help, which is shown."""
        joined = list(self._joined(iter(words)))
        if any(flag in joined for flag in _HELP):
            print(self.format_help(), end="")
            return None
        for word in joined[: joined.index("--") if "--" in joined else None]:
            option = word.partition("=")[0]  # argparse would first ask for those that are missing
            if option.startswith("--") and option not in self._option_string_actions:
                raise UsageError(
                    f"there is no option {option}{meant(option, self._option_string_actions)}"
                )
        return vars(self.parse_args(joined))

    def _joined(self, words: Iterator[str]) -> Iterator[str]:
        """The words, an option and its value as one: argparse refuses a value such as -1GB."""
        for word in words:
            value = next(words, None) if word in self.valued else None
            yield word if value is None else f"{word}={value}"

    def error(self, message: str) -> NoReturn:
        """Raises UsageError; argparse would print the usage and exit."""
        raise UsageError(message)


def meant(word: str, words: Iterable[str]) -> str:
    """The end of a message on a word that is none of these: which of them was meant."""
    from shardrules._text import nearest

    near = nearest(word, words)
    return f" (did you mean {near}?)" if near else ""


def parser_of(name: str, command: Callable[..., Any]) -> Parser:
    """The parser of a command's words into the arguments of its function."""
    parser = Parser(prog=f"shardrules {name}", description=inspect.getdoc(command), add_help=False)
    required, others = map(parser.add_argument_group, ("required", "options"))
    others.add_argument(*_HELP, action="help", help="Show this help.")
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        needed = parameter.default is parameter.empty
        annotated, given = _annotation(hints[parameter.name])
        default = None if needed else parameter.default
        line = _help(given.help, default)
        if not isinstance(given, Option):
            required.add_argument(parameter.name, metavar=parameter.name.upper(), help=line)
            continue
        flags = given.flags or ("--" + parameter.name.replace("_", "-"),)
        (required if needed else others).add_argument(
            *flags, dest=parameter.name, required=needed, default=default, help=line,
            **_action(annotated, given.min),
        )  # fmt: skip
        if annotated is not bool:
            parser.valued.update(flags)
    return parser


def _annotation(hint: Any) -> tuple[Any, Argument]:
    """(the type without None, the Argument or Option) of a parameter's annotation.

    A default of None makes `Annotated[T | None, x]` of it, or that in a union with None.
    """
    if get_origin(hint) is not Annotated:
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    kind, given = get_args(hint)
    if NoneType in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    return kind, given


def _action(kind: Any, least: int | None) -> dict[str, Any]:
    """What argparse does with the value of an option of this type."""
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is list:
        return {**_action(get_args(kind)[0], least), "action": "append"}
    read = partial(_integer, least=least) if kind is int else kind
    return {"type": read, "metavar": _WORDS[kind]}


def _integer(text: str, least: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None
    if least is not None and value < least:
        raise ArgumentTypeError(f"{value} is below {least}, the least")
    return value


def _help(text: str, default: object) -> str:
    """The line of help, which argparse formats with %, and the default that it does not tell."""
    told = default is None or default is False or "Default:" in text
    return (text if told else f"{text} Default: {default}.").replace("%", "%%")
