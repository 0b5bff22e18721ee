// Maps logical axis names to mesh axes, both as numbers. With Precedence::kPriority, as in
// flax.linen, the rules are tried in their order. A rule applies to the dimension of its name if
// that has no axes yet and all axes of the rule are free in this array; the policy drops axes that
// do not divide the dimension, and a rule that has none left loses. With Precedence::kLast, as in
// flax.core's dict, the last rule for a name wins. Looks once at each rule on a name of the array.
// Immutable.
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

// A dimension of an array: its name, or the mesh axes that it has already.
struct NamedDim {
    NameId name = kNone;
    std::vector<AxisId> axes;
    Divides divides;  // the size; without it, every rule fits
};

enum class Loss : std::uint8_t {
    kDimTaken,     // the dimension has its axes from rule `to`
    kAxisTaken,    // dimension `to` uses one of the axes
    kIndivisible,  // the axes do not divide the dimension, and the policy drops them all
};

struct LostRule {
    std::uint32_t rule;
    std::uint32_t dim;
    Loss loss;
    std::uint32_t to;
};

struct Resolution {
    std::vector<std::uint32_t> rules;  // per dimension the rule that applies, or kNone
    std::vector<LostRule> lost;        // in the order of the rules
};

class LogicalRuleSet {
  public:
    // axis_sizes[id]: devices along the axis. The sizes and the policy matter only for dimensions
    // that have a size.
    LogicalRuleSet(std::vector<LogicalRule> rules, const std::vector<std::int64_t>& axis_sizes,
                   Precedence precedence, AxisPolicy indivisible);

    // With kPriority, the names of an array must differ from each other. With kLast, sizes and
    // other dimensions do not matter.
    Resolution resolve(std::span<const NamedDim> dims) const;

  private:
    Resolution by_priority(std::span<const NamedDim> dims) const;
    Resolution last(std::span<const NamedDim> dims) const;
    std::vector<AxisId> fitting_axes(std::uint32_t rule, const NamedDim& dim) const;
    std::vector<std::uint32_t> rules_on(std::span<const NamedDim> dims) const;

    std::vector<LogicalRule> rules_;
    std::vector<Corrector> correctors_;  // per rule
    std::size_t axis_count_;
    std::vector<std::vector<std::uint32_t>> by_name_;  // rules on each name, ascending
    Precedence precedence_;
};

}  // namespace shardrules::sharding
