// What stands beside the leaves of a tree, in another tree of the same structure. Costs a look-up
// per node, a fifth of what JAX takes. Knows dicts, lists and tuples alone, and says so about
// others.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

// Puts into `found`, a list, the object that `values` has in the place of each leaf of `rows`, at
// the leaf's number. False if the trees have another structure, or nodes of other types: then
// `found` is of no use. Depth is bounded: deeper trees are false as well.
bool values_beside(PyObject* rows, PyObject* values, PyObject* found);

}  // namespace shardrules::pytree
