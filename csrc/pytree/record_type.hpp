// A registered type whose nodes are plain records: their children are attributes with fixed names,
// so a node is read and rebuilt without the registry's Python functions. Which types are records is
// decided in python/shardrules/_base/node_types.py. Costs an attribute look-up per field and the
// type's constructor. Knows nothing of rules or paths.
#pragma once

#include <cstdint>
#include <vector>

#include "ref.hpp"

namespace shardrules::pytree {

// How a node is read and rebuilt; Python's name for it is shardrules._core.RecordLayout.
enum class RecordLayout : std::uint8_t {
    kCall,        // type(**attributes), what is carried over first
    kFields,      // a new object whose attributes are set, children first
    kAttributes,  // the same, of nodes whose __dict__ is exactly these attributes
    kVariable,    // type._new(child, metadata with sorted keys), as flax nnx Variables
};
inline constexpr RecordLayout kLastRecordLayout = RecordLayout::kVariable;

class RecordType {
  public:
    // description: a Record of _node_types.py. ValueError if its layout is unknown.
    RecordType(PyTypeObject* type, PyObject* description);

    // The children's texts in paths.
    const std::vector<Ref>& keys() const { return keys_; }
    // Appends an empty slot for make(), the node's children, and what is carried over. False, with
    // nothing appended, if the node does not have the layout of its type.
    bool read(PyObject* node, std::vector<Ref>& values) const;
    // A new node from values as read() appends them.
    Ref make(Ref* values) const;

  private:
    bool read_values(PyObject* node, std::vector<Ref>& values) const;
    bool read_attributes(PyObject* node, std::vector<Ref>& values) const;
    Ref new_object() const;
    Ref with_attributes(Ref* values) const;
    Ref call(Ref* values) const;
    Ref variable(Ref* values) const;

    RecordLayout layout_;
    PyObject* type_;  // borrowed: the NodeType that has this record owns it
    std::vector<Ref> keys_;
    Ref names_;       // of all attributes, children first
    Ref call_names_;  // kCall: the same in JAX's order, children last
    Ref init_;        // kCall: the type's __init__, if a call of the type runs nothing else
    Ref new_;         // kVariable: the type's _new
    // kVariable: what _new sets in the slot _trace_state. It depends on where the walk was called,
    // so all nodes of the walk share it.
    mutable Ref trace_state_;
};

}  // namespace shardrules::pytree
