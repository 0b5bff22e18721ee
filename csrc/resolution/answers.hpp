// What a leaf gets from the rule that has won it. The walk asks; what the answer is made of (a spec
// cut to a rank, a NamedSharding) is the implementation's.
#pragma once

#include <cstdint>

#include "automata/program.hpp"
#include "pytree/ref.hpp"

namespace shardrules::resolution {

inline constexpr Py_ssize_t kAnyRank = PY_SSIZE_T_MAX;

// What an answer depends on, beside the rule.
enum class DependsOn : std::uint8_t { kRank, kShape, kMore };

class Answers {
  public:
    struct Answer {
        pytree::Ref object;  // null if the leaf cannot be given anything
        bool truncated;      // the rule's spec is longer than the leaf's rank
        DependsOn depends_on;
    };
    // `shape` is that of the leaf, and not looked at if the rank is kAnyRank.
    virtual Answer get(automata::RuleId rule, PyObject* leaf, PyObject* shape, Py_ssize_t rank) = 0;
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
