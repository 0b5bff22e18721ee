#include "node_types.hpp"

#include "registry.hpp"

namespace shardrules::pytree {
namespace {

bool has_fields(PyTypeObject* type) {
    if (!PyType_IsSubtype(type, &PyTuple_Type)) return false;
    const Ref fields =
        Ref::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "_fields"));
    if (!fields) clear_if_ordinary();
    return static_cast<bool>(fields);
}

// Whether type(*items) runs only the __new__ that collections.namedtuple generates.
bool constructor_is_tuple(PyTypeObject* type) {
    if (!Py_IS_TYPE(type, &PyType_Type) || type->tp_init != PyBaseObject_Type.tp_init ||
        type->tp_alloc != PyType_GenericAlloc)
        return false;
    const Ref make = attribute(reinterpret_cast<PyObject*>(type), "__new__");
    if (!PyFunction_Check(make.get())) return false;
    const Ref tuple_new = attribute(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__");
    PyObject* globals = PyFunction_GET_GLOBALS(make.get());
    PyObject* name = PyDict_GetItemString(globals, "__name__");
    return PyDict_GetItemString(globals, "_tuple_new") == tuple_new.get() && name != nullptr &&
           PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0 &&
           PyUnicode_Tailmatch(name, Ref::checked(PyUnicode_FromString("namedtuple_")).get(), 0,
                               PY_SSIZE_T_MAX, -1) == 1;
}

NodeType named_tuple(PyTypeObject* type) {
    auto* const object = reinterpret_cast<PyObject*>(type);
    const Ref declared = attribute(object, "_fields");
    return {.kind = NodeKind::kNamedTuple,
            .type = Ref::borrow(object),
            .fields = Ref::checked(PySequence_Tuple(declared.get())),
            .constructor_is_tuple = constructor_is_tuple(type)};
}

NodeType registered(PyObject* example, PyTypeObject* type) {
    auto* const object = reinterpret_cast<PyObject*>(type);
    const Ref known = Ref::checked(PyObject_CallMethod(
        imported("shardrules._base.node_types").get(), "registration", "OO", object, example));
    PyObject *unflatten = nullptr, *record = nullptr;
    if (!PyArg_ParseTuple(known.get(), "OO", &unflatten, &record)) throw PythonError{};
    NodeType out{.kind = NodeKind::kRegistered, .type = Ref::borrow(object)};
    if (unflatten != Py_None) out.unflatten = Ref::borrow(unflatten);
    if (record != Py_None) out.record.emplace(type, record);
    return out;
}

NodeType classify(PyObject* object, PyTypeObject* type) {
    const bool fields = has_fields(type);
    if (!registry_exists() && !fields)
        return {.type = Ref::borrow(reinterpret_cast<PyObject*>(type))};
    const KeyedChildren flat = flatten_one_level(object);
    // To JAX a tuple with fields is a node; if it says otherwise, it has swallowed an error.
    if (!flat.pairs && fields) return named_tuple(type);
    if (!flat.pairs) return {.type = Ref::borrow(reinterpret_cast<PyObject*>(type))};
    if (fields && flattened_as_namedtuple(object, flat)) return named_tuple(type);
    return registered(object, type);
}

// Owned until the process ends.
PyObject* default_dict_type() {
    static PyObject* const type =
        attribute(imported("_collections").get(), "defaultdict").release();
    return type;
}

}  // namespace

NodeTypes::NodeTypes() {
    for (const auto& [type, kind] :
         {std::pair{&PyList_Type, NodeKind::kList}, std::pair{&PyTuple_Type, NodeKind::kTuple},
          std::pair{Py_TYPE(Py_None), NodeKind::kNone},
          std::pair{&PyODict_Type, NodeKind::kOrderedDict}})
        types_[type].kind = kind;
    PyObject* const default_dict = default_dict_type();
    types_[reinterpret_cast<PyTypeObject*>(default_dict)] = {.kind = NodeKind::kDefaultDict,
                                                             .type = Ref::borrow(default_dict)};
}

const NodeType& NodeTypes::look_up(PyObject* object, PyTypeObject* type) {
    auto found = types_.find(type);
    if (found == types_.end()) found = types_.emplace(type, classify(object, type)).first;
    last_type_ = type;
    last_ = &found->second;
    return *last_;
}

}  // namespace shardrules::pytree
