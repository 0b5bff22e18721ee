// A dimension of a shape: an int64, or the Python object if it is larger or symbolic (jax.export).
// Knows nothing of axes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pytree/ref.hpp"

namespace shardrules::resolution {

using pytree::Ref;

struct Dimension {
    std::int64_t size = 0;
    Ref object{};  // instead of the size
};

// Dimension `index` of a shape, a sequence. TypeError or ValueError if it is not a size.
Dimension dimension_of(PyObject* shape, std::size_t index);
// An item of a shape; it may be negative. TypeError if it is not a number.
Dimension dimension_from(Ref item);

bool is_multiple_in_python(PyObject* size, std::uint64_t divisor);

// A symbolic dimension is a multiple if it is one for all values of its variables.
inline bool is_multiple(const Dimension& dimension, std::uint64_t divisor) {
    if (dimension.object) [[unlikely]]
        return is_multiple_in_python(dimension.object.get(), divisor);
    return static_cast<std::uint64_t>(dimension.size) % divisor == 0;
}

}  // namespace shardrules::resolution
