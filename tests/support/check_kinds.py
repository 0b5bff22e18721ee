"""Kinds of findings of `Plan.check`, for type checkers and readers: `python -m tests.support.check_kinds` writes them.

`KINDS` has their levels and what they are about; `CheckKind` and the list of docs/findings.md are made of that.
"""

import re
from textwrap import fill

from shardrules._plan.check_context import KINDS
from tests.support.folders import ROOT

LITERAL = ROOT / "python" / "shardrules" / "_plan" / "findings.py"
PAGE = ROOT / "docs" / "findings.md"
_IN_LITERAL = re.compile(r"(?<=^CheckKind = Literal\[\n).*?(?=^\]  # fmt)", re.M | re.S)
_IN_PAGE = re.compile(r"(?<= writes this list\.\n\n).*?(?=\n## )", re.S)


def written():
    """{file: its text, with the kinds as they are registered}."""
    listed = ", ".join(f'"{kind}"' for kind in KINDS) + ","
    names = fill(listed, 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False) + "\n"
    sections = "\n".join(
        f"### {kind}\n**{levels.capitalize()}**: {about}.\n" for kind, (levels, about) in KINDS.items()
    )
    return {
        LITERAL: _IN_LITERAL.sub(lambda _: names, LITERAL.read_text(encoding="utf-8"), 1),
        PAGE: _IN_PAGE.sub(lambda _: sections, PAGE.read_text(encoding="utf-8"), 1),
    }


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")
