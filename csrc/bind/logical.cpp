#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "errors.hpp"
#include "given.hpp"
#include "misfit.hpp"
#include "pytree/beside.hpp"
#include "register.hpp"
#include "resolution/dimension.hpp"
#include "sharding/logical.hpp"
#include "whole.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

using pytree::Ref;
using sharding::AxisId;
using sharding::LogicalRuleSet;
using sharding::Loss;
using sharding::NameId;

using Rule = std::pair<NameId, std::vector<AxisId>>;
using Dim = std::tuple<std::optional<NameId>, std::vector<AxisId>, py::object>;

const char* name_of(Loss loss) {
    switch (loss) {
        case Loss::kDimTaken: return "dim taken";
        case Loss::kAxisTaken: return "axis taken";
        case Loss::kIndivisible: return "indivisible";
    }
    return "";
}

std::unique_ptr<LogicalRuleSet> logical_rules(const std::vector<Rule>& rules,
                                              const Given<std::vector<std::int64_t>>& axis_sizes,
                                              bool last_wins, const std::string& indivisible) {
    std::vector<sharding::LogicalRule> taken;
    taken.reserve(rules.size());
    for (const auto& [name, axes] : rules) taken.push_back({name, axes});
    const auto precedence =
        last_wins ? sharding::Precedence::kLast : sharding::Precedence::kPriority;
    return std::make_unique<LogicalRuleSet>(std::move(taken), axis_sizes.as("axis_sizes"),
                                            precedence, misfit(indivisible));
}

// A dimension's size, which may be no number that C++ has; null without one.
sharding::Divides divisors_of(const py::object& size) {
    if (size.is_none()) return nullptr;
    return [dimension = resolution::dimension_from(Ref::borrow(size.ptr()))](
               std::uint64_t divisor) { return resolution::is_multiple(dimension, divisor); };
}

py::tuple resolve(const LogicalRuleSet& rules, const Given<std::vector<Dim>>& dims) {
    const sharding::Resolution result = translated([&] {
        std::vector<sharding::NamedDim> taken;
        for (const auto& [name, axes, size] : dims.as("dims"))
            taken.push_back({name.value_or(sharding::kNone), axes, divisors_of(size)});
        return rules.resolve(taken);
    });
    const auto or_none = [](std::uint32_t number) {
        return number == sharding::kNone ? py::object(py::none()) : py::object(py::int_(number));
    };
    py::list winners, lost;
    for (const std::uint32_t rule : result.rules) winners.append(or_none(rule));
    for (const auto& loss : result.lost)
        lost.append(py::make_tuple(loss.rule, loss.dim, name_of(loss.loss), or_none(loss.to)));
    return py::make_tuple(winners, lost);
}

// One crossing for all leaves; `memo` has the answer of each (names, shape) that was seen before.
py::list resolve_all(const py::list& names, const py::object& shapes, const py::dict& memo,
                     const py::function& make) {
    const bool has_shapes = !shapes.is_none();
    const py::list shape_list = has_shapes ? py::list(shapes) : py::list();
    if (has_shapes && shape_list.size() != names.size())
        throw std::invalid_argument("not one shape for each leaf");
    const std::size_t leaves = names.size();
    py::list answers;
    for (std::size_t i = 0; i < leaves; ++i) {  // making one may change the lists: an IndexError
        const py::object leaf = names[i];
        const py::object shape = has_shapes ? py::object(shape_list[i]) : py::object(py::none());
        const py::object key = has_shapes ? py::object(py::make_tuple(leaf, shape)) : leaf;
        PyObject* known = PyDict_GetItemWithError(memo.ptr(), key.ptr());
        if (known == nullptr && PyErr_Occurred()) throw py::error_already_set();
        if (known != nullptr) {
            answers.append(py::reinterpret_borrow<py::object>(known));
            continue;
        }
        const py::object made = make(leaf, shape);
        memo[key] = made;
        answers.append(made);
    }
    return answers;
}

// The value beside each leaf, by row; or None, where JAX has to look. See csrc/pytree/beside.hpp.
py::object values_beside(const py::object& rows, const py::object& values, std::size_t leaves) {
    py::list found(leaves);
    for (std::size_t i = 0; i < leaves; ++i) found[i] = py::none();
    const bool fits =
        translated([&] { return pytree::values_beside(rows.ptr(), values.ptr(), found.ptr()); });
    return fits ? py::object(found) : py::object(py::none());
}

}  // namespace

void register_logical(py::module_& module) {
    py::class_<LogicalRuleSet>(module, "LogicalRuleSet", whole())
        .def(py::init(&logical_rules))
        .def("resolve", &resolve);
    module.def("resolve_all", &resolve_all);
    module.def("values_beside", &values_beside);
}

}  // namespace shardrules::bind
