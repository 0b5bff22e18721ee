// A column of numbers as Python gets it: bytes, for numpy.frombuffer.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace shardrules::bind {

template <class Number>
pybind11::bytes column(const std::vector<Number>& numbers) {
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

}  // namespace shardrules::bind
