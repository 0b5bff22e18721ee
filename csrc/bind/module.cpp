// shardrules._core: a list of what is bound, and nothing else.
#include <pybind11/pybind11.h>

#include "register.hpp"

PYBIND11_MODULE(_core, module) {
    module.doc() = "The C++ core of shardrules; see _core.pyi.";
    shardrules::bind::register_spec_table(module);
    shardrules::bind::register_sharding(module);
    shardrules::bind::register_logical(module);
    shardrules::bind::register_rule_set(module);
    shardrules::bind::register_templates(module);
}
