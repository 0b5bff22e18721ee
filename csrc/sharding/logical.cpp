#include "logical.hpp"

#include <algorithm>
#include <stdexcept>

namespace shardrules::sharding {

LogicalRules::LogicalRules(std::vector<LogicalRule> rules, std::vector<std::int64_t> axis_sizes,
                           Precedence precedence)
    : rules_(std::move(rules)), axis_sizes_(std::move(axis_sizes)), precedence_(precedence) {
    for (std::uint32_t index = 0; index < rules_.size(); ++index) {
        const LogicalRule& rule = rules_[index];
        for (const AxisId axis : rule.axes)
            if (axis >= axis_sizes_.size()) throw std::invalid_argument("an axis without a size");
        if (rule.name >= by_name_.size()) by_name_.resize(rule.name + std::size_t{1});
        by_name_[rule.name].push_back(index);
    }
}

std::vector<std::uint32_t> LogicalRules::rules_on(std::span<const NamedDim> dims) const {
    std::vector<std::uint32_t> found;
    for (const NamedDim& dim : dims)
        if (dim.name < by_name_.size())
            found.insert(found.end(), by_name_[dim.name].begin(), by_name_[dim.name].end());
    std::sort(found.begin(), found.end());
    return found;
}

bool LogicalRules::divides(const LogicalRule& rule, const NamedDim& dim) const {
    if (!dim.size) return true;
    std::int64_t rest = *dim.size;
    for (const AxisId axis : rule.axes) {
        if (rest % axis_sizes_[axis] != 0) return false;
        rest /= axis_sizes_[axis];
    }
    return true;
}

Resolution LogicalRules::resolve(std::span<const NamedDim> dims) const {
    return precedence_ == Precedence::kLast ? last(dims) : by_priority(dims);
}

Resolution LogicalRules::last(std::span<const NamedDim> dims) const {
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

Resolution LogicalRules::by_priority(std::span<const NamedDim> dims) const {
    Resolution result{std::vector<std::uint32_t>(dims.size(), kNone), {}};
    std::vector<std::uint32_t> user(axis_sizes_.size(), kNone);  // per axis the dimension that has it
    const auto use = [&](const std::vector<AxisId>& axes, std::uint32_t dim) {
        for (const AxisId axis : axes) user.at(axis) = dim;
    };
    for (std::uint32_t dim = 0; dim < dims.size(); ++dim) use(dims[dim].axes, dim);
    for (const std::uint32_t index : rules_on(dims)) {
        const LogicalRule& rule = rules_[index];
        const auto named = std::find_if(dims.begin(), dims.end(), [&](const NamedDim& candidate) {
            return candidate.name == rule.name;
        });
        const auto dim = static_cast<std::uint32_t>(named - dims.begin());
        const auto taken = std::find_if(rule.axes.begin(), rule.axes.end(),
                                        [&](AxisId axis) { return user[axis] != kNone; });
        if (result.rules[dim] != kNone)
            result.lost.push_back({index, dim, Loss::kDimTaken, result.rules[dim]});
        else if (taken != rule.axes.end())
            result.lost.push_back({index, dim, Loss::kAxisTaken, user[*taken]});
        else if (!divides(rule, *named))
            result.lost.push_back({index, dim, Loss::kIndivisible, kNone});
        else {
            result.rules[dim] = index;
            use(rule.axes, dim);
        }
    }
    return result;
}

}  // namespace shardrules::sharding
