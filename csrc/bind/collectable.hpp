// Shows a bound class to the garbage collector, for objects that hold Python objects: a cycle
// through one, as of rules whose payload refers to them, is collected like any other.
#pragma once

#include <pybind11/pybind11.h>

#include "whole.hpp"

namespace shardrules::bind {

// Includes whole(). The class needs int traverse(visitproc, void*) const and void clear(), after
// which its methods may fail but not crash.
template <class Held>
pybind11::custom_type_setup collectable() {
    return pybind11::custom_type_setup([](PyHeapTypeObject* heap_type) {
        make_whole(heap_type);
        PyTypeObject& made = heap_type->ht_type;
        made.tp_flags |= Py_TPFLAGS_HAVE_GC;
        made.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
            Py_VISIT(Py_TYPE(self));
            if (!pybind11::detail::is_holder_constructed(self)) return 0;  // __init__ has not run
            return pybind11::cast<const Held&>(pybind11::handle(self)).traverse(visit, arg);
        };
        made.tp_clear = [](PyObject* self) {
            if (pybind11::detail::is_holder_constructed(self))
                pybind11::cast<Held&>(pybind11::handle(self)).clear();
            return 0;
        };
    });
}

}  // namespace shardrules::bind
