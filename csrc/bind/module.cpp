// shardrules._core: registers what the other files of this folder bind. All functions take
// positional arguments alone, since pybind11 3.1 crashes on a keyword if Python has no memory for
// its name.
//
// The core needs the GIL. It does not declare py::mod_gil_not_used, so a free-threaded Python turns
// the GIL on again when it imports this module. SpecTable and ShardingTable are filled by whichever
// call comes first, without a lock; the walk borrows items of users' containers, and reads slots
// and hashes of their objects, where nothing but the GIL keeps other threads from changing them;
// JaxTrees (csrc/pytree/registry.cpp) is made on first use. What is safe without it: csrc/automata,
// whose DFAs are lent out under a mutex to one call each, and csrc/sharding, which is immutable.
#include <pybind11/pybind11.h>

#include <utility>

#include "register.hpp"

namespace py = pybind11;

namespace {

// If Python has no memory for an object, pybind11 throws a std::runtime_error although the
// MemoryError is set. The caller gets the MemoryError.
void keep_memory_errors(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(std::move(thrown));
    } catch (const std::runtime_error&) {
        const bool is_set = PyErr_Occurred() != nullptr;
        if (!is_set || PyErr_ExceptionMatches(PyExc_MemoryError) == 0) throw;
    }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "The C++ core of shardrules; see _core.pyi.";
    py::register_local_exception_translator(&keep_memory_errors);
    shardrules::bind::register_spec_table(module);
    shardrules::bind::register_sharding(module);
    shardrules::bind::register_logical(module);
    shardrules::bind::register_read_ranges(module);
    shardrules::bind::register_record_layout(module);
    shardrules::bind::register_rule_set(module);
    shardrules::bind::register_templates(module);
}
