// How the rules of a list do on a tree, counted leaf by leaf: which match, which win, and who wins
// where another one matches. Reads a leaf's .shape and nothing else; a leaf costs what its matching
// rules cost to count.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "searched_rules.hpp"
#include "shape_reader.hpp"
#include "walk.hpp"

namespace shardrules::pytree {

class CountMatches final : public LeafVisitor {
  public:
    // strict: a leaf without a shape, or with an empty one, needs no rule and is not counted.
    CountMatches(std::size_t rules, const std::vector<SearchedRule>& searched, bool strict)
        : searched_(searched), strict_(strict), matched_(rules), won_(rules) {}
    Ref visit(PyObject* leaf, const LeafPlace& place) override;

    // In leaves.
    const std::vector<std::uint64_t>& matched() const { return matched_; }
    const std::vector<std::uint64_t>& won() const { return won_; }
    std::uint64_t unmatched() const { return unmatched_; }
    // (a rule that matched, the one that won)
    const std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t>& lost() const {
        return lost_;
    }

  private:
    const std::vector<SearchedRule>& searched_;
    bool strict_;
    ShapeReader shapes_;
    std::vector<std::uint64_t> matched_, won_;
    std::map<std::pair<automata::RuleId, automata::RuleId>, std::uint64_t> lost_;
    std::uint64_t unmatched_ = 0;
    std::vector<automata::RuleId> rules_;  // of the leaf at hand
};

}  // namespace shardrules::pytree
