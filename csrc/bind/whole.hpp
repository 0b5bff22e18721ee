// For bound classes whose Python objects never lack their C++ object, which their methods could not
// tell: __new__ runs __init__ as well, and Python cannot subclass them. A second __init__ changes
// nothing, as pybind11 has it.
#pragma once

#include <pybind11/pybind11.h>

namespace shardrules::bind {

inline PyObject* new_whole(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    // pybind11's make_new_instance does not check that there is memory.
    const auto made = pybind11::reinterpret_steal<pybind11::object>(type->tp_alloc(type, 0));
    if (!made) return nullptr;
    reinterpret_cast<pybind11::detail::instance*>(made.ptr())->allocate_layout();
    return type->tp_init(made.ptr(), args, keywords) < 0 ? nullptr : made.inc_ref().ptr();
}

inline void make_whole(PyHeapTypeObject* heap_type) {
    heap_type->ht_type.tp_new = new_whole;
    heap_type->ht_type.tp_flags &= ~Py_TPFLAGS_BASETYPE;
}

inline pybind11::custom_type_setup whole() { return pybind11::custom_type_setup(make_whole); }

}  // namespace shardrules::bind
