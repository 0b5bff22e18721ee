// The kind of pytree node that JAX's default registry takes an object for, by its exact type. Types
// are kept for one walk, because one may be registered between two walks. A look-up is O(1). Knows
// nothing of rules or paths.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "record_type.hpp"

namespace shardrules::pytree {

enum class NodeKind : std::uint8_t {
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

struct NodeType {
    NodeKind kind = NodeKind::kLeaf;
    Ref type{};                          // owned, so that its address stays its own during the walk
    Ref fields{};                        // kNamedTuple: their names
    bool constructor_is_tuple = false;   // kNamedTuple: whether its constructor only fills a tuple
    Ref unflatten{};                     // kRegistered: f(auxiliary, children), if known
    std::optional<RecordType> record{};  // kRegistered: if it is a record
};

class NodeTypes {
  public:
    NodeTypes();
    // May call the type's registered flatten function, the first time.
    const NodeType& of(PyObject* object) {
        PyTypeObject* type = Py_TYPE(object);
        if (type == &PyDict_Type) return dict_;
        if (type == last_type_) return *last_;
        return look_up(object, type);
    }

  private:
    const NodeType& look_up(PyObject* object, PyTypeObject* type);

    const NodeType dict_{.kind = NodeKind::kDict};
    PyTypeObject* last_type_ = nullptr;
    const NodeType* last_ = nullptr;
    std::unordered_map<PyTypeObject*, NodeType> types_;
};

}  // namespace shardrules::pytree
