// The rules outside the automaton, which `re` evaluates path by path, and how their answers join
// the automaton's. Each costs a call of Python for each path that it is asked about.
#pragma once

#include <algorithm>
#include <vector>

#include "automata/program.hpp"
#include "pytree/ref.hpp"

namespace shardrules::resolution {

using pytree::Ref;

// A call of search(path) that is not None is a match.
struct SearchedRule {
    automata::RuleId rule;
    Ref search;

    bool matches(const Ref& path) const {
        return Ref::checked(PyObject_CallOneArg(search.get(), path.get())).get() != Py_None;
    }
};

// The first rule that matches the path, given the automaton's answer, which stands only if no
// searched rule (ascending) before it matches.
template <class PathText>
automata::RuleId first_match(automata::RuleId from_automaton,
                             const std::vector<SearchedRule>& searched, PathText path_text) {
    if (searched.empty() || searched.front().rule >= from_automaton) return from_automaton;
    const Ref path = path_text();
    for (const SearchedRule& candidate : searched) {
        if (candidate.rule >= from_automaton) break;
        if (candidate.matches(path)) return candidate.rule;
    }
    return from_automaton;
}

// Adds the searched rules before `end` that match the path to those of the automaton, ascending.
template <class PathText>
void add_matches(const std::vector<SearchedRule>& searched, PathText path_text,
                 std::vector<automata::RuleId>& rules, automata::RuleId end = automata::kNoRule) {
    if (searched.empty() || searched.front().rule >= end) return;
    const Ref path = path_text();
    for (const SearchedRule& candidate : searched) {
        if (candidate.rule >= end) break;
        if (candidate.matches(path)) rules.push_back(candidate.rule);
    }
    std::sort(rules.begin(), rules.end());
}

}  // namespace shardrules::resolution
