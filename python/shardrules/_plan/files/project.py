"""Project file: `shardrules.toml`, or `[tool.shardrules]` of pyproject.toml, with its jobs."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardrules._base.io import FileError, read_bytes
from shardrules._base.text import shown
from shardrules._plan.codec import check_keys, naming
from shardrules._plan.files.parsers import parse_toml

OWN_FILE: Final = "shardrules.toml"
_PYPROJECT: Final = "pyproject.toml"
# As of rule files in TOML: a table's name takes most.
_PER_BYTE: Final = 512
ARGUMENTS: Final[tuple[str, ...]] = ("model", "function", "before")
"""Keys of a job that are arguments of commands; the others are options, by their names."""
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_TABLES: Final = ("MESH", "WHAT=BYTES...", "KIND=LEVEL...")
_LISTS: Final = ("AXES", "NAMES")
_NUMBERS: Final = ("NUMBER", "BYTES", "SECONDS")
_WRITTEN: Final = {
    "table": 'a table, such as { fsdp = 8, tp = 4 }, or a text, "fsdp=8,tp=4"',
    "list": 'a list, such as ["dp", "pp"], or a text, "dp,pp"',
}


class ProjectJob(NamedTuple):
    """One model or step, with the options of the commands that check it."""

    name: str
    arguments: dict[str, str]
    """Of `ARGUMENTS`, those that it has."""
    options: dict[str, list[str]]
    """{key: words of a command line}."""

    def words(self, keys: Iterable[str]) -> list[str]:
        """Return the words of its options that are among these."""
        return [word for key in keys for word in self.options.get(key, ())]


class ProjectFile(NamedTuple):
    """The jobs of a project file, in its order. Their paths are relative to its folder."""

    path: Path
    jobs: list[ProjectJob]


def read_project(
    folder: Path, forms: Mapping[str, str], named: Path | None = None
) -> ProjectFile | None:
    """Read the named project file, or that of a folder or the nearest above it, if there is one.

    Nothing is executed.

    Raises:
        FileError: The file is wrong, or was found above the folder and may be another user's work.
    """
    found = find_table(folder) if named is None else (named, _table_of(named))
    if found is None:
        return None
    path, table = found
    if table is None:
        raise FileError(f"{path}: it is no file, or has no [tool.shardrules]")
    if named is None and (why := stranger(path, folder)):
        raise FileError(
            f"{path}: {why}, and its jobs may import code; if you trust it, give --project {path}"
        )
    return ProjectFile(path, _jobs(path, table, forms))


def find_table(folder: Path) -> tuple[Path, Any] | None:
    """Find (the project file of a folder or the nearest above it, its table).

    The search goes no higher than the root of the repository, the home folder or a mount point.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")))
    for place in (folder, *folder.parents):
        tables = {path: table for path in (place / OWN_FILE, place / _PYPROJECT)
                  if (table := _table_of(path)) is not None}  # fmt: skip
        if len(tables) > 1:
            raise FileError(
                f"{place / OWN_FILE}: {_PYPROJECT} beside it has [tool.shardrules] too; keep one"
            )
        if tables:
            return tables.popitem()
        if os.path.lexists(place / ".git") or place == home or os.path.ismount(place):
            return None
    return None


def stranger(path: Path, folder: Path) -> str | None:
    """Return why a project file above this folder may be another user's work; None if it cannot be.

    The file's folder counts too, as modules are imported from there. Root trusts the owner of the
    folder as well. Nobody is asked on Windows.
    """
    if path.parent == folder or sys.platform == "win32":
        return None
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0:
        trusted.add(folder.stat().st_uid)
    for what, status in (
        ("it", path.lstat()),
        ("it", path.stat()),
        ("its folder", path.parent.stat()),
    ):
        if status.st_uid not in trusted:
            return f"{what} belongs to the user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"all users may write {what}"
    return None


def project_text(job: Mapping[str, str]) -> str:
    """Write a project file with one job, whose name is that of its function or model."""
    _, _, name = job.get("function", job["model"]).rpartition(":")
    name = Path(name).name.partition(".")[0]
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in job.items()]
    key = name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return "\n".join([f"[jobs.{key}]", *lines, ""])


