// What the bindings add to pybind11: how Python objects are made and collected, arguments with
// short errors, Python's errors, and columns of numbers.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "pytree/ref.hpp"

namespace shardrules::bind {

// pybind11's __new__ leaves the C++ object to __init__, and a method cannot tell that it is
// missing. This one runs __init__ as well.
inline PyObject* new_initialized(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    // pybind11's make_new_instance does not check that there is memory.
    const auto object = pybind11::reinterpret_steal<pybind11::object>(type->tp_alloc(type, 0));
    if (!object) return nullptr;
    reinterpret_cast<pybind11::detail::instance*>(object.ptr())->allocate_layout();
    return type->tp_init(object.ptr(), args, keywords) < 0 ? nullptr : object.inc_ref().ptr();
}

inline void set_initialized(PyHeapTypeObject* heap_type) {
    heap_type->ht_type.tp_new = new_initialized;
    heap_type->ht_type.tp_flags &= ~Py_TPFLAGS_BASETYPE;
}

// For a class whose objects always have their C++ object. Python cannot subclass it, and a second
// __init__ changes nothing, as pybind11 has it.
inline pybind11::custom_type_setup initialized() {
    return pybind11::custom_type_setup(set_initialized);
}

// The same for a class that holds Python objects: Python's garbage collector sees them, so that a
// cycle through one is collected, as of rules whose payload refers to them. The class needs int
// traverse(visitproc, void*) const and void clear(), after which its methods may fail but not
// crash.
template <class Class>
pybind11::custom_type_setup initialized_and_collected() {
    return pybind11::custom_type_setup([](PyHeapTypeObject* heap_type) {
        set_initialized(heap_type);
        PyTypeObject& type = heap_type->ht_type;
        type.tp_flags |= Py_TPFLAGS_HAVE_GC;
        type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
            Py_VISIT(Py_TYPE(self));
            if (!pybind11::detail::is_holder_constructed(self)) return 0;  // __init__ has not run
            return pybind11::cast<const Class&>(pybind11::handle(self)).traverse(visit, arg);
        };
        type.tp_clear = [](PyObject* self) {
            if (pybind11::detail::is_holder_constructed(self))
                pybind11::cast<Class&>(pybind11::handle(self)).clear();
            return 0;
        };
    });
}

// An argument that comes from a user, checked in Python. It is converted by hand, so that a wrong
// one that slips through gets a short error: pybind11's own has the repr of all arguments, the tree
// included.
template <class T>
struct Argument {
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

// Runs the call; an error of the pytree layer becomes pybind11's.
template <class Call>
auto with_python_errors(Call call) {
    try {
        return call();
    } catch (const pytree::PythonError&) {
        throw pybind11::error_already_set();
    }
}

// The bytes of the numbers, for numpy.frombuffer.
template <class Number>
pybind11::bytes bytes_of(const std::vector<Number>& numbers) {
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

}  // namespace shardrules::bind

namespace pybind11::detail {

template <class T>
struct type_caster<shardrules::bind::Argument<T>> {
    PYBIND11_TYPE_CASTER(shardrules::bind::Argument<T>, make_caster<T>::name);
    bool load(handle source, bool) {
        value.object = source;
        return true;
    }
};

}  // namespace pybind11::detail
