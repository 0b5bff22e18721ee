// What kind of pytree node an object is, by its exact type, as JAX's default registry sees it.
// Types are remembered for one walk (a type may be registered between two walks); a look-up is
// O(1). Knows nothing of rules or paths.
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
    Ref type{};                         // kept: no address is used for another type during the walk
    Ref fields{};                       // kNamedTuple: their names
    bool constructor_is_tuple = false;  // kNamedTuple: its constructor only fills a tuple
    Ref unflatten{};                    // kRegistered: f(auxiliary, children), if it is known
    std::optional<RecordType> record{};  // kRegistered, if it is one
};

class NodeTypes {
  public:
    NodeTypes();
    // May call the registered flatten function of a type that it sees for the first time.
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
