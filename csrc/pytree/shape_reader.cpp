#include "shape_reader.hpp"

#include <structmember.h>

namespace shardrules::pytree {
namespace {

PyObject* shape_name() {
    static PyObject* const name = interned("shape");
    return name;
}

}  // namespace

void ShapeReader::inspect(PyTypeObject* type) {
    slot_ = 0;
    type_ = type;
    alive_ = Ref::borrow(reinterpret_cast<PyObject*>(type));
    if (type->tp_getattro != PyObject_GenericGetAttr) return;
    const PyObject* descriptor = _PyType_Lookup(type, shape_name());
    if (descriptor == nullptr || !Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) return;
    const auto* member = reinterpret_cast<const PyMemberDescrObject*>(descriptor);
    const bool plain_slot = member->d_member->type == T_OBJECT_EX;
    if (plain_slot && PyType_IsSubtype(type, member->d_common.d_type))
        slot_ = member->d_member->offset;
}

Py_ssize_t ShapeReader::rank_of(PyObject* leaf, const Ref& shape) {
    if (!shape) return 0;
    if (PyTuple_CheckExact(shape.get())) return PyTuple_GET_SIZE(shape.get());
    const Py_ssize_t rank = PyObject_Size(shape.get());
    if (rank >= 0) return rank;
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "the .shape of a leaf of type %.200s is %R, not a tuple",
                     Py_TYPE(leaf)->tp_name, shape.get());
    }
    throw PythonError{};
}

bool ShapeReader::holds_one(PyObject* shape) {
    const Ref one = Ref::checked(PyLong_FromLong(1)), dims = Ref::checked(PySequence_Tuple(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims.get()); ++i) {
        const int equal =
            PyObject_RichCompareBool(PyTuple_GET_ITEM(dims.get(), i), one.get(), Py_EQ);
        check(equal);
        if (equal == 0) return false;
    }
    return true;
}

Ref ShapeReader::read_attribute(PyObject* leaf) {
    PyObject* shape = PyObject_GetAttr(leaf, shape_name());
    if (shape == nullptr) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError{};
        PyErr_Clear();
    }
    return Ref::steal(shape);
}

}  // namespace shardrules::pytree
