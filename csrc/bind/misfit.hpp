// The names that Python has for the policies of csrc/sharding/correction.hpp.
#pragma once

#include <stdexcept>
#include <string>

#include "sharding/correction.hpp"

namespace shardrules::bind {

inline sharding::Misfit misfit(const std::string& name) {
    using sharding::Misfit;
    if (name == "drop") return Misfit::kDrop;
    if (name == "drop_axis") return Misfit::kDropAxis;
    if (name == "prefix") return Misfit::kPrefix;
    if (name == "keep") return Misfit::kKeep;
    throw std::invalid_argument("no such policy: " + name);
}

}  // namespace shardrules::bind
