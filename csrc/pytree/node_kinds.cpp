#include "node_kinds.hpp"

#include <array>
#include <memory>

namespace shardrules::pytree {
namespace {

Ref attribute(PyObject* object, const char* name) {
    return Ref::checked(PyObject_GetAttrString(object, name));
}

// Key entries of jax.tree_util that hold their text in an attribute.
struct KeyEntryType {
    const char* type_name;
    const char* attribute_name;
    Ref type{};
    Ref attribute{};
};

// What we use of jax.tree_util, found on first use: importing shardrules does not import JAX.
struct JaxTrees {
    Ref flatten, flatten_with_keys, partial, is_not;
    std::array<KeyEntryType, 4> key_entries{{{"DictKey", "key"},
                                             {"GetAttrKey", "name"},
                                             {"SequenceKey", "idx"},
                                             {"FlattenedIndexKey", "key"}}};

    JaxTrees() {
        const Ref tree_util = Ref::checked(PyImport_ImportModule("jax.tree_util"));
        const Ref registry = attribute(tree_util.get(), "default_registry");
        flatten = attribute(registry.get(), "flatten");
        flatten_with_keys = attribute(registry.get(), "flatten_one_level_with_keys");
        partial = attribute(Ref::checked(PyImport_ImportModule("functools")).get(), "partial");
        is_not = attribute(Ref::checked(PyImport_ImportModule("operator")).get(), "is_not");
        for (KeyEntryType& entry : key_entries) {
            entry.type = attribute(tree_util.get(), entry.type_name);
            entry.attribute = Ref::checked(PyUnicode_InternFromString(entry.attribute_name));
        }
    }

    static const JaxTrees& get() {
        // Guarded by the GIL, not by a static's lock: an import may let other threads run. Never
        // destroyed: the interpreter may be gone when static destructors run.
        static const JaxTrees* instance = nullptr;
        if (instance == nullptr) {
            auto made = std::make_unique<JaxTrees>();
            if (instance == nullptr) instance = made.release();
        }
        return *instance;
    }
};

// None if the registry holds the object to be a leaf.
Ref flatten_or_none(PyObject* object) {
    return Ref::checked(PyObject_CallOneArg(JaxTrees::get().flatten_with_keys.get(), object));
}

bool has_fields(PyTypeObject* type) {
    return PyType_IsSubtype(type, &PyTuple_Type) &&
           PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "_fields") == 1;
}

// A namedtuple type may be registered like any other; then its own functions count. JAX's built-in
// handling shows in the auxiliary data (the type) and the keys (attribute names).
bool flattened_as_namedtuple(PyObject* object, PyObject* flat) {
    if (PyTuple_GET_ITEM(flat, 1) != reinterpret_cast<PyObject*>(Py_TYPE(object))) return false;
    const Ref pairs = Ref::checked(PySequence_Fast(PyTuple_GET_ITEM(flat, 0), "not iterable"));
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(pairs.get());
    if (size != PyTuple_GET_SIZE(object)) return false;
    const PyObject* by_name = JaxTrees::get().key_entries[1].type.get();
    for (Py_ssize_t i = 0; i < size; ++i) {
        const Ref pair =
            Ref::checked(PySequence_Tuple(PySequence_Fast_GET_ITEM(pairs.get(), i)));
        if (PyTuple_GET_SIZE(pair.get()) != 2 ||
            reinterpret_cast<const PyObject*>(Py_TYPE(PyTuple_GET_ITEM(pair.get(), 0))) !=
                by_name ||
            PyTuple_GET_ITEM(pair.get(), 1) != PyTuple_GET_ITEM(object, i))
            return false;
    }
    return true;
}

Kind classify(PyObject* object, PyTypeObject* type) {
    const Ref flat = flatten_or_none(object);
    if (flat.get() == Py_None) return Kind::kLeaf;
    if (has_fields(type) && flattened_as_namedtuple(object, flat.get())) return Kind::kNamedTuple;
    return Kind::kRegistered;
}

}  // namespace

NodeKinds::NodeKinds() {
    const Ref collections = Ref::checked(PyImport_ImportModule("collections"));
    const auto type_of = [&](const char* name) {  // immortal in practice: the module keeps it
        return reinterpret_cast<PyTypeObject*>(attribute(collections.get(), name).get());
    };
    kinds_ = {{&PyDict_Type, Kind::kDict},
              {&PyList_Type, Kind::kList},
              {&PyTuple_Type, Kind::kTuple},
              {Py_TYPE(Py_None), Kind::kNone},
              {type_of("OrderedDict"), Kind::kOrderedDict},
              {type_of("defaultdict"), Kind::kDefaultDict}};
}

Kind NodeKinds::look_up(PyObject* object, PyTypeObject* type) {
    auto found = kinds_.find(type);
    if (found == kinds_.end()) {
        const Kind kind = classify(object, type);
        alive_.emplace(type, Ref::borrow(reinterpret_cast<PyObject*>(type)));
        found = kinds_.emplace(type, kind).first;
    }
    last_type_ = type;
    last_kind_ = found->second;
    return last_kind_;
}

Ref keyed_children(PyObject* node) {
    const Ref flat = flatten_or_none(node);
    if (!PyTuple_Check(flat.get()) || PyTuple_GET_SIZE(flat.get()) != 2) {
        PyErr_Format(PyExc_TypeError, "JAX's registry does not flatten %.200s any more",
                     Py_TYPE(node)->tp_name);
        throw PythonError{};
    }
    return Ref::checked(PySequence_Fast(PyTuple_GET_ITEM(flat.get(), 0),
                                        "a pytree node's children are not iterable"));
}

Ref with_children(PyObject* node, PyObject* children) {
    // Flattening with everything but the node itself a leaf gives the treedef of this one level.
    const JaxTrees& jax = JaxTrees::get();
    const Ref is_child = Ref::checked(
        PyObject_CallFunctionObjArgs(jax.partial.get(), jax.is_not.get(), node, nullptr));
    const Ref flat = Ref::checked(
        PyObject_CallFunctionObjArgs(jax.flatten.get(), node, is_child.get(), nullptr));
    const Ref treedef = Ref::checked(PySequence_GetItem(flat.get(), 1));
    return Ref::checked(PyObject_CallMethod(treedef.get(), "unflatten", "O", children));
}

Ref key_entry_text(PyObject* entry) {
    for (const KeyEntryType& known : JaxTrees::get().key_entries) {
        const bool exact =
            reinterpret_cast<PyObject*>(Py_TYPE(entry)) == known.type.get();
        const int is_one = exact ? 1 : PyObject_IsInstance(entry, known.type.get());
        check(is_one);
        if (is_one == 0) continue;
        const Ref key = Ref::checked(PyObject_GetAttr(entry, known.attribute.get()));
        return Ref::checked(PyObject_Str(key.get()));
    }
    return Ref::checked(PyObject_Str(entry));
}

}  // namespace shardrules::pytree
