// Turns the error of the pytree layer into pybind11's.
#pragma once

#include <pybind11/pybind11.h>

#include "pytree/ref.hpp"

namespace shardrules::bind {

template <class Call>
auto translated(Call call) {
    try {
        return call();
    } catch (const pytree::PythonError&) {
        throw pybind11::error_already_set();
    }
}

}  // namespace shardrules::bind
