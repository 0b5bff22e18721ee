// What kind of pytree node an object is, by its exact type, as JAX's default registry sees it; and
// the crossing into that registry for the types that only it knows. Kinds are remembered per type
// for one walk (a type may be registered between two walks); a look-up is O(1). Knows nothing of
// rules or paths.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "ref.hpp"

namespace shardrules::pytree {

enum class Kind : std::uint8_t {
    kLeaf,
    kNone,
    kDict,
    kOrderedDict,
    kDefaultDict,
    kList,
    kTuple,
    kNamedTuple,
    kRegistered,
};

class NodeKinds {
  public:
    NodeKinds();
    // May call the registered flatten function of a type that it sees for the first time.
    Kind of(PyObject* object) {
        PyTypeObject* type = Py_TYPE(object);
        if (type == &PyDict_Type) return Kind::kDict;
        if (type == last_type_) return last_kind_;
        return look_up(object, type);
    }

  private:
    Kind look_up(PyObject* object, PyTypeObject* type);

    PyTypeObject* last_type_ = nullptr;
    Kind last_kind_ = Kind::kLeaf;
    std::unordered_map<PyTypeObject*, Kind> kinds_;
    std::unordered_map<PyTypeObject*, Ref> alive_;  // no address is reused during the walk
};

// The children of a registered node with their keys: a sequence of (key, child) pairs.
Ref keyed_children(PyObject* node);
// A node like `node`, with those children (a list) instead of its own.
Ref with_children(PyObject* node, PyObject* children);
// The text of a registered node's key entry, as eformer.pytree.tree_path_to_string has it.
Ref key_entry_text(PyObject* entry);

}  // namespace shardrules::pytree
