// How the rules of a list do on a tree, counted leaf by leaf: which match, which win, and who wins
// where another one matches. Reads a leaf's .shape and nothing else; a leaf costs what its matching
// rules cost to count.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "match_modes.hpp"
#include "pytree/walk.hpp"
#include "searched_rules.hpp"

namespace shardrules::resolution {

using pytree::Leaf;
using pytree::LeafVisitor;
using pytree::Ref;
using pytree::Visited;

class CountMatches final : public LeafVisitor {
  public:
    // strict: scalars, as the choices have it, need no rule and are not counted.
    CountMatches(const MatchModes& modes, const std::vector<SearchedRule>& searched,
                 const Choices& choices, bool strict)
        : modes_(modes),
          searched_(searched),
          choices_(choices),
          strict_(strict),
          matched_(modes.rule_count()),
          won_(modes.rule_count()) {}
    Visited visit(Leaf& leaf) override;

    // In leaves.
    const std::vector<std::uint64_t>& matched() const { return matched_; }
    const std::vector<std::uint64_t>& won() const { return won_; }
    std::uint64_t unmatched() const { return unmatched_; }
    // (a rule that matched, the one that won)
    const std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t>& lost() const {
        return lost_;
    }

  private:
    bool needs_no_rule(Leaf& leaf) const;

    const MatchModes& modes_;
    const std::vector<SearchedRule>& searched_;
    const Choices& choices_;
    bool strict_;
    std::vector<std::uint64_t> matched_, won_;
    std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t> lost_;
    std::uint64_t unmatched_ = 0;
    std::vector<automata::RuleId> rules_;  // of the leaf at hand
};

}  // namespace shardrules::resolution
