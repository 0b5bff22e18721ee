// A compiled rule list (_core.RuleSet): the automaton with its lazy DFAs, and the fallback rules
// that `re` evaluates. Each call borrows a DFA, so calls may nest, and overlap between threads.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "automata/rule_matcher.hpp"
#include "pybind_extras.hpp"
#include "resolution/match_leaves.hpp"

namespace shardrules::bind {

class RuleSet {
  public:
    // patterns: per rule a str (a literal), a list of code words, or None (not regular).
    // classes: per class its ASCII members, as an int with bit c for character c.
    // oracle(number, character): whether the class has a non-ASCII member.
    // fallbacks: (number, search) for each pattern that is None, ascending.
    // modes: the number of the dialect's match modes. `patterns` has all rules for the first mode,
    // then all for the next one.
    RuleSet(const pybind11::sequence& patterns, const pybind11::sequence& classes,
            const pybind11::object& oracle, int word_class, int ascii_word_class,
            bool empty_text_has_no_non_boundary, const pybind11::sequence& fallbacks,
            Argument<std::size_t> memory_budget, std::size_t modes,
            resolution::DialectOptions dialect);

    pybind11::object first_match(Argument<pybind11::str> path);
    pybind11::list all_matches(Argument<pybind11::str> path);
    pybind11::tuple match(const pybind11::object& tree, resolution::Answers& answers,
                          Argument<bool> strict, const pybind11::object& min_size,
                          const pybind11::object& replicated, const pybind11::object& unmatched,
                          const pybind11::object& ambiguous, bool record_events);
    pybind11::tuple survey(const pybind11::object& tree, resolution::Answers& answers,
                           const pybind11::object& min_size, const pybind11::object& replicated,
                           const pybind11::object& unmatched, const pybind11::object& ambiguous);
    pybind11::tuple count_matches(const pybind11::object& tree, Argument<bool> strict);
    pybind11::tuple count_paths(Argument<pybind11::list> paths);
    pybind11::tuple counters() const;

    // For the garbage collector.
    int traverse(visitproc visit, void* arg) const;
    void clear();

  private:
    automata::RuleMatcher compile(const pybind11::sequence& patterns,
                                  const pybind11::sequence& classes, int word_class,
                                  int ascii_word_class, bool empty_text_has_no_non_boundary,
                                  std::size_t memory_budget) const;
    automata::Oracle asking_oracle() const;
    template <class Search>
    auto search_in(const pybind11::str& text, Search search);
    automata::Search search() const {
        return dialect_.unique ? automata::Search::kAll : automata::Search::kFirst;
    }
    void check_answers(const resolution::Answers& answers) const;

    pytree::Ref oracle_;
    bool has_classes_;
    automata::RuleMatcher matcher_;
    std::vector<resolution::FallbackRule> fallbacks_;
    resolution::MatchModes modes_;
    resolution::DialectOptions dialect_;
};

}  // namespace shardrules::bind
