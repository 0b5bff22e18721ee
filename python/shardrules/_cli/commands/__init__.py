"""The commands of `shardrules`, a module each: `command` loads a plan, asks, and shows the answer.

Must not know how anything is decided or drawn.
"""

__all__: list[str] = []
