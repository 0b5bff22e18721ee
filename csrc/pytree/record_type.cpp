#include "record_type.hpp"

#include <algorithm>
#include <stdexcept>
#include <type_traits>

namespace shardrules::pytree {
namespace {

// An array of Refs can be passed as an argument vector.
static_assert(sizeof(Ref) == sizeof(PyObject*) && std::is_standard_layout_v<Ref>);

PyObject* const* arguments(const Ref* values) { return reinterpret_cast<PyObject* const*>(values); }

// The type's __init__, if it is a Python function and a call of the type runs nothing else; or
// empty.
Ref init_alone(PyTypeObject* type) {
    if (!Py_IS_TYPE(type, &PyType_Type) || type->tp_new != PyBaseObject_Type.tp_new) return {};
    static PyObject* const name = interned("__init__");
    PyObject* init = _PyType_Lookup(type, name);  // unbound: a staticmethod is not a function
    return init != nullptr && PyFunction_Check(init) ? Ref::borrow(init) : Ref();
}

// dict(sorted(d.items())) without comparing values; empty if a key is not a str.
Ref sorted_by_key(PyObject* dict) {
    if (!PyDict_CheckExact(dict)) return {};
    PyObject *key = nullptr, *value = nullptr, *previous = nullptr;
    bool sorted = true;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, nullptr); previous = key) {
        if (!PyUnicode_CheckExact(key)) return {};
        sorted = sorted && (previous == nullptr || PyUnicode_Compare(previous, key) < 0);
    }
    if (sorted) return Ref::checked(PyDict_Copy(dict));
    const Ref keys = Ref::checked(PyDict_Keys(dict));
    check(PyList_Sort(keys.get()));
    Ref out = Ref::checked(PyDict_New());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.get()); ++i) {
        key = PyList_GET_ITEM(keys.get(), i);
        value = PyDict_GetItemWithError(dict, key);
        if (value == nullptr) throw PythonError{};
        check(PyDict_SetItem(out.get(), key, value));
    }
    return out;
}

RecordLayout layout_of(PyObject* description) {
    const Ref layout = attribute(description, "layout");
    const long number = PyLong_AsLong(layout.get());
    if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
    if (number >= 0 && number <= static_cast<long>(kLastRecordLayout))
        return static_cast<RecordLayout>(number);
    PyErr_Format(PyExc_ValueError, "records have no layout %R", layout.get());
    throw PythonError{};
}

}  // namespace

RecordType::RecordType(PyTypeObject* type, PyObject* description)
    : layout_(layout_of(description)), type_(reinterpret_cast<PyObject*>(type)) {
    const Ref keys = attribute(description, "keys");
    for (Py_ssize_t i = 0; i < PyTuple_Size(keys.get()); ++i)
        keys_.push_back(Ref::borrow(PyTuple_GET_ITEM(keys.get(), i)));
    const Ref children = attribute(description, "children"), rest = attribute(description, "rest");
    names_ = Ref::checked(PySequence_Concat(children.get(), rest.get()));
    if (layout_ == RecordLayout::kCall) {
        init_ = init_alone(type);
        call_names_ = Ref::checked(PySequence_Concat(rest.get(), children.get()));
    }
    if (layout_ == RecordLayout::kVariable) new_ = attribute(type_, "_new");
}

bool RecordType::read(PyObject* node, std::vector<Ref>& values) const {
    const std::size_t start = values.size();
    values.emplace_back();
    if (layout_ == RecordLayout::kAttributes ? read_attributes(node, values)
                                             : read_values(node, values))
        return true;
    values.resize(start);
    return false;
}

bool RecordType::read_values(PyObject* node, std::vector<Ref>& values) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names_.get()); ++i)
        values.push_back(Ref::checked(PyObject_GetAttr(node, PyTuple_GET_ITEM(names_.get(), i))));
    if (layout_ == RecordLayout::kVariable) values.back() = sorted_by_key(values.back().get());
    return static_cast<bool>(values.back());
}

bool RecordType::read_attributes(PyObject* node, std::vector<Ref>& values) const {
    const Ref dict = Ref::steal(PyObject_GenericGetDict(node, nullptr));
    if (!dict) clear_if_ordinary();
    if (!dict || PyDict_GET_SIZE(dict.get()) != PyTuple_GET_SIZE(names_.get())) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names_.get()); ++i) {
        PyObject* value = PyDict_GetItemWithError(dict.get(), PyTuple_GET_ITEM(names_.get(), i));
        if (value == nullptr) {
            if (PyErr_Occurred() != nullptr) throw PythonError{};
            return false;
        }
        values.push_back(Ref::borrow(value));
    }
    return true;
}

Ref RecordType::new_object() const {
    const Ref no_arguments = Ref::checked(PyTuple_New(0));
    return Ref::checked(PyBaseObject_Type.tp_new(reinterpret_cast<PyTypeObject*>(type_),
                                                 no_arguments.get(), nullptr));
}

// What object.__setattr__ does, for each value.
Ref RecordType::with_attributes(Ref* values) const {
    Ref node = new_object();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names_.get()); ++i)
        check(PyObject_GenericSetAttr(node.get(), PyTuple_GET_ITEM(names_.get(), i),
                                      values[i + 1].get()));
    return node;
}

Ref RecordType::make(Ref* values) const {
    switch (layout_) {
        case RecordLayout::kCall: return call(values);
        case RecordLayout::kFields:
        case RecordLayout::kAttributes: return with_attributes(values);
        case RecordLayout::kVariable: return variable(values);
    }
    throw std::logic_error("no such layout");
}

Ref RecordType::variable(Ref* values) const {
    static PyObject* const name = interned("_trace_state");
    if (!trace_state_) {
        Ref node = Ref::checked(PyObject_Vectorcall(new_.get(), arguments(values + 1), 2, nullptr));
        trace_state_ = Ref::checked(PyObject_GenericGetAttr(node.get(), name));
        return node;
    }
    Ref node = with_attributes(values);
    check(PyObject_GenericSetAttr(node.get(), name, trace_state_.get()));
    return node;
}

Ref RecordType::call(Ref* values) const {
    // In JAX's order, which a constructor with **keywords sees.
    std::rotate(values + 1, values + 1 + keys_.size(), values + 1 + PyTuple_GET_SIZE(names_.get()));
    PyObject* names = call_names_.get();
    if (!init_) return Ref::checked(PyObject_Vectorcall(type_, arguments(values + 1), 0, names));
    values[0] = new_object();
    const Ref returned =
        Ref::checked(PyObject_Vectorcall(init_.get(), arguments(values), 1, names));
    if (returned.get() == Py_None) return values[0];
    PyErr_Format(PyExc_TypeError, "__init__() should return None, not '%.200s'",
                 Py_TYPE(returned.get())->tp_name);
    throw PythonError{};
}

}  // namespace shardrules::pytree
