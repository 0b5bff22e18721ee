// Calls into JAX's pytree registry, for types that only it knows: one call flattens a node, another
// one rebuilds it. Costs what the registered Python functions cost. Knows nothing of rules or
// paths.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

struct KeyedChildren {
    Ref pairs;      // a tuple of (key entry, child)
    Ref auxiliary;  // what the type needs to rebuild the node
};

// Whether JAX has been imported. If not, no type is registered.
bool registry_exists();
// The node's children by default_registry.flatten_one_level_with_keys; without pairs if the
// registry takes the object for a leaf.
KeyedChildren flatten_one_level(PyObject* node);
// A pair's key entry and child, checked to be a pair.
Ref key_and_child(PyObject* node, PyObject* pairs, Py_ssize_t i);
// A copy of the node with these children, a tuple, instead of its own.
Ref with_children(PyObject* node, PyObject* children);
// The text of a registered node's key entry, as eformer.pytree.tree_path_to_string writes it.
Ref key_entry_text(PyObject* entry);
// Whether JAX flattened the node as a namedtuple, and not by a registration.
bool flattened_as_namedtuple(PyObject* node, const KeyedChildren& flat);

}  // namespace shardrules::pytree
