// The crossing into JAX's pytree registry, for the types that only it knows: one node is flattened
// by one call and rebuilt by another. Costs what the registered Python functions cost. Knows
// nothing of rules or paths.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

struct KeyedChildren {
    Ref pairs;      // a tuple of (key entry, child), nobody's list that may change
    Ref auxiliary;  // what the type needs to rebuild the node
};

// Whether JAX is in the process. If it is not, nobody can have registered a type, and it need not
// be imported to ask.
bool registry_exists();
// The node's children by default_registry.flatten_one_level_with_keys; without pairs if the
// registry holds the object to be a leaf.
KeyedChildren flatten_one_level(PyObject* node);
// A pair's key entry and child, checked to be a pair.
Ref key_and_child(PyObject* node, PyObject* pairs, Py_ssize_t i);
// A node like `node`, with those children (a tuple) instead of its own.
Ref with_children(PyObject* node, PyObject* children);
// The text of a registered node's key entry, as eformer.pytree.tree_path_to_string has it.
Ref key_entry_text(PyObject* entry);
// Whether JAX's own handling of namedtuples flattened the node to this, and no registration.
bool flattened_as_namedtuple(PyObject* node, const KeyedChildren& flat);

}  // namespace shardrules::pytree
