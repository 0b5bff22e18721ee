// A compiled rule list as Python sees it (_core.RuleSet): the automaton, the rules that `re`
// evaluates, and a pool of lazy DFAs. Each call borrows a DFA of its own, so calls may nest and
// overlap between threads; the GIL guards the pool.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "automata/lazy_dfa.hpp"
#include "pytree/match_leaves.hpp"

namespace shardrules::bind {

class RuleSet {
  public:
    // patterns: per rule a str (a literal), a list of code words, or None (not regular).
    // classes: per class its ASCII members, as an int with bit c for character c.
    // accepts(number, character): whether the class has a non-ASCII member.
    // searched: (rule, search) for each rule given as None, ascending.
    RuleSet(const pybind11::sequence& patterns, const pybind11::sequence& classes,
            const pybind11::object& accepts, int word_class, int ascii_word_class,
            bool empty_text_has_no_non_boundary, const pybind11::sequence& searched,
            std::size_t memory_budget);

    pybind11::object first_match(const pybind11::str& path);
    pybind11::list all_matches(const pybind11::str& path) const;
    pybind11::tuple match(const pybind11::object& tree, const pybind11::str& separator,
                          pytree::SpecTable& specs, bool strict, const pybind11::object& min_size,
                          const pybind11::object& replicated, bool record_events);
    pybind11::dict stats() const;

  private:
    class Lease {
      public:
        explicit Lease(RuleSet& owner);
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;
        ~Lease();
        automata::LazyDfa& operator*() const { return *dfa_; }

      private:
        RuleSet& owner_;
        int exceptions_before_;
        std::unique_ptr<automata::LazyDfa> dfa_;
    };

    std::shared_ptr<const automata::Program> program_;
    automata::Oracle oracle_;
    std::vector<pytree::SearchedRule> searched_;
    std::size_t memory_budget_;
    std::vector<std::unique_ptr<automata::LazyDfa>> idle_;
};

void register_rule_set(pybind11::module_& module);
void register_spec_table(pybind11::module_& module);

}  // namespace shardrules::bind
