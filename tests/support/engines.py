"""Each way through shardrules to the rule of a path, compared with `re` itself.

A rule is a pattern here, and its spec the rule's index.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.tree_util import tree_leaves

import shardrules as sr

Rule = str | re.Pattern[str]

NO_RULE = -1
# What is met for the first time is simulated; all has become states after so many rounds.
ROUNDS = 20
# With no memory everything is simulated, always.
NFA = {"memory_budget": 0}


def differences(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1, **options: Any) -> list[str]:
    """A reproducer for each path on which first_match, all_matches or a walk differs from `re`."""
    patterns = [re.compile(rule) for rule in rules]
    every = {path: [i for i, pattern in enumerate(patterns) if pattern.search(path)] for path in paths}
    indexed = sr.Rules([(rule, index) for index, rule in enumerate(rules)], **options)
    # A walk wants a rule for every leaf.
    walked = sr.Rules([*indexed, ("", NO_RULE)], **options)
    found: list[str] = []

    def compare(call: str, path: str, expected: object, answer: object) -> None:
        if answer != expected:
            found.append(reproducer(rules, f"{call}({path!r})", {"re": expected, "ours": answer}, options))

    for _ in range(rounds):
        for path in paths:
            compare("first_match", path, next(iter(every[path]), None), indexed.first_match(path))
            compare("all_matches", path, every[path], indexed.all_matches(path))
        for tree in _trees(paths):
            for path, rule in zip(tree_leaves(tree), tree_leaves(walked.match(tree, strict=False)), strict=True):
                compare("match", path, next(iter(every[path]), NO_RULE), rule)
    return found


def reproducer(rules: Sequence[Rule], call: str, answers: Mapping[str, object], options: Mapping[str, object]) -> str:
    """Source text of a call of `Rules` with these options, and what each engine answered."""
    shown_rules = ", ".join(f"({_shown(rule)}, {index})" for index, rule in enumerate(rules))
    shown_options = "".join(f", {name}={value}" for name, value in options.items())
    shown_answers = ", ".join(f"{engine}: {answer}" for engine, answer in answers.items())
    return f"sr.Rules([{shown_rules}]{shown_options}).{call}  # {shown_answers}"


def _trees(paths: Sequence[str]) -> Iterator[Any]:
    """All paths as the keys of one dict; and those of one depth in dicts in dicts. A leaf is its own path."""
    yield dict(zip(paths, paths, strict=True))
    depths = {path.count("/") for path in paths}
    for depth in depths if depths != {0} else ():
        tree: dict[str, Any] = {}
        for path in paths:
            if path.count("/") == depth:
                *outer, last = path.split("/")
                node = tree
                for key in outer:
                    node = node.setdefault(key, {})
                node[last] = path
        yield tree


def _shown(rule: Rule) -> str:
    # repr() of a compiled pattern cuts it at 200 characters.
    return repr(rule) if isinstance(rule, str) else f"re.compile({rule.pattern!r}, {rule.flags})"
