// A compiled rule list as Python sees it (_core.RuleSet): the automaton, the rules that `re`
// evaluates, and the lazy DFAs. Each call borrows a DFA of its own, so calls may nest and overlap
// between threads.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "automata/rule_matcher.hpp"
#include "given.hpp"
#include "resolution/match_leaves.hpp"

namespace shardrules::bind {

class RuleSet {
  public:
    // patterns: per rule a str (a literal), a list of code words, or None (not regular).
    // classes: per class its ASCII members, as an int with bit c for character c.
    // accepts(number, character): whether the class has a non-ASCII member.
    // searched: (number, search) for each pattern given as None, ascending.
    // modes: the number of the dialect's match modes. `patterns` has all rules for the first mode,
    // then all for the next one.
    RuleSet(const pybind11::sequence& patterns, const pybind11::sequence& classes,
            const pybind11::object& accepts, int word_class, int ascii_word_class,
            bool empty_text_has_no_non_boundary, const pybind11::sequence& searched,
            Given<std::size_t> memory_budget, std::size_t modes,
            const resolution::Choices& choices);

    pybind11::object first_match(Given<pybind11::str> path);
    pybind11::list all_matches(Given<pybind11::str> path);
    pybind11::tuple match(const pybind11::object& tree, resolution::Answers& answers,
                          Given<bool> strict, const pybind11::object& min_size,
                          const pybind11::object& replicated, const pybind11::object& unmatched,
                          const pybind11::object& ambiguous, bool record_events);
    pybind11::tuple survey(const pybind11::object& tree, resolution::Answers& answers,
                           const pybind11::object& min_size, const pybind11::object& replicated,
                           const pybind11::object& unmatched, const pybind11::object& ambiguous);
    pybind11::tuple count_matches(const pybind11::object& tree, Given<bool> strict);
    pybind11::tuple counters() const;

    // For the garbage collector.
    int traverse(visitproc visit, void* arg) const;
    void clear();

  private:
    automata::RuleMatcher compile(const pybind11::sequence& patterns,
                                  const pybind11::sequence& classes, int word_class,
                                  int ascii_word_class, bool empty_text_has_no_non_boundary,
                                  std::size_t memory_budget) const;
    automata::Oracle oracle() const;
    automata::Search search() const {
        return choices_.unique ? automata::Search::kAll : automata::Search::kFirst;
    }
    void check_answers(const resolution::Answers& answers) const;

    pytree::Ref accepts_;
    automata::RuleMatcher matcher_;
    std::vector<resolution::SearchedRule> searched_;
    resolution::MatchModes modes_;
    resolution::Choices choices_;
};

}  // namespace shardrules::bind
