#include "aligned_values.hpp"

#include "stack_bound.hpp"

namespace shardrules::pytree {
namespace {

class Filler {
  public:
    explicit Filler(PyObject* by_row) : by_row_(by_row) {}

    bool fill(PyObject* rows, PyObject* values, int levels = kMostLevels) {
        if (PyLong_CheckExact(rows)) return fill_row(rows, values);
        if (levels == 0 || stack_.is_reached() || Py_TYPE(rows) != Py_TYPE(values)) return false;
        if (PyDict_CheckExact(rows)) return fill_dict(rows, values, levels - 1);
        const bool is_sequence = PyList_CheckExact(rows) || PyTuple_CheckExact(rows);
        return is_sequence && fill_sequence(rows, values, levels - 1);
    }

  private:
    static constexpr int kMostLevels = 500;  // JAX aligns deeper trees

    bool fill_row(PyObject* number, PyObject* value) {
        const Py_ssize_t row = PyLong_AsSsize_t(number);
        if (row == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
        if (row < 0 || row >= PyList_GET_SIZE(by_row_)) return false;
        Py_INCREF(value);
        check(PyList_SetItem(by_row_, row, value));
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

    PyObject* by_row_;
    StackBound stack_;
};

}  // namespace

bool aligned_values(PyObject* rows, PyObject* values, PyObject* by_row) {
    return Filler(by_row).fill(rows, values);
}

}  // namespace shardrules::pytree
