// Paths with holes for their numbers: `layers/7/w` is the template `layers/#/w` and the number 7.
// Sibling layers share a template. One pass over the text of all paths and a look-up per path. Knows
// nothing of trees.
#pragma once

#include <cstdint>
#include <vector>

#include "ref.hpp"

namespace shardrules::pytree {

struct Templates {
    // list of str, each once; a hole is a NUL and #, a NUL of the path itself is a NUL and 0
    Ref texts = Ref::checked(PyList_New(0));
    std::vector<std::int32_t> of_path;        // per path an index of `texts`
    std::vector<std::int64_t> numbers;        // of all paths in a row, as many as they have holes
};

// `paths`: a list of str. A number is what str(int) writes: with leading zeros, longer than 18
// digits, or behind 16 others, it stays a part of the name.
Templates templates_of(PyObject* paths);

}  // namespace shardrules::pytree
