"""The engines that choose a rule for a path: `re` itself, and each way through shardrules.

An engine takes rules, which are patterns here, and paths; it gives for each path the index of the
first rule that matches, or NO_RULE.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax.tree_util import tree_leaves

import shardrules as sr

Rule = str | re.Pattern[str]
Engine = Callable[[Sequence[Rule], Sequence[str]], list[int]]

NO_RULE = -1
# What is met for the first time is simulated; all has become states after so many rounds.
ROUNDS = 20
# With no memory everything is simulated, always.
NFA = {"memory_budget": 0}


def searched(rules: Sequence[Rule], paths: Sequence[str]) -> list[int]:
    """`re`, rule by rule: what all others must say."""
    return [next((i for i, rule in enumerate(rules) if re.search(rule, path)), NO_RULE) for path in paths]


def first_match(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1, **options: Any) -> list[int]:
    compiled = _indexed(rules, **options)

    def choose() -> list[int]:
        found = map(compiled.first_match, paths)
        return [NO_RULE if rule is None else rule for rule in found]

    return _repeated(choose, rounds)


def first_of_all_matches(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1) -> list[int]:
    compiled = _indexed(rules)

    def choose() -> list[int]:
        return [next(iter(compiled.all_matches(path)), NO_RULE) for path in paths]

    return _repeated(choose, rounds)


def flat_walk(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1) -> list[int]:
    """All paths at once, as the keys of one dict."""
    compiled = _with_catch_all(rules)
    tree = dict.fromkeys(paths, "leaf")

    def choose() -> list[int]:
        matched = compiled.match(tree, strict=False)
        return [matched[path] for path in paths]

    return _repeated(choose, rounds)


def nested_walk(rules: Sequence[Rule], paths: Sequence[str], rounds: int = 1, **options: Any) -> list[int]:
    """Paths of the same depth as one tree, of which the matcher reads key after key."""
    compiled = _with_catch_all(rules, **options)
    depths = {path.count("/") for path in paths}
    trees = [_nested(path for path in paths if path.count("/") == depth) for depth in depths]

    def choose() -> list[int]:
        chosen: dict[str, int] = {}
        for tree in trees:
            matched = compiled.match(tree, strict=False)
            chosen.update(zip(tree_leaves(tree), tree_leaves(matched), strict=True))
        return [chosen[path] for path in paths]

    return _repeated(choose, rounds)


ENGINES: dict[str, Engine] = {
    "re": searched,
    "dfa": partial(first_match, rounds=ROUNDS),
    "nfa": partial(first_match, **NFA),
    "all_matches": partial(first_of_all_matches, rounds=ROUNDS),
    "walk": partial(flat_walk, rounds=ROUNDS),
    "nested walk": partial(nested_walk, rounds=ROUNDS),
    "nested walk, nfa": partial(nested_walk, **NFA),
}


@dataclass
class Outcome:
    """What a comparison of many cases came to; a case is a rule list and a path."""

    cases: int = 0
    differences: list[str] = field(default_factory=list)


def differences(rules: Sequence[Rule], paths: Sequence[str], **options: Any) -> list[str]:
    """A reproducer for each path on which first_match or all_matches differs from `re`."""
    compiled = _indexed(rules, **options)
    found = []
    for path in paths:
        every = [i for i, rule in enumerate(rules) if re.search(rule, path)]
        first = every[0] if every else None
        for method, expected in ((compiled.first_match, first), (compiled.all_matches, every)):
            if (answer := method(path)) != expected:
                call = f"{method.__name__}({path!r})"
                found.append(reproducer(rules, call, {"re": expected, "ours": answer}, options))
    return found


def reproducer(rules: Sequence[Rule], call: str, answers: Mapping[str, object], options: Mapping[str, object]) -> str:
    """Source text of a call of `Rules` with these options, and what each engine answered."""
    shown_rules = ", ".join(f"({_shown(rule)}, {index})" for index, rule in enumerate(rules))
    shown_options = "".join(f", {name}={value}" for name, value in options.items())
    shown_answers = ", ".join(f"{engine}: {answer}" for engine, answer in answers.items())
    return f"sr.Rules([{shown_rules}]{shown_options}).{call}  # {shown_answers}"


def _repeated(choose: Callable[[], list[int]], rounds: int) -> list[int]:
    """What is chosen first; or later, if that is something else."""
    first = choose()
    again = (choose() for _ in range(rounds - 1))
    return next((later for later in again if later != first), first)


def _indexed(rules: Sequence[Rule], **options: Any) -> sr.Rules:
    return sr.Rules([(rule, index) for index, rule in enumerate(rules)], **options)


def _with_catch_all(rules: Sequence[Rule], **options: Any) -> sr.Rules:
    """A walk wants a rule for every leaf."""
    indexed = ((rule, index) for index, rule in enumerate(rules))
    return sr.Rules([*indexed, ("", NO_RULE)], **options)


def _nested(paths: Iterable[str]) -> dict[str, Any]:
    """Dicts in dicts, one level for each key; a leaf is its own path."""
    tree: dict[str, Any] = {}
    for path in paths:
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = path
    return tree


def _shown(rule: Rule) -> str:
    # repr() of a compiled pattern cuts it at 200 characters.
    return repr(rule) if isinstance(rule, str) else f"re.compile({rule.pattern!r}, {rule.flags})"
