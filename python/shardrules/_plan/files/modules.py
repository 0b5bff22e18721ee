"""`module:name`, the only form that executes anything: it imports the user's module."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from shardrules._base.arguments import check_type
from shardrules._base.io import FileError, path_of
from shardrules._base.text import brief, near_shown

_PACKAGE: Final = Path(__file__).parents[2]
_FORM: Final = re.compile(r"(?P<module>[^\W\d][\w.]*):(?P<name>[^\W\d][\w.]*)")
_OF_FILES: Final = re.compile(r"\.(json|toml|ya?ml|gz|safetensors)\Z")


def is_module_form(text: str) -> bool:
    """Say whether the text has the form `package.module:name`, and no file has this name.

    A single letter before the colon may be a drive of Windows, where the name ends as files do.
    """
    form = _FORM.fullmatch(text)
    if form is None or (len(form["module"]) == 1 and _OF_FILES.search(text)):
        return False
    return not Path(text).exists()


def file_name(path: Any, parameter: str = "path") -> str:
    """Return the name of a file that Python is given, which must be none of an object."""
    check_type(parameter, path, str | os.PathLike, "the path of a file")
    # A `Path` leaves one slash of the two of a URL.
    name = path if path and isinstance(path, str) else str(path_of(path))
    if is_module_form(name):
        raise FileError(
            f"{name}: this is no file, and only the command line imports package.module:name; "
            "import it, and use the object itself"
        )
    return name


def load_object(text: str, *arguments: Any) -> Any:
    """Import the object that `package.module:name` names, and call it if that is possible."""
    value = find_object(text)
    if not callable(value):
        return value
    try:
        return value(*arguments)
    except (Exception, SystemExit) as error:
        name = text.rpartition(":")[2]
        call = f"{name}({', '.join(map(brief, arguments))})"
        fix = f"it must work {'with these arguments' if arguments else 'without arguments'}"
        raise _raised(text, f"the call of {call}", error, fix) from error


def find_object(text: str) -> Any:
    """Import the object that `package.module:name` names.

    The current directory is searched too, as with `python -m`. A name may have dots.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise FileError(f"{text}: this is not the name of an object; write package.module:name")
    return _attribute(text, _module(text, form["module"]), form["name"])


def _module(text: str, name: str) -> Any:
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{name}.".startswith(f"{absent}."):
            raise FileError(
                f"{text}: there is no module {absent!r}; install it, or run this in the directory "
                "that has it"
            ) from error
        raise _raised(text, f"the import of {name!r}", error, "it must be importable") from error


def _attribute(text: str, module: Any, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise FileError(
            f"{text}: module {module.__name__!r} has no {name!r}; correct the name behind the colon"
            f"{near_shown(name, vars(module))}"
        ) from error


def _raised(text: str, what: str, error: BaseException, fix: str) -> FileError:
    """Return the error of user's code with its line, which may have several lines itself."""
    here = Path.cwd()
    files = ((Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__))
    places = [
        f" at {file.name}:{line}"
        for file, line in files
        if file.is_relative_to(here)
        and not file.is_relative_to(_PACKAGE)
        and "site-packages" not in file.relative_to(here).parts
    ]
    lines = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()
    head = f"{text}: {what}{places[-1] if places else ''} has raised {lines[0]}"
    return FileError(head, *lines[1:], fix) if lines[1:] else FileError(f"{head}; {fix}")