def form_of(value: str) -> str:
    """Return the form of an option's value, by its text in the help, such as BYTES or AXES.

    It is flag, text, number (or text), list or table (or text, which has commas), lists or tables
    (of which each item is an option of its own), or the choices in braces.
    """
    if value.startswith("-"):
        return "flag"
    if value.startswith("{"):
        return value
    if value in _TABLES:
        return "tables" if value.endswith("...") else "table"
    if value.endswith("...") or value in _LISTS:
        return "lists" if value.endswith("...") else "list"
    return "number" if value in _NUMBERS else "text"


def _table_of(path: Path) -> Any:
    """Return the table of a project file; None if the file has none, or is not there."""
    if not path.is_file():
        return None
    table = parse_toml(path, read_bytes(path, _PER_BYTE))
    if path.name != _PYPROJECT:
        return table
    tools = table.get("tool", {})
    return tools.get("shardrules") if isinstance(tools, dict) else None


def _jobs(path: Path, table: object, forms: Mapping[str, str]) -> list[ProjectJob]:
    if isinstance(table, dict):
        with naming(path):
            check_keys("", table, ["jobs", *ARGUMENTS, *forms])
    jobs = table.get("jobs") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(jobs, dict) or not jobs:
        start = "tool.shardrules.jobs" if path.name == _PYPROJECT else "jobs"
        raise FileError(
            f'{path}: there are no jobs; write [{start}.NAME] with model = "model.json", rules and '
            "mesh"
        )
    shared = _job_entries(f"{path}", {key: table[key] for key in table if key != "jobs"}, forms)
    return [
        _project_job(f"{path}: job {name}", name, shared, job, forms) for name, job in jobs.items()
    ]


def _project_job(
    where: str, name: str, shared: _Entries, job: object, forms: Mapping[str, str]
) -> ProjectJob:
    if not isinstance(job, dict):
        raise FileError(f'{where}: it is {shown(job)}; write a table with model = "model.json"')
    own = _job_entries(where, job, forms)
    arguments, options = shared.arguments | own.arguments, shared.options | own.options
    if not arguments.keys() & {"model", "function"}:
        raise FileError(f"{where}: it has neither a model to check nor a function to prove")
    return ProjectJob(name, arguments, options)


class _Entries(NamedTuple):
    """What a table says, as `ProjectJob` has it."""

    arguments: dict[str, str]
    options: dict[str, list[str]]


def _job_entries(where: str, table: dict[str, Any], forms: Mapping[str, str]) -> _Entries:
    with naming(where):
        check_keys("", table, [*ARGUMENTS, *forms])
    arguments = {key: table[key] for key in ARGUMENTS if key in table}
    for key, value in arguments.items():
        if not isinstance(value, str) or not value:
            raise FileError(f"{where}: {key} is {shown(value)}; write a file or module:function")
    options = {
        key: _option_words(f"{where}: {key}", key, form, table[key])
        for key, form in forms.items()
        if key in table
    }
    return _Entries(arguments, options)


def _option_words(where: str, key: str, form: str, value: object) -> list[str]:
    """Return the words of a command line for the value of a key."""
    if form == "flag":
        if not isinstance(value, bool):
            raise FileError(f"{where} is {shown(value)}; write true or false")
        return [f"--{key}"] if value else []
    if isinstance(value, dict) and form in ("table", "tables"):
        texts = [f"{name}={_option_text(f'{where}: {name}', size)}" for name, size in value.items()]
    elif isinstance(value, list) and form in ("list", "lists", "tables"):
        texts = [_option_text(f"{where}[{index}]", item, is_number=False)
                 for index, item in enumerate(value)]  # fmt: skip
    else:
        texts = [_option_text(where, value, is_number=form == "number", form=form)]
    if form.startswith("{") and texts[0] not in (choices := form[1:-1].split(",")):
        raise FileError(f"{where} is {shown(value)}; it is one of {', '.join(choices)}")
    if form in ("table", "list"):
        texts = [",".join(texts)]
    return [f"--{key}={text}" for text in texts]


def _option_text(where: str, value: object, *, is_number: bool = True, form: str = "text") -> str:
    if isinstance(value, str) or (is_number and type(value) is int):
        return str(value)
    what = _WRITTEN.get(form, f"a {'number or ' * is_number}text")
    raise FileError(f"{where} is {shown(value)}; write {what}")
