#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "pybind_extras.hpp"
#include "register.hpp"
#include "resolution/sharding_table.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

using resolution::ShardingTable;
using sharding::Corrector;

using SpecDims = std::vector<std::pair<std::vector<std::int64_t>, std::int64_t>>;

Corrector corrector(const Argument<SpecDims>& dims, const std::string& absent,
                    const std::string& indivisible) {
    std::vector<sharding::SpecDim> spec;
    for (const auto& [axis_sizes, unit] : dims.as("dims")) spec.push_back({axis_sizes, unit});
    return Corrector(spec, {.absent = sharding::axis_policy(absent),
                            .indivisible = sharding::axis_policy(indivisible)});
}

}  // namespace

void register_sharding(py::module_& module) {
    py::class_<Corrector, std::shared_ptr<Corrector>>(module, "Corrector", initialized())
        .def(py::init(&corrector))
        .def("kept", [](const Corrector& self, const Argument<py::tuple>& argument) {
            const py::tuple shape = argument.as("shape");
            return with_python_errors([&] {
                return resolution::kept_axes(self, shape.ptr(),
                                             static_cast<Py_ssize_t>(shape.size()));
            });
        });
    py::class_<ShardingTable, resolution::Answers>(module, "ShardingTable",
                                                   initialized_and_collected<ShardingTable>())
        .def(py::init([](const std::vector<std::shared_ptr<Corrector>>& correctors,
                         std::vector<std::uint32_t> spec_of, const py::object& make,
                         const py::object& make_for_shape) {
            return ShardingTable({correctors.begin(), correctors.end()}, std::move(spec_of),
                                 pytree::Ref::borrow(make.ptr()),
                                 pytree::Ref::borrow(make_for_shape.ptr()));
        }));
}

}  // namespace shardrules::bind
