// Lists the leaves of a tree for a plan: the path and the kind of each leaf, and the rule, shape
// and dtype of each kind. A model of 10^5 leaves has some hundred kinds, so later steps work per
// kind. Costs a match, a path's text and a look-up per leaf.
#pragma once

#include <cstdint>
#include <vector>

#include "match_leaves.hpp"

namespace shardrules::resolution {

using pytree::Leaf;
using pytree::LeafVisitor;
using pytree::Ref;
using pytree::Visited;

class SurveyLeaves final : public LeafVisitor {
  public:
    // `decisions` answers with the object that stands for the rule in a kind.
    explicit SurveyLeaves(MatchLeaves& decisions)
        : decisions_(decisions),
          paths_(Ref::checked(PyList_New(0))),
          kinds_(Ref::checked(PyDict_New())) {}
    // The answer is the leaf's row, the number of leaves before it.
    Visited visit(Leaf& leaf) override;

    const Ref& paths() const { return paths_; }  // list of str
    const Ref& kinds() const { return kinds_; }  // {(rule, shape, dtype): number}
    const std::vector<std::int32_t>& numbers() const { return numbers_; }  // per leaf

  private:
    MatchLeaves& decisions_;
    Ref paths_, kinds_;
    std::vector<std::int32_t> numbers_;
};

}  // namespace shardrules::resolution
