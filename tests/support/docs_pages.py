"""Runs the examples of the README and of the pages in docs/; tests/docs/test_docs.py has the tests.

Blocks of one page share a namespace and a folder, in order:

- `python` runs. A comment behind an expression that is a value must be the expression's value.
- A block with a `title="name"` is a file in the folder.
- `console` runs its `$ shardrules ...` commands; each line shown must be in the output.
- What stands behind `<!-- printed -->` is what the block before has printed: a `text` block, or
  Markdown up to `<!-- /printed -->`. `python -m tests.support.docs_pages` writes it anew, in all pages,
  or in those named behind it.
- Above a block, `<!-- not run: why -->`, `<!-- needs: flax, jax.CompilerEffortLevel -->` (skipped without
  them) and `<!-- exit: 1 -->` (of its commands) say what is special about it. At the top of a page,
  `<!-- page needs: optax -->` says it of all its blocks.
"""

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.command_line import invoke
from tests.support.folders import ROOT

DOCS = ROOT / "docs"
os.environ.setdefault("KERAS_BACKEND", "jax")  # without one, Keras is not there for a page
LANGUAGES = ("console", "json", "python", "text", "toml", "yaml")
# Commands of others: tests of their own run what they do.
OTHER_COMMANDS = ("cd", "g++", "make", "pip", "python")

_BLOCK = re.compile(
    r"^(?P<markers>(?:<!-- [^\n]* -->\n+)*)"
    r"(?:```(?P<language>[\w-]*)(?P<info>[^\n]*)\n(?P<code>.*?)^```$"
    r"|(?<=<!-- printed -->\n\n)(?P<markdown>.*?)\n\n<!-- /printed -->$)",
    re.M | re.S,
)
_MARKER = re.compile(r"<!-- (?P<word>[a-z ]+)(?:: (?P<text>.*?))? -->")
_PAGE_NEEDS = re.compile(r"<!-- page needs: (.*) -->\n")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"\s{2}# (.*)$")


class Block(NamedTuple):
    language: str
    code: str
    markers: dict[str, str]
    title: str | None
    span: tuple[int, int]


def pages() -> list[str]:
    """The README and the pages, as paths from the root."""
    return ["README.md", *sorted(str(p.relative_to(ROOT)) for p in DOCS.rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for block in _BLOCK.finditer(text):
        markers = {m["word"]: m["text"] or "" for m in _MARKER.finditer(block["markers"])}
        title = _TITLE.search(block["info"] or "")
        kind = "code" if block["markdown"] is None else "markdown"
        language = block["language"] if kind == "code" else "markdown"
        found.append(Block(language, block[kind], markers, title and title[1], block.span(kind)))
    return found


def run(page: str, folder: Path) -> tuple[list[str], list[tuple[tuple[int, int], str]]]:
    """Runs a page in a folder; returns what was missing, and what is printed where.

    Raises:
        AssertionError: What a block shows is not so.
    """
    missing = lacking(page)
    if missing:
        return missing, []
    names: dict[str, Any] = {"__name__": "__main__"}  # as of a program; dataclasses ask for it
    printed: str | None = ""  # None behind a block that did not run
    shown: list[tuple[tuple[int, int], str]] = []
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.code)
        elif "printed" in block.markers or block.language == "markdown":
            if printed is not None:
                is_text = block.language != "markdown"
                shown.append((block.span, printed if is_text else printed.rstrip()))
        elif "not run" not in block.markers and block.language in ("python", "console"):
            needs = block.markers.get("needs", "")
            not_there = list(_lacking(needs))
            missing += not_there
            printed = None
            if not not_there:
                run_block = _run_python if block.language == "python" else _run_console
                printed = run_block(page, block, names)
    return missing, shown


def lacking(page: str) -> list[str]:
    """What a page says at its top that it needs, and that is not there."""
    needs = _PAGE_NEEDS.match((ROOT / page).read_text())
    return list(_lacking(needs[1])) if needs else []


def _lacking(needs: str) -> Iterator[str]:
    for name in filter(None, needs.split(", ")):
        try:
            importlib.import_module(name)
        except ImportError:
            module, _, attribute = name.rpartition(".")
            if not module or not hasattr(importlib.import_module(module), attribute):
                yield name


def _run_python(page: str, block: Block, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        lines = block.code.splitlines()
        for statement in ast.parse(block.code).body:
            where = f"{page}: {lines[statement.lineno - 1]}"
            if not isinstance(statement, ast.Expr):
                exec(compile(ast.Module([statement], []), where, "exec", dont_inherit=True), names)
                continue
            value = eval(compile(ast.Expression(statement.value), where, "eval", dont_inherit=True), names)
            comment = _COMMENT.search(lines[(statement.end_lineno or 0) - 1])
            if comment:
                _check_value(where, value, comment[1], names)
    return printed.getvalue()


def _check_value(where: str, value: Any, comment: str, names: dict[str, Any]) -> None:
    """A comment that is no value, or not before its first colon, says something else."""
    from jax.sharding import PartitionSpec

    for said in (comment, comment.partition(": ")[0]):
        try:
            wanted = eval(said, {"P": PartitionSpec, **names})
        except Exception:
            continue
        assert value == wanted, f"{where} is {value!r}"
        return


def _run_console(page: str, block: Block, _: dict[str, Any]) -> str:
    printed = ""
    for command, shown in commands(block):
        if command.startswith("shardrules "):
            result = invoke(*shlex.split(command, comments=True)[1:])
            printed = result.output
            assert result.exit_code == int(block.markers.get("exit", "0")), f"{page}: {command}\n{printed}"
            lines = [line.rstrip() for line in printed.splitlines()]
            for line in shown:
                assert line.rstrip() in [*lines, "", "..."], f"{page}: {command}\n{printed}"
    return printed


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines of output shown below it) of a console block."""
    for one in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
        command, *shown = one.replace("\\\n", "").splitlines()
        yield command, shown


@contextlib.contextmanager
def demo_folder() -> Iterator[Path]:
    """A folder with the files of the demo, which the pages' commands may name; left at the end."""
    from examples import demo

    before, modules = Path.cwd(), set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        for file in (demo.MODEL, demo.RULES):
            shutil.copy(file, folder)
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            sys.path.remove(folder)
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                    del sys.modules[name]


def main() -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    for page in sys.argv[1:] or pages():
        with demo_folder() as folder:
            _, shown = run(page, folder)
        text = (ROOT / page).read_text()
        for (start, end), printed in reversed(shown):
            text = text[:start] + printed + text[end:]
        (ROOT / page).write_text(text)


if __name__ == "__main__":
    main()
