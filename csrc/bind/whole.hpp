// For bound classes whose Python objects never lack their C++ object, which their methods could not
// tell: __new__ runs __init__ as well, and Python cannot subclass them. A second __init__ changes
// nothing, as pybind11 has it.
#pragma once

#include <pybind11/pybind11.h>

namespace shardrules::bind {

inline PyObject* new_whole(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    auto made =
        pybind11::reinterpret_steal<pybind11::object>(pybind11::detail::make_new_instance(type));
    return type->tp_init(made.ptr(), args, keywords) < 0 ? nullptr : made.release().ptr();
}

inline void make_whole(PyHeapTypeObject* heap_type) {
    heap_type->ht_type.tp_new = new_whole;
    heap_type->ht_type.tp_flags &= ~Py_TPFLAGS_BASETYPE;
}

inline pybind11::custom_type_setup whole() { return pybind11::custom_type_setup(make_whole); }

}  // namespace shardrules::bind
