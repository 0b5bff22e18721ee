"""Random patterns and texts over a small alphabet, for differential runs against `re`.

Grammar-directed, so nearly every pattern is valid; every operator that the automaton handles
occurs, and with `irregular`, those that it leaves to `re` too.
"""

import random
import re
import warnings

TEXT_CHARACTERS = "aaabbB_/0\n é"
_ATOMS = (
    "a", "b", "B", "/", "0", "_", ".", "[ab]", "[^a]", "[^/]+", "[a-b0]", r"\d", r"\w", r"\W", r"\s",
    r"\S", r"\D", "é", "É", r"[\w/]", r"[^\w]", r"\n", r"[^\n]", r"[\s\S]", "(?:)", "ab", "ba",
)  # fmt: skip
_ANCHORS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")
_REPEATS = ("*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,3}?", "{2,}", "{,2}", "{0}")
_SMALL_REPEATS = ("?", "??", "{0,2}", "{2}")
_SCOPES = ("(?i:", "(?s:", "(?m:", "(?a:", "(?-i:", "(?is-m:", "(?u:")
_IRREGULAR = ("(?=a)", "(?!b)", "(?<=a)", "(?<!/)", "(?>a*)", "a*+", r"(a)\1")
FLAGS = (0, 0, 0, re.I, re.M, re.S, re.A, re.I | re.M, re.I | re.A, re.M | re.S)


def random_pattern(rng: random.Random, depth: int = 3, irregular: bool = False, repeated: bool = False) -> str:
    """A pattern with up to `depth` levels of groups.

    Inside a repeated group repeats stay small, since `re` takes exponential time on nested ones.
    """
    branches = [_sequence(rng, depth, irregular, repeated) for _ in range(rng.choice((1, 1, 2, 3)))]
    return "|".join(branches)


def random_text(rng: random.Random, max_length: int = 8) -> str:
    return "".join(rng.choices(TEXT_CHARACTERS, k=rng.randint(0, max_length)))


def compiles(pattern: str, flags: int = 0) -> re.Pattern[str] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, flags)
    except re.error:
        return None


def _sequence(rng: random.Random, depth: int, irregular: bool, repeated: bool) -> str:
    items = rng.randint(0, 2 if repeated else 4)
    return "".join(_item(rng, depth, irregular, repeated) for _ in range(items))


def _item(rng: random.Random, depth: int, irregular: bool, repeated: bool) -> str:
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(_ANCHORS)
    if irregular and roll < 0.22:
        return rng.choice(_IRREGULAR)
    repeat = rng.choice(_SMALL_REPEATS if repeated else _REPEATS) if rng.random() < 0.4 else ""
    if depth > 0 and roll < 0.45:
        content = random_pattern(rng, depth - 1, irregular, repeated or repeat != "")
        return rng.choice(("(", "(?:", *_SCOPES)) + content + ")" + repeat
    return rng.choice(_ATOMS) + repeat
