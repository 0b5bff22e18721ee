#include "dimension.hpp"

namespace shardrules::resolution {

using pytree::check;
using pytree::clear_if_ordinary;
using pytree::PythonError;

namespace {

// By the attribute that JAX itself looks for.
bool is_symbolic(PyObject* item) {
    if (PyIndex_Check(item)) return false;
    const Ref mark = Ref::steal(PyObject_GetAttrString(item, "dimension_as_value"));
    if (!mark) clear_if_ordinary();
    return mark && mark.get() != Py_None;
}

}  // namespace

Dimension dimension_of(PyObject* shape, std::size_t index) {
    const auto position = static_cast<Py_ssize_t>(index);
    Dimension dimension = dimension_from(PyTuple_CheckExact(shape)
                                             ? Ref::borrow(PyTuple_GET_ITEM(shape, position))
                                             : Ref::checked(PySequence_GetItem(shape, position)));
    if (dimension.size >= 0) return dimension;
    PyErr_Format(PyExc_ValueError, "dimension %zd of the shape %R is negative", position, shape);
    throw PythonError{};
}

Dimension dimension_from(Ref item) {
    if (is_symbolic(item.get())) return {0, std::move(item)};
    int overflow = 0;
    const long long size = PyLong_AsLongLongAndOverflow(item.get(), &overflow);
    if (size == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
    if (overflow > 0) return {0, std::move(item)};
    return {size, {}};
}

bool is_multiple_in_python(PyObject* size, std::uint64_t divisor) {
    if (divisor == 1) return true;
    const Ref number = Ref::checked(PyLong_FromUnsignedLongLong(divisor));
    const Ref rest = Ref::checked(PyNumber_Remainder(size, number.get()));
    const int is_zero =
        PyObject_RichCompareBool(rest.get(), Ref::checked(PyLong_FromLong(0)).get(), Py_EQ);
    check(is_zero);
    return is_zero == 1;
}

}  // namespace shardrules::resolution
