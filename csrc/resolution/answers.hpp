// The object that a leaf gets for its winning rule: a spec of the leaf's rank, or a NamedSharding,
// according to the implementation.
#pragma once

#include "automata/program.hpp"
#include "pytree/leaf_visitor.hpp"

namespace shardrules::resolution {

inline constexpr Py_ssize_t kAnyRank = PY_SSIZE_T_MAX;

class Answers {
  public:
    struct Answer {
        pytree::Ref object;  // null if the rule cannot be applied to the leaf
        bool truncated;      // whether the rule's spec is longer than the leaf's rank
    };
    // `rank` is the leaf's, or kAnyRank for the rule's full spec.
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
