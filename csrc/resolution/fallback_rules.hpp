// Rules that are not regular, which `re` evaluates instead of the automaton, and how their matches
// are merged with the automaton's. Each costs a call into Python per path.
#pragma once

#include <algorithm>
#include <vector>

#include "automata/program.hpp"
#include "pytree/ref.hpp"

namespace shardrules::resolution {

using pytree::Ref;

// The rule matches a path if search(path) is not None.
struct FallbackRule {
    automata::RuleId rule;
    Ref search;

    bool matches(const Ref& path) const {
        return Ref::checked(PyObject_CallOneArg(search.get(), path.get())).get() != Py_None;
    }
};

// The first rule that matches the path: the first one of the automaton, or a fallback rule before
// it. Fallback rules are in ascending order.
template <class PathText>
automata::RuleId first_match(automata::RuleId from_automaton,
                             const std::vector<FallbackRule>& fallbacks, PathText path_text) {
    if (fallbacks.empty() || fallbacks.front().rule >= from_automaton) return from_automaton;
    const Ref path = path_text();
    for (const FallbackRule& candidate : fallbacks) {
        if (candidate.rule >= from_automaton) break;
        if (candidate.matches(path)) return candidate.rule;
    }
    return from_automaton;
}

// Adds the fallback rules before `end` that match the path to `rules`, which are ascending.
template <class PathText>
void add_matches(const std::vector<FallbackRule>& fallbacks, PathText path_text,
                 std::vector<automata::RuleId>& rules, automata::RuleId end = automata::kNoRule) {
    if (fallbacks.empty() || fallbacks.front().rule >= end) return;
    const Ref path = path_text();
    for (const FallbackRule& candidate : fallbacks) {
        if (candidate.rule >= end) break;
        if (candidate.matches(path)) rules.push_back(candidate.rule);
    }
    std::ranges::sort(rules);
}

}  // namespace shardrules::resolution
