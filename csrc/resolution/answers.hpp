// What a leaf gets from the rule that has won it. The walk asks; what the answer is made of (a spec
// cut to a rank, a NamedSharding) is the implementation's.
#pragma once

#include "automata/program.hpp"
#include "pytree/leaf_visitor.hpp"

namespace shardrules::resolution {

inline constexpr Py_ssize_t kAnyRank = PY_SSIZE_T_MAX;

class Answers {
  public:
    struct Answer {
        pytree::Ref object;  // null if the leaf cannot be given anything
        bool truncated;      // the rule's spec is longer than the leaf's rank
    };
    // `rank` is that of the leaf, or kAnyRank, for the rule's whole spec.
    virtual Answer get(automata::RuleId rule, pytree::Leaf& leaf, Py_ssize_t rank) = 0;
    virtual std::size_t rule_count() const = 0;
    virtual ~Answers() = default;

  protected:
    Answers() = default;
    Answers(const Answers&) = default;
    Answers(Answers&&) = default;
    Answers& operator=(const Answers&) = default;
    Answers& operator=(Answers&&) = default;
};

}  // namespace shardrules::resolution
