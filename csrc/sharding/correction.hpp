// Which mesh axes of a spec an array of a given shape can have. One bit for each axis that the spec
// names, so what an array gets is a look-up by those bits. A corrector is immutable; asking it
// costs one division for each sharded dimension. Knows nothing of names or of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace shardrules::sharding {

// What becomes of a dimension's axes when they do not all fit.
enum class Misfit : std::uint8_t {
    kDrop,      // all of them go
    kDropAxis,  // those go that do not fit beside the ones before them
    kPrefix,    // those go that come after the longest prefix that fits
    kKeep,      // none goes
};

struct Policy {
    Misfit absent;       // an axis that the mesh does not have
    Misfit indivisible;  // a dimension that the axes do not divide
};

inline constexpr std::int64_t kAbsentAxis = 0;  // as a size

// One entry of a spec: the sizes of its axes in order, and the unit in whose multiples alone the
// dimension may be cut (as for heads of 128).
struct SpecDim {
    std::vector<std::int64_t> axis_sizes;
    std::int64_t unit = 1;
};

// Bit i is the i-th axis of the spec, counted over all its dimensions.
using Kept = std::uint64_t;
inline constexpr std::size_t kMaxAxes = 64;

// Whether the divisor divides the size, which is not negative. Sizes of other types, which a plain
// number is too small for, bring their own.
inline bool is_multiple(std::int64_t size, std::uint64_t divisor) {
    return static_cast<std::uint64_t>(size) % divisor == 0;
}
using Divides = std::function<bool(std::uint64_t)>;
inline bool is_multiple(const Divides& divides, std::uint64_t divisor) { return divides(divisor); }

class Corrector {
  public:
    // Throws std::invalid_argument for more than kMaxAxes axes, or a size or unit below its least.
    Corrector(std::span<const SpecDim> dims, const Policy& policy);

    // The axes that an array of this rank keeps; size_of(d) is its dimension d, which is_multiple()
    // takes. Axes of dimensions that it does not have are not kept.
    template <class SizeOf>
    Kept kept(std::size_t rank, SizeOf size_of) const {
        Kept result = 0;
        for (const Dim& dim : dims_) {
            if (dim.index >= rank) break;
            const auto size = size_of(dim.index);
            const auto divides = [&](std::uint64_t divisor) { return is_multiple(size, divisor); };
            result |= divides(dim.divisor) ? dim.fitting : fewer(dim, divides);
        }
        return result;
    }

  private:
    struct Axis {
        std::uint64_t size;
        Kept bit;
    };
    struct Dim {  // one that has axes
        std::size_t index;
        std::vector<Axis> axes;  // without those that go because of an absent one
        std::uint64_t unit;
        std::uint64_t divisor;  // what a size must be a multiple of to keep them all
        Kept fitting;           // all of them
    };
    static std::vector<Axis> present(const std::vector<Axis>& axes, Misfit absent);
    Kept fewer(const Dim& dim, const Divides& divides) const;

    std::vector<Dim> dims_;
    Misfit indivisible_;
};

}  // namespace shardrules::sharding
