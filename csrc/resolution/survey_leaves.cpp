#include "survey_leaves.hpp"

#include "dtype.hpp"

namespace shardrules::resolution {

using pytree::check;
using pytree::PythonError;

namespace {

Ref shape_of(Leaf& leaf) {
    const Ref& shape = leaf.shape();
    return shape ? Ref::checked(PySequence_Tuple(shape.get())) : Ref::borrow(Py_None);
}

}  // namespace

Visited SurveyLeaves::visit(Leaf& leaf) {
    const Ref rule = decisions_.visit(leaf).answer;
    const Ref shape = shape_of(leaf), dtype = dtype_of(leaf.object());
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
    check(PyList_Append(paths_.get(), leaf.path().shown().get()));
    numbers_.push_back(static_cast<std::int32_t>(PyLong_AsLong(number.get())));
    return {std::move(row)};
}

}  // namespace shardrules::resolution
