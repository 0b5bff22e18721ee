// The leaves of a second tree with the same structure, in the first tree's order. Costs a look-up
// per node, a fifth of what JAX takes. Knows dicts, lists and tuples only.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

// The leaves of `rows` are numbers. Each object of `values` at the place of such a leaf is put into
// the list `by_row` at its number. False, with `by_row` half filled, if the structures differ, a
// node has another type, or the trees are deeper than a bound.
bool aligned_values(PyObject* rows, PyObject* values, PyObject* by_row);

}  // namespace shardrules::pytree
