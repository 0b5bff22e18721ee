#include "logical.hpp"

#include <algorithm>
#include <stdexcept>

namespace shardrules::sharding {

LogicalRuleSet::LogicalRuleSet(std::vector<LogicalRule> rules,
                               const std::vector<std::int64_t>& axis_sizes, Precedence precedence,
                               AxisPolicy indivisible)
    : rules_(std::move(rules)), axis_count_(axis_sizes.size()), precedence_(precedence) {
    for (std::uint32_t index = 0; index < rules_.size(); ++index) {
        const LogicalRule& rule = rules_[index];
        SpecDim dim;
        for (const AxisId axis : rule.axes) {
            if (axis >= axis_count_) throw std::invalid_argument("an axis without a size");
            dim.axis_sizes.push_back(axis_sizes[axis]);
        }
        correctors_.emplace_back(std::span(&dim, 1), Correction{AxisPolicy::kKeep, indivisible});
        if (rule.name >= by_name_.size()) by_name_.resize(rule.name + std::size_t{1});
        by_name_[rule.name].push_back(index);
    }
}

std::vector<std::uint32_t> LogicalRuleSet::rules_on(std::span<const NamedDim> dims) const {
    std::vector<std::uint32_t> rules;
    for (const NamedDim& dim : dims)
        if (dim.name < by_name_.size())
            rules.insert(rules.end(), by_name_[dim.name].begin(), by_name_[dim.name].end());
    std::ranges::sort(rules);
    return rules;
}

std::vector<AxisId> LogicalRuleSet::fitting_axes(std::uint32_t rule, const NamedDim& dim) const {
    const std::vector<AxisId>& axes = rules_[rule].axes;
    if (!dim.divides) return axes;
    const Kept kept = correctors_[rule].kept(1, [&](std::size_t) { return dim.divides; });
    std::vector<AxisId> fitting;
    for (std::size_t i = 0; i < axes.size(); ++i)
        if (((kept >> i) & 1) != 0) fitting.push_back(axes[i]);
    return fitting;
}

Resolution LogicalRuleSet::resolve(std::span<const NamedDim> dims) const {
    return precedence_ == Precedence::kLast ? last(dims) : by_priority(dims);
}

Resolution LogicalRuleSet::last(std::span<const NamedDim> dims) const {
    Resolution result{std::vector<std::uint32_t>(dims.size(), kNone), {}};
    for (std::uint32_t dim = 0; dim < dims.size(); ++dim) {
        const NameId name = dims[dim].name;
        if (name >= by_name_.size() || by_name_[name].empty()) continue;
        const std::vector<std::uint32_t>& rules = by_name_[name];
        result.rules[dim] = rules.back();
        for (const std::uint32_t rule : rules)
            if (rule != rules.back())
                result.lost.push_back({rule, dim, Loss::kDimTaken, rules.back()});
    }
    return result;
}

Resolution LogicalRuleSet::by_priority(std::span<const NamedDim> dims) const {
    Resolution result{std::vector<std::uint32_t>(dims.size(), kNone), {}};
    std::vector<std::uint32_t> user(axis_count_, kNone);  // per axis the dimension that has it
    const auto use = [&](const std::vector<AxisId>& axes, std::uint32_t dim) {
        for (const AxisId axis : axes) user.at(axis) = dim;
    };
    for (std::uint32_t dim = 0; dim < dims.size(); ++dim) use(dims[dim].axes, dim);
    for (const std::uint32_t index : rules_on(dims)) {
        const LogicalRule& rule = rules_[index];
        const auto named = std::ranges::find_if(
            dims, [&](const NamedDim& candidate) { return candidate.name == rule.name; });
        const auto dim = static_cast<std::uint32_t>(named - dims.begin());
        const auto taken =
            std::ranges::find_if(rule.axes, [&](AxisId axis) { return user[axis] != kNone; });
        if (result.rules[dim] != kNone) {
            result.lost.push_back({index, dim, Loss::kDimTaken, result.rules[dim]});
            continue;
        }
        if (taken != rule.axes.end()) {
            result.lost.push_back({index, dim, Loss::kAxisTaken, user[*taken]});
            continue;
        }
        const std::vector<AxisId> axes = fitting_axes(index, *named);
        if (axes.empty() && !rule.axes.empty()) {
            result.lost.push_back({index, dim, Loss::kIndivisible, kNone});
            continue;
        }
        result.rules[dim] = index;
        use(axes, dim);
    }
    return result;
}

}  // namespace shardrules::sharding
