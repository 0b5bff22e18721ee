// shardrules._core: a list of what is bound, and nothing else. All that is bound takes positional
// arguments alone: pybind11 3.1 crashes on a keyword where Python has no memory for its name.
#include <pybind11/pybind11.h>

#include "register.hpp"

namespace {

// Where Python has no memory for an object, pybind11 throws a std::runtime_error over the
// MemoryError that is set: the caller gets the MemoryError.
void keep_memory_errors(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::runtime_error&) {
        const bool is_set = PyErr_Occurred() != nullptr;
        if (!is_set || PyErr_ExceptionMatches(PyExc_MemoryError) == 0) throw;
    }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "The C++ core of shardrules; see _core.pyi.";
    pybind11::register_local_exception_translator(&keep_memory_errors);
    shardrules::bind::register_spec_table(module);
    shardrules::bind::register_sharding(module);
    shardrules::bind::register_logical(module);
    shardrules::bind::register_rule_set(module);
    shardrules::bind::register_templates(module);
}
