// Which mesh axes of a spec an array of a given shape keeps, as one bit for each axis of the spec.
// A corrector is immutable; a question costs one division for each sharded dimension. Knows nothing
// of names or of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace shardrules::sharding {

// Which axes of a dimension are dropped if not all of them fit.
enum class AxisPolicy : std::uint8_t {
    kDrop,      // all
    kDropAxis,  // each axis that does not fit together with the kept ones before it
    kPrefix,    // all after the longest prefix that fits
    kKeep,      // none
};

// By its name in Python; std::invalid_argument for another name.
AxisPolicy axis_policy(std::string_view name);

struct Correction {
    AxisPolicy absent;       // for an axis that the mesh does not have
    AxisPolicy indivisible;  // for a dimension that the axes do not divide
};

inline constexpr std::int64_t kAbsentAxis = 0;  // as a size

// One entry of a spec: the sizes of its axes in order, and the unit that a shard's size must be a
// multiple of (128 for heads of 128).
struct SpecDim {
    std::vector<std::int64_t> axis_sizes;
    std::int64_t unit = 1;
};

// Bit i is the i-th axis of the spec, counted over all its dimensions.
using Kept = std::uint64_t;
inline constexpr std::size_t kMaxAxes = 64;

// Whether the divisor divides the size, which is not negative. Sizes that no int64 can hold, or
// that are symbolic, bring their own is_multiple().
inline bool is_multiple(std::int64_t size, std::uint64_t divisor) {
    return static_cast<std::uint64_t>(size) % divisor == 0;
}
using Divides = std::function<bool(std::uint64_t)>;
inline bool is_multiple(const Divides& divides, std::uint64_t divisor) { return divides(divisor); }

class Corrector {
  public:
    // Throws std::invalid_argument for more than kMaxAxes axes, or a size or unit below its least.
    Corrector(std::span<const SpecDim> dims, const Correction& correction);

    // The axes that an array of this rank keeps; size_of(d) is its dimension d, an argument of
    // is_multiple(). Axes of dimensions that the array does not have are dropped.
    template <class SizeOf>
    Kept kept(std::size_t rank, SizeOf size_of) const {
        Kept result = 0;
        for (const Dim& dim : dims_) {
            if (dim.index >= rank) break;
            const auto size = size_of(dim.index);
            const auto divides = [&](std::uint64_t divisor) { return is_multiple(size, divisor); };
            result |= divides(dim.divisor) ? dim.all : drop_indivisible(dim, divides);
        }
        return result;
    }

  private:
    struct Axis {
        std::uint64_t size;
        Kept bit;
    };
    struct Dim {  // a dimension with axes
        std::size_t index;
        std::vector<Axis> axes;  // without those that the policy for absent axes drops
        std::uint64_t unit;
        std::uint64_t divisor;  // a size that it divides keeps all axes
        Kept all;
    };
    static std::vector<Axis> drop_absent(std::vector<Axis> axes, AxisPolicy absent);
    Kept drop_indivisible(const Dim& dim, const Divides& divides) const;

    std::vector<Dim> dims_;
    AxisPolicy indivisible_;
};

}  // namespace shardrules::sharding
