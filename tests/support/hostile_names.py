"""Names from anybody, and what may reach a terminal of a text that has them."""

import re
from typing import Final

HOSTILE: Final = (
    "\x1b[2J\x1b[1;1Howned", "\x1b]52;c;cm0gLXJmIC8=\x07", "\x1b]0;title\x1b\\", "\x9b31mred", "\x9d52;c;eA==\x9c",
    "\x07bell", "\x08\x08back", "\rover", "\x7fdel", "\0nul", "\ttab",
    "a\n0 errors, 0 warnings, 0 info", "a\r\n::error::x", "a\x0b0 errors", "a\x0c0 errors", "a\x85next", "a\u2028line", "a\u2029paragraph",
    "\u202egnp.x", "\u2066isolate\u2069", "\u200bzero", "\ufeffbom", "soft\u00adhyphen", "tag\U000e0041",
    "\ud800half", "no\xa0break",
    "::error::forged", "  ::warning file=x::forged", "::stop-commands::token", "::add-mask::a", "::set-output name=a::b",
    "##[error]forged", "x ##[group]forged", "###[error]forged", "##vso[task.setvariable variable=a]b", "##teamcity[testFailed name='a']",
    "[/x]", "[bold]x[/bold]", "[link=file:///etc/passwd]x[/link]", "a  ::error::folded", "{}{0..3}",
)  # fmt: skip
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")  # those of our own tables
COMMANDS: Final = re.compile(r"^\s*::|##[\w.-]*\[", re.M)
ANNOTATION: Final = re.compile(r"::(error|warning|notice) (file=[^:,]*,(line=[0-9]+,)?)?title=shardrules [a-z-]+::")


def assert_safe(text: str, *, is_github: bool = False) -> None:
    """No control but our colours, and no command of a CI service."""
    plain = COLOURS.sub("", text)
    assert all(c.isprintable() for c in plain.replace("\n", "")), ascii(text)
    for line in plain.split("\n"):
        rest = ANNOTATION.sub("", line, count=1) if is_github else line
        assert not COMMANDS.search(rest), ascii(line)
