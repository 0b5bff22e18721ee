#include "correction.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace shardrules::sharding {
namespace {

// Sticks at the largest number, which divides no size of 64 bits but zero, as the true product
// would.
std::uint64_t product(std::uint64_t a, std::uint64_t b) {
    constexpr std::uint64_t kLargest = std::numeric_limits<std::uint64_t>::max();
    return a > kLargest / b ? kLargest : a * b;
}

// An uncut dimension need not be a multiple of the unit.
std::uint64_t divisor_of(std::uint64_t parts, std::uint64_t unit) {
    return parts == 1 ? 1 : product(parts, unit);
}

}  // namespace

Corrector::Corrector(std::span<const SpecDim> dims, const Policy& policy)
    : indivisible_(policy.indivisible) {
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
        Dim dim{index, present(axes, policy.absent), static_cast<std::uint64_t>(spec.unit), 1, 0};
        std::uint64_t parts = 1;
        for (const Axis& axis : dim.axes) {
            parts = product(parts, std::max<std::uint64_t>(axis.size, 1));
            dim.fitting |= axis.bit;
        }
        dim.divisor = divisor_of(parts, dim.unit);
        dims_.push_back(std::move(dim));
    }
}

std::vector<Corrector::Axis> Corrector::present(const std::vector<Axis>& axes, Misfit absent) {
    const auto is_absent = [](const Axis& axis) { return axis.size == 0; };
    const auto first = std::find_if(axes.begin(), axes.end(), is_absent);
    if (first == axes.end() || absent == Misfit::kKeep) return axes;
    if (absent == Misfit::kDrop) return {};
    std::vector<Axis> rest(axes.begin(), first);
    if (absent == Misfit::kDropAxis)
        std::remove_copy_if(first, axes.end(), std::back_inserter(rest), is_absent);
    return rest;
}

Kept Corrector::fewer(const Dim& dim, const Divides& divides) const {
    if (indivisible_ == Misfit::kDrop) return 0;
    if (indivisible_ == Misfit::kKeep) return dim.fitting;
    Kept prefix = 0, greedy = 0;  // the longest prefix that fits; what fits, axis by axis
    Kept so_far = 0;
    std::uint64_t parts = 1, greedy_parts = 1;
    for (const Axis& axis : dim.axes) {
        const std::uint64_t axis_size = std::max<std::uint64_t>(axis.size, 1);
        parts = product(parts, axis_size);
        so_far |= axis.bit;
        if (divides(divisor_of(parts, dim.unit))) prefix = so_far;
        const std::uint64_t with_it = product(greedy_parts, axis_size);
        if (!divides(divisor_of(with_it, dim.unit))) continue;
        greedy_parts = with_it;
        greedy |= axis.bit;
    }
    return indivisible_ == Misfit::kPrefix ? prefix : greedy;
}

}  // namespace shardrules::sharding
