#include "registry.hpp"

#include <array>
#include <memory>

namespace shardrules::pytree {
namespace {

// Key entries of jax.tree_util that hold their text in an attribute.
struct KeyEntryType {
    const char* type_name;
    const char* attribute_name;
    Ref type{};
    Ref attribute{};
};

// What we use of jax.tree_util, imported on first use: importing shardrules does not import JAX.
struct JaxTrees {
    Ref flatten, flatten_with_keys, partial, is_not;
    std::array<KeyEntryType, 4> key_entries{{{"DictKey", "key"},
                                             {"GetAttrKey", "name"},
                                             {"SequenceKey", "idx"},
                                             {"FlattenedIndexKey", "key"}}};

    JaxTrees() {
        const Ref tree_util = imported("jax.tree_util");
        flatten = attribute(tree_util.get(), "tree_flatten");
        flatten_with_keys = Ref::checked(PyObject_CallMethod(
            imported("shardrules._base.jax_names").get(), "node_flattener", nullptr));
        partial = attribute(imported("functools").get(), "partial");
        is_not = attribute(imported("operator").get(), "is_not");
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
            auto imported_now = std::make_unique<JaxTrees>();
            if (instance == nullptr) instance = imported_now.release();
        }
        return *instance;
    }
};

bool is_exactly(PyObject* object, const Ref& type) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.get();
}

}  // namespace

bool registry_exists() {
    static PyObject* const name = interned("jax");
    const Ref module = Ref::steal(PyImport_GetModule(name));
    if (!module && PyErr_Occurred() != nullptr) throw PythonError{};
    return static_cast<bool>(module);
}

KeyedChildren flatten_one_level(PyObject* node) {
    const Ref flat =
        Ref::checked(PyObject_CallOneArg(JaxTrees::get().flatten_with_keys.get(), node));
    if (flat.get() == Py_None) return {};
    if (!PyTuple_Check(flat.get()) || PyTuple_GET_SIZE(flat.get()) != 2) {
        PyErr_Format(PyExc_TypeError, "JAX's registry flattens a %.200s to %R",
                     Py_TYPE(node)->tp_name, flat.get());
        throw PythonError{};
    }
    return {Ref::checked(PySequence_Tuple(PyTuple_GET_ITEM(flat.get(), 0))),
            Ref::borrow(PyTuple_GET_ITEM(flat.get(), 1))};
}

Ref key_and_child(PyObject* node, PyObject* pairs, Py_ssize_t i) {
    const Ref pair = Ref::checked(PySequence_Tuple(PyTuple_GET_ITEM(pairs, i)));
    if (PyTuple_GET_SIZE(pair.get()) == 2) return pair;
    PyErr_Format(PyExc_TypeError, "%.200s: children with keys must be pairs",
                 Py_TYPE(node)->tp_name);
    throw PythonError{};
}

Ref with_children(PyObject* node, PyObject* children) {
    // Flattening with everything but the node itself a leaf gives the treedef of this one level.
    const JaxTrees& jax = JaxTrees::get();
    const Ref is_child = Ref::checked(
        PyObject_CallFunctionObjArgs(jax.partial.get(), jax.is_not.get(), node, nullptr));
    const Ref flat = Ref::checked(
        PyObject_CallFunctionObjArgs(jax.flatten.get(), node, is_child.get(), nullptr));
    const Ref treedef = Ref::checked(PySequence_GetItem(flat.get(), 1));
    return Ref::checked(PyObject_CallMethod(treedef.get(), "unflatten", "(O)", children));
}

Ref key_entry_text(PyObject* entry) {
    for (const KeyEntryType& known : JaxTrees::get().key_entries) {
        const int is_one =
            is_exactly(entry, known.type) ? 1 : PyObject_IsInstance(entry, known.type.get());
        check(is_one);
        if (is_one == 0) continue;
        const Ref key = Ref::checked(PyObject_GetAttr(entry, known.attribute.get()));
        return Ref::checked(PyObject_Str(key.get()));
    }
    return Ref::checked(PyObject_Str(entry));
}

bool flattened_as_namedtuple(PyObject* node, const KeyedChildren& flat) {
    // Then the auxiliary data is the type, and the keys are attribute names.
    if (flat.auxiliary.get() != reinterpret_cast<PyObject*>(Py_TYPE(node))) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(flat.pairs.get());
    if (size != PyTuple_GET_SIZE(node)) return false;
    const Ref& by_name = JaxTrees::get().key_entries[1].type;
    for (Py_ssize_t i = 0; i < size; ++i) {
        const Ref pair = key_and_child(node, flat.pairs.get(), i);
        if (!is_exactly(PyTuple_GET_ITEM(pair.get(), 0), by_name) ||
            PyTuple_GET_ITEM(pair.get(), 1) != PyTuple_GET_ITEM(node, i))
            return false;
    }
    return true;
}

}  // namespace shardrules::pytree
