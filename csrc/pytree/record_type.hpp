// A registered type whose nodes are plain records: their children are attributes with fixed names,
// so a node is read and rebuilt without the registry's Python functions. Which types these are, and
// how they are laid out, is python/shardrules/_node_types.py's to say. Costs an attribute look-up
// per field and the type's constructor. Knows nothing of rules or paths.
#pragma once

#include <cstdint>
#include <vector>

#include "ref.hpp"

namespace shardrules::pytree {

class RecordType {
  public:
    // description: a node_types.Record.
    RecordType(PyTypeObject* type, PyObject* description);

    // The children's texts in paths.
    const std::vector<Ref>& keys() const { return keys_; }
    // Appends an empty place, the node's children, and what else it is made of. False, with nothing
    // appended, if the node is not laid out like others of its type.
    bool read(PyObject* node, std::vector<Ref>& values) const;
    // A new node of values as read() appends them; the place is for its own use.
    Ref make(Ref* values) const;

  private:
    enum class Layout : std::uint8_t { kCall, kFields, kAttributes, kVariable };

    static Layout layout_of(PyObject* name);
    bool read_values(PyObject* node, std::vector<Ref>& values) const;
    bool read_attributes(PyObject* node, std::vector<Ref>& values) const;
    Ref new_object() const;
    Ref with_attributes(Ref* values) const;
    Ref call(Ref* values) const;
    Ref variable(Ref* values) const;

    Layout layout_;
    PyObject* type_;  // borrowed: the NodeType that has this record owns it
    std::vector<Ref> keys_;
    Ref names_;       // of all values
    Ref call_names_;  // kCall: the same in JAX's order, in which the children come last
    Ref init_;        // kCall: the type's __init__, if calling the type does no more than that
    Ref new_;         // kVariable: the type's _new
    // kVariable: what _new has put into the slot _trace_state. It says where the walk was called,
    // so one object serves all nodes of the walk.
    mutable Ref trace_state_;
};

}  // namespace shardrules::pytree
