#include "beside.hpp"

#include "stack_bound.hpp"

namespace shardrules::pytree {
namespace {

class Filler {
  public:
    // found: the list to fill.
    explicit Filler(PyObject* found) : found_(found) {}

    bool fill(PyObject* rows, PyObject* values, int levels = kMostLevels) {
        if (PyLong_CheckExact(rows)) return fill_row(rows, values);
        if (levels == 0 || stack_.is_reached() || Py_TYPE(rows) != Py_TYPE(values)) return false;
        if (PyDict_CheckExact(rows)) return fill_dict(rows, values, levels - 1);
        const bool is_sequence = PyList_CheckExact(rows) || PyTuple_CheckExact(rows);
        return is_sequence && fill_sequence(rows, values, levels - 1);
    }

  private:
    static constexpr int kMostLevels = 500;  // deeper trees have a long list of paths anyway

    bool fill_row(PyObject* number, PyObject* value) {
        const Py_ssize_t row = PyLong_AsSsize_t(number);
        if (row == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
        if (row < 0 || row >= PyList_GET_SIZE(found_)) return false;
        Py_INCREF(value);
        check(PyList_SetItem(found_, row, value));
        return true;
    }

    bool fill_dict(PyObject* rows, PyObject* values, int levels) {
        if (PyDict_GET_SIZE(rows) != PyDict_GET_SIZE(values)) return false;
        PyObject *borrowed_key = nullptr, *borrowed_row = nullptr;
        Py_ssize_t at = 0;
        while (PyDict_Next(rows, &at, &borrowed_key, &borrowed_row)) {
            const Ref key = Ref::borrow(borrowed_key), row = Ref::borrow(borrowed_row);
            const Ref value = Ref::borrow(PyDict_GetItemWithError(values, key.get()));
            if (!value && PyErr_Occurred() != nullptr) throw PythonError{};
            if (!value || !fill(row.get(), value.get(), levels)) return false;
        }
        return true;
    }

    bool fill_sequence(PyObject* rows, PyObject* values, int levels) {
        if (PySequence_Fast_GET_SIZE(rows) != PySequence_Fast_GET_SIZE(values)) return false;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(rows); ++i) {
            if (i >= PySequence_Fast_GET_SIZE(values))
                return false;  // a look-up may run Python code
            const Ref row = Ref::borrow(PySequence_Fast_GET_ITEM(rows, i));
            const Ref value = Ref::borrow(PySequence_Fast_GET_ITEM(values, i));
            if (!fill(row.get(), value.get(), levels)) return false;
        }
        return true;
    }

    PyObject* found_;
    StackBound stack_;
};

}  // namespace

bool values_beside(PyObject* rows, PyObject* values, PyObject* found) {
    return Filler(found).fill(rows, values);
}

}  // namespace shardrules::pytree
