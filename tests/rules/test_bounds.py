"""Any pattern that `re` accepts, in bounded time and memory: shown by counters, not by the clock."""

import re
import subprocess
import sys

import pytest

import shardrules as sr
from shardrules._rules.rules import matcher_of
from tests.support import corpus
from tests.support.contexts import measures_memory
from tests.support.corpus import manifest
from tests.support.trees import paths_of
from tests.support.work import counters

# Exponential for `re`, or for a DFA that is built in advance.
ADVERSARIAL = [
    (r"(a|b)*a(a|b){20}", "ab" * 200, True),
    (r"(a|b)*a(a|b){20}", "b" * 400 + "a" * 20, False),
    (r"(a|b)*a(a|b){20}c", "ab" * 200, False),
    (r"(x+x+)+y", "x" * 2000, False),
    (r"(x+x+)+y", "x" * 2000 + "y", True),
    (r".*.*.*.*=.*", "a" * 2000, False),
    (r".*.*.*.*=.*", "a" * 2000 + "=", True),
    (r"(a?){50}a{50}", "a" * 49, False),
    (r"(a?){50}a{50}", "a" * 50, True),
    (r"[\s\S]{1000}", "a" * 999, False),
    (r"[\s\S]{1000}", "a" * 1000, True),
    (r"((a*)*)*b", "a" * 2000, False),
    (r"(.*){10}(.*){10}z", "a" * 500, False),
]


@pytest.mark.parametrize("memory_budget", [0, 10_000, 32 << 20])
@pytest.mark.parametrize(("pattern", "text", "found"), ADVERSARIAL)
def test_adversarial_patterns(pattern, text, found, memory_budget):
    rules = sr.Rules([(pattern, None)], memory_budget=memory_budget)
    assert rules.fallbacks == ()
    for calls in range(1, 4):
        assert rules.first_match(text) == (0 if found else None)
        counted = counters(rules)
        # Each character is stepped over once a call: simulated, or by building at most one state.
        assert counted.simulated_steps + counted.states_built <= calls * (2 * len(text) + 1) + 1
    assert counted.program_nodes < 2500
    if memory_budget == 0:
        assert counted.states_built == 1


NUMBERS = "|".join(map(str, range(256)))
ALTERNATIONS = {
    "layers": (rf"layers\.({NUMBERS})\.mlp\..*", rf"layers\.({NUMBERS})\.self_attn\..*"),
    "experts": (rf"experts\.({NUMBERS})\.up_proj", rf"experts\.({NUMBERS})\.down_proj"),
    "anywhere": (rf".*({NUMBERS}).*({NUMBERS}).*up", rf".*({NUMBERS}).*({NUMBERS}).*down"),
    "counted": (rf".{{0,40}}({NUMBERS}).{{0,40}}up", rf".{{0,40}}({NUMBERS}).{{0,40}}down"),
    "spelt out": tuple("|".join(rf".*experts\.{i}\..*{name}" for i in range(256)) for name in ("up", "down")),
}


@pytest.mark.parametrize("shape", ALTERNATIONS)
def test_alternations_of_hundreds_of_numbers(shape):
    names = [parameter.name for parameter in manifest("deepseek-v3").parameters][::5]
    patterns = ALTERNATIONS[shape]
    rules = sr.Rules([(pattern, None) for pattern in patterns])
    found = [rules.first_match(name) for name in names]
    compiled = [re.compile(pattern) for pattern in patterns]
    for name, rule in list(zip(names, found, strict=True))[::500]:
        matching = (i for i, one in enumerate(compiled) if one.search(name))
        assert rule == next(matching, None), name
    counted = counters(rules)
    assert rules.fallbacks == ()
    assert counted.program_nodes < 6000
    assert counted.states_built < 3000
    # The other characters are one look-up.
    assert counted.simulated_steps < 0.3 * sum(map(len, names))


def test_transitions_that_take_turns_become_states():
    tree = corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract)
    pairs = corpus.rules("easydel__deepseek_v2-DeepseekV2Config-v0.0.80")
    for first in range(4):
        rules = sr.Rules(pairs[first:])
        rules.match(tree)
        # Of 700,000 characters: each transition some times, until it is worth a state.
        assert counters(rules).simulated_steps < 12_000


def test_memory_budget_is_kept_and_answers_stay_right(rng):
    pattern = re.compile("[ab]*a[ab]{12}c|b[ab]{9}a[ab]{3}/")
    rules = sr.Rules([(pattern, None), ("aaaab", None)], memory_budget=20_000)
    for _ in range(300):
        text = "".join(rng.choices("aabbc/", weights=(9, 9, 9, 9, 1, 1), k=60))
        expected = 0 if pattern.search(text) else 1 if "aaaab" in text else None
        assert rules.first_match(text) == expected
    counted = counters(rules)
    assert counted.cache_clears > 0
    # Without the budget it would have kept them all.
    roomy = sr.Rules(list(rules))
    for _ in range(300):
        roomy.first_match("".join(rng.choices("aabbc/", weights=(9, 9, 9, 9, 1, 1), k=60)))
    built = counters(roomy).states_built
    assert built > counted.states_built / (counted.cache_clears + 1)


@pytest.mark.parametrize("memory_budget", [0, 4000, 100_000, 32 << 20])
def test_what_the_budget_makes_the_walk_forget_is_found_again(memory_budget, rng):
    """The way back up a tree: answers are those for each path alone, whatever is remembered."""
    pattern = r"b[ab/]{0,60}a[ab/]{7}z|a[ab/]{300}z"
    rules = sr.Rules([(pattern, None), (r"ab/.{0,40}z", "tp")], memory_budget=memory_budget)
    alone = sr.Rules(list(rules))

    def tree(depth):
        if depth == 0:
            return 0
        keys = rng.sample(["a", "b", "ab", "ba", "bbbb", "z"], 3 if depth % 5 == 0 else 2)
        return {key: 0 if i else tree(depth - 1) for i, key in enumerate(keys)}

    for _ in range(5):
        nested = {"a": tree(60), "b": tree(30)}
        matcher = matcher_of(rules)
        result = matcher.decide(nested, matcher.rule_indices(), None, -1, strict=False)
        paths, found = paths_of(nested), paths_of(result.tree)
        assert len(paths) > 60
        expected = {path: alone.first_match(path) for path in paths}
        assert found == {path: -1 if rule is None else rule for path, rule in expected.items()}


DEEP = """
import resource, sys
import shardrules as sr
from shardrules._rules.rules import matcher_of

sys.setrecursionlimit(10_000)
tree = 0
for _ in range(800):
    tree = {"ab": tree}
rules = sr.Rules([("a.{0,8000}b.{0,8000}c", None)], memory_budget=int(sys.argv[1]))
rules.first_match("ab" * 50)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
matcher = matcher_of(rules)
matcher.decide(tree, matcher.rule_indices(), None, -1, strict=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@measures_memory
@pytest.mark.parametrize("memory_budget", [0, 1 << 20])
def test_the_way_down_a_deep_tree_is_in_the_memory_budget(memory_budget):
    ran = subprocess.run([sys.executable, "-c", DEEP, str(memory_budget)], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 6000  # KiB
