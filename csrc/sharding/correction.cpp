#include "correction.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardrules::sharding {
namespace {

// The largest number instead of an overflow: like the true product it divides no int64 but zero.
std::uint64_t product(std::uint64_t a, std::uint64_t b) {
    constexpr std::uint64_t kLargest = std::numeric_limits<std::uint64_t>::max();
    return a > kLargest / b ? kLargest : a * b;
}

// A dimension in one part need not be a multiple of the unit.
std::uint64_t divisor_of(std::uint64_t parts, std::uint64_t unit) {
    return parts == 1 ? 1 : product(parts, unit);
}

}  // namespace

AxisPolicy axis_policy(std::string_view name) {
    if (name == "drop") return AxisPolicy::kDrop;
    if (name == "drop_axis") return AxisPolicy::kDropAxis;
    if (name == "prefix") return AxisPolicy::kPrefix;
    if (name == "keep") return AxisPolicy::kKeep;
    throw std::invalid_argument("no such policy: " + std::string(name));
}

Corrector::Corrector(std::span<const SpecDim> dims, const Correction& correction)
    : indivisible_(correction.indivisible) {
    std::size_t axis_count = 0;
    for (std::size_t index = 0; index < dims.size(); ++index) {
        const SpecDim& spec = dims[index];
        if (spec.unit < 1) throw std::invalid_argument("a unit is at least 1");
        if (spec.axis_sizes.empty()) continue;
        std::vector<Axis> axes;
        for (const std::int64_t size : spec.axis_sizes) {
            if (size < kAbsentAxis) throw std::invalid_argument("an axis has no negative size");
            if (axis_count == kMaxAxes) throw std::invalid_argument("a spec has at most 64 axes");
            axes.push_back({static_cast<std::uint64_t>(size), Kept{1} << axis_count++});
        }
        Dim dim{.index = index,
                .axes = drop_absent(std::move(axes), correction.absent),
                .unit = static_cast<std::uint64_t>(spec.unit),
                .divisor = 1,
                .all = 0};
        std::uint64_t parts = 1;
        for (const Axis& axis : dim.axes) {
            parts = product(parts, std::max<std::uint64_t>(axis.size, 1));
            dim.all |= axis.bit;
        }
        dim.divisor = divisor_of(parts, dim.unit);
        dims_.push_back(std::move(dim));
    }
}

std::vector<Corrector::Axis> Corrector::drop_absent(std::vector<Axis> axes, AxisPolicy absent) {
    const auto is_absent = [](const Axis& axis) { return axis.size == kAbsentAxis; };
    const auto first = std::ranges::find_if(axes, is_absent);
    if (first == axes.end() || absent == AxisPolicy::kKeep) return axes;
    if (absent == AxisPolicy::kDrop) return {};
    if (absent == AxisPolicy::kPrefix)
        axes.erase(first, axes.end());
    else
        std::erase_if(axes, is_absent);
    return axes;
}

Kept Corrector::drop_indivisible(const Dim& dim, const Divides& divides) const {
    if (indivisible_ == AxisPolicy::kDrop) return 0;
    if (indivisible_ == AxisPolicy::kKeep) return dim.all;
    const bool is_prefix = indivisible_ == AxisPolicy::kPrefix;
    Kept kept = 0, tried = 0;
    std::uint64_t parts = 1;
    for (const Axis& axis : dim.axes) {
        const std::uint64_t more = product(parts, std::max<std::uint64_t>(axis.size, 1));
        const bool fits = divides(divisor_of(more, dim.unit));
        tried |= axis.bit;
        if (fits) kept = is_prefix ? tried : kept | axis.bit;
        if (fits || is_prefix) parts = more;
    }
    return kept;
}

}  // namespace shardrules::sharding
