// The registrations that module.cpp calls, each defined in the file of what it binds.
#pragma once

#include <pybind11/pybind11.h>

namespace shardrules::bind {

void register_logical(pybind11::module_& module);
void register_read_ranges(pybind11::module_& module);
void register_record_layout(pybind11::module_& module);
void register_rule_set(pybind11::module_& module);
void register_sharding(pybind11::module_& module);
void register_spec_table(pybind11::module_& module);
void register_templates(pybind11::module_& module);

}  // namespace shardrules::bind
