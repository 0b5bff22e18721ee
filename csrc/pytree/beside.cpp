#include "beside.hpp"

namespace shardrules::pytree {
namespace {

// Deeper trees have a long list of paths anyway, and this much stack is there in every thread.
constexpr int kMostLevels = 500;

bool fill(PyObject* rows, PyObject* values, PyObject* found, int levels);

bool fill_dict(PyObject* rows, PyObject* values, PyObject* found, int levels) {
    if (PyDict_GET_SIZE(rows) != PyDict_GET_SIZE(values)) return false;
    PyObject *borrowed_key = nullptr, *borrowed_row = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(rows, &at, &borrowed_key, &borrowed_row)) {
        const Ref key = Ref::borrow(borrowed_key), row = Ref::borrow(borrowed_row);
        const Ref value = Ref::borrow(PyDict_GetItemWithError(values, key.get()));
        if (!value && PyErr_Occurred() != nullptr) throw PythonError{};
        if (!value || !fill(row.get(), value.get(), found, levels)) return false;
    }
    return true;
}

bool fill_sequence(PyObject* rows, PyObject* values, PyObject* found, int levels) {
    if (PySequence_Fast_GET_SIZE(rows) != PySequence_Fast_GET_SIZE(values)) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(rows); ++i) {
        if (i >= PySequence_Fast_GET_SIZE(values)) return false;  // a look-up may run Python code
        const Ref row = Ref::borrow(PySequence_Fast_GET_ITEM(rows, i));
        const Ref value = Ref::borrow(PySequence_Fast_GET_ITEM(values, i));
        if (!fill(row.get(), value.get(), found, levels)) return false;
    }
    return true;
}

bool fill(PyObject* rows, PyObject* values, PyObject* found, int levels) {
    if (PyLong_CheckExact(rows)) {
        const Py_ssize_t row = PyLong_AsSsize_t(rows);
        if (row == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
        if (row < 0 || row >= PyList_GET_SIZE(found)) return false;
        Py_INCREF(values);
        check(PyList_SetItem(found, row, values));
        return true;
    }
    if (levels == 0 || Py_TYPE(rows) != Py_TYPE(values)) return false;
    if (PyDict_CheckExact(rows)) return fill_dict(rows, values, found, levels - 1);
    const bool is_sequence = PyList_CheckExact(rows) || PyTuple_CheckExact(rows);
    return is_sequence && fill_sequence(rows, values, found, levels - 1);
}

}  // namespace

bool values_beside(PyObject* rows, PyObject* values, PyObject* found) {
    return fill(rows, values, found, kMostLevels);
}

}  // namespace shardrules::pytree
