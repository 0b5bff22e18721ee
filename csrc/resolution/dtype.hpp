// Reads the .dtype of leaves. Costs an attribute look-up.
#pragma once

#include "pytree/ref.hpp"

namespace shardrules::resolution {

// The leaf's dtype, or None if it has none.
inline pytree::Ref dtype_of(PyObject* leaf) {
    static PyObject* const name = pytree::interned("dtype");
    if (PyObject* dtype = PyObject_GetAttr(leaf, name)) return pytree::Ref::steal(dtype);
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw pytree::PythonError{};
    PyErr_Clear();
    return pytree::Ref::borrow(Py_None);
}

}  // namespace shardrules::resolution
