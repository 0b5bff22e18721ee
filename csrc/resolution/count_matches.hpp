// Counts leaves of a tree, or paths: per rule those that it matches and those that it wins, per
// pair those that one rule matches and the other one wins. Reads only .shape of a leaf. Costs a few
// additions per matching rule.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "dialect_options.hpp"
#include "fallback_rules.hpp"
#include "match_modes.hpp"
#include "pytree/walk.hpp"

namespace shardrules::resolution {

using pytree::Leaf;
using pytree::LeafVisitor;
using pytree::Ref;
using pytree::Visited;

class CountMatches final : public LeafVisitor {
  public:
    // strict: leaves that need no rule, as the dialect has it, are not counted.
    CountMatches(const MatchModes& modes, const std::vector<FallbackRule>& fallbacks,
                 const DialectOptions& dialect, bool strict)
        : modes_(modes),
          fallbacks_(fallbacks),
          dialect_(dialect),
          strict_(strict),
          matched_(modes.rule_count()),
          won_(modes.rule_count()) {}
    Visited visit(Leaf& leaf) override;
    // Counts a path, a str. The cursor is at the bottom, and stays there.
    void count(automata::LazyDfa& dfa, const Ref& path);

    // Numbers of leaves.
    const std::vector<std::uint64_t>& matched() const { return matched_; }
    const std::vector<std::uint64_t>& won() const { return won_; }
    std::uint64_t unmatched() const { return unmatched_; }
    // {(matching rule, winning rule): leaves}
    const std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t>& lost() const {
        return lost_;
    }

  private:
    bool needs_no_rule(Leaf& leaf) const;
    // Counts the matches of the cursor's position.
    template <class PathText>
    void count_here(const automata::LazyDfa& dfa, PathText path_text);

    const MatchModes& modes_;
    const std::vector<FallbackRule>& fallbacks_;
    const DialectOptions& dialect_;
    bool strict_;
    std::vector<std::uint64_t> matched_, won_;
    std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t> lost_;
    std::uint64_t unmatched_ = 0;
    std::vector<automata::RuleId> rules_;  // of the current leaf
};

}  // namespace shardrules::resolution
