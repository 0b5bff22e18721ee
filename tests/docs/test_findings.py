"""The page of findings has a section for each kind, to which messages can link."""

import re
import typing

import pytest

import shardrules as sr
from tests.support.folders import ROOT

PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
CHECK, VERIFY = (typing.get_args(part) for part in typing.get_args(typing.get_type_hints(sr.types.Finding)["kind"]))


def sections(*titles):
    """The headings of the third level below headings of the second."""
    parts = [re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.M)[0] for title in titles]
    return tuple(re.findall(r"^### (\S+)$", "".join(parts), re.M))


def test_each_kind_has_a_section():
    assert sorted(sections("Findings of check")) == sorted(CHECK)
    assert sections("Findings of verify", "Findings of audit", "Findings of rehearse") == VERIFY
    assert sorted(re.findall(r"^### (.*)$", PAGE, re.M)) == sorted({*CHECK, *VERIFY})


@pytest.mark.parametrize("kind", [*CHECK, *VERIFY])
def test_a_section_says_the_level(kind):
    text = PAGE.partition(f"\n### {kind}\n")[2].partition("\n#")[0].strip()
    assert re.match(r"\*\*(Error|Warning|Info)\b", text), text
