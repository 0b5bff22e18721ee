#include "survey_leaves.hpp"

#include "dtype.hpp"

namespace shardrules::resolution {

using pytree::PythonError;
using pytree::check;

Ref SurveyLeaves::visit(PyObject* leaf, const LeafPlace& place) {
    const Ref rule = decisions_.visit(leaf, place);
    const Ref shape = shape_of(leaf), dtype = dtype_of(leaf);
    const Ref kind = Ref::checked(PyTuple_Pack(3, rule.get(), shape.get(), dtype.get()));
    Ref number;
    if (PyObject* known = PyDict_GetItemWithError(kinds_.get(), kind.get())) {
        number = Ref::borrow(known);
    } else {
        if (PyErr_Occurred() != nullptr) throw PythonError{};
        number = Ref::checked(PyLong_FromSsize_t(PyDict_GET_SIZE(kinds_.get())));
        check(PyDict_SetItem(kinds_.get(), kind.get(), number.get()));
    }
    Ref row = Ref::checked(PyLong_FromSize_t(numbers_.size()));
    check(PyList_Append(paths_.get(), place.path.shown().get()));
    numbers_.push_back(static_cast<std::int32_t>(PyLong_AsLong(number.get())));
    return row;
}

Ref SurveyLeaves::shape_of(PyObject* leaf) {
    const Ref shape = shapes_.read(leaf);
    if (!shape) return Ref::borrow(Py_None);
    return PyTuple_CheckExact(shape.get()) ? shape : Ref::checked(PySequence_Tuple(shape.get()));
}

}  // namespace shardrules::resolution
