// Logical axis names to mesh axes. By priority, as flax.linen does it: the rules are tried in their
// order; a rule gives its mesh axes to the dimension of its name if that has none yet and all of
// them are free in this array; of axes that do not divide the dimension, those that the policy
// leaves, and a rule that it leaves none loses. Or the last rule for a name wins, as in flax.core's
// dict. Costs one look at each rule whose name the array has. Immutable once made, knows names and
// axes as numbers only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "correction.hpp"

namespace shardrules::sharding {

using NameId = std::uint32_t;
using AxisId = std::uint32_t;

inline constexpr std::uint32_t kNone = UINT32_MAX;

enum class Precedence : std::uint8_t { kPriority, kLast };

struct LogicalRule {
    NameId name;
    std::vector<AxisId> axes;  // none: the dimension stays whole, and later rules do not apply
};

// A dimension of an array: its name, or the mesh axes that it has already; and how it may be cut.
struct NamedDim {
    NameId name = kNone;
    std::vector<AxisId> axes;
    Divides divides;  // asks its size; without it, every rule fits
};

enum class Loss : std::uint8_t {
    kDimTaken,     // the dimension had its axes from rule `to`
    kAxisTaken,    // an axis was used by dimension `to`
    kIndivisible,  // the axes do not divide the dimension, and the policy leaves none of them
};

struct LostRule {
    std::uint32_t rule;
    std::uint32_t dim;
    Loss loss;
    std::uint32_t to;
};

struct Resolution {
    std::vector<std::uint32_t> rules;  // per dimension the rule that it got its axes from, or kNone
    std::vector<LostRule> lost;        // in the order of the rules
};

class LogicalRuleSet {
  public:
    // axis_sizes[id]: devices along the axis; neither they nor the policy for axes that do not
    // divide are looked at for dimensions without a size.
    LogicalRuleSet(std::vector<LogicalRule> rules, const std::vector<std::int64_t>& axis_sizes,
                   Precedence precedence, Misfit indivisible);

    // By priority, the names of an array must differ from each other, and a rule may lose; as a
    // dict, neither sizes nor other dimensions matter.
    Resolution resolve(std::span<const NamedDim> dims) const;

  private:
    Resolution by_priority(std::span<const NamedDim> dims) const;
    Resolution last(std::span<const NamedDim> dims) const;
    std::vector<AxisId> fitting(std::uint32_t rule, const NamedDim& dim) const;
    std::vector<std::uint32_t> rules_on(std::span<const NamedDim> dims) const;

    std::vector<LogicalRule> rules_;
    std::vector<Corrector> correctors_;  // per rule
    std::size_t axis_count_;
    std::vector<std::vector<std::uint32_t>> by_name_;  // the rules on each name, ascending
    Precedence precedence_;
};

}  // namespace shardrules::sharding
