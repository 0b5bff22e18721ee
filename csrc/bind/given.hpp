// An argument that came from a user and that Python's side has checked. It is converted by hand, so
// that a wrong one that slips through gets a short error: pybind11's own has the repr of all
// arguments, the tree included.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace shardrules::bind {

template <class T>
struct Given {
    pybind11::handle object;  // borrowed for the call

    // As pybind11 converts it; TypeError if it does not.
    T as(const char* name) const {
        pybind11::detail::make_caster<T> caster;
        if (caster.load(object, true)) return pybind11::detail::cast_op<T>(std::move(caster));
        PyErr_Clear();
        throw pybind11::type_error(std::string(name) + " is of the type " +
                                   Py_TYPE(object.ptr())->tp_name +
                                   ", or has a value, that the core does not take");
    }
};

}  // namespace shardrules::bind

namespace pybind11::detail {

template <class T>
struct type_caster<shardrules::bind::Given<T>> {
    PYBIND11_TYPE_CASTER(shardrules::bind::Given<T>, make_caster<T>::name);
    bool load(handle source, bool) {
        value.object = source;
        return true;
    }
};

}  // namespace pybind11::detail
