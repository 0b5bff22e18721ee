#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "pybind_extras.hpp"
#include "register.hpp"
#include "resolution/spec_table.hpp"

namespace py = pybind11;

namespace shardrules::bind {

void register_spec_table(py::module_& module) {
    using resolution::SpecTable;
    py::class_<resolution::Answers>(module, "Answers", initialized());
    py::class_<SpecTable, resolution::Answers>(module, "SpecTable",
                                               initialized_and_collected<SpecTable>())
        .def(py::init([](const py::sequence& specs, const std::vector<Py_ssize_t>& lengths,
                         const py::object& make) {
            std::vector<pytree::Ref> objects;
            for (const auto& spec : specs) objects.push_back(pytree::Ref::borrow(spec.ptr()));
            return SpecTable(objects, lengths, pytree::Ref::borrow(make.ptr()));
        }));
}

}  // namespace shardrules::bind
