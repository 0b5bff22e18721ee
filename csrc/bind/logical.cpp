#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "pybind_extras.hpp"
#include "pytree/aligned_values.hpp"
#include "register.hpp"
#include "resolution/dimension.hpp"
#include "sharding/logical.hpp"

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

std::unique_ptr<LogicalRuleSet> logical_rule_set(
    const std::vector<Rule>& rules, const Argument<std::vector<std::int64_t>>& axis_sizes,
    bool last_wins, const std::string& indivisible) {
    std::vector<sharding::LogicalRule> logical_rules;
    logical_rules.reserve(rules.size());
    for (const auto& [name, axes] : rules) logical_rules.push_back({name, axes});
    const auto precedence =
        last_wins ? sharding::Precedence::kLast : sharding::Precedence::kPriority;
    return std::make_unique<LogicalRuleSet>(std::move(logical_rules), axis_sizes.as("axis_sizes"),
                                            precedence, sharding::axis_policy(indivisible));
}

// Of a dimension's size, which may be larger than an int64, or symbolic; null for None.
sharding::Divides divides(const py::object& size) {
    if (size.is_none()) return nullptr;
    return [dimension = resolution::dimension_from(Ref::borrow(size.ptr()))](
               std::uint64_t divisor) { return resolution::is_multiple(dimension, divisor); };
}

py::tuple resolve(const LogicalRuleSet& rules, const Argument<std::vector<Dim>>& dims) {
    const sharding::Resolution result = with_python_errors([&] {
        std::vector<sharding::NamedDim> named;
        for (const auto& [name, axes, size] : dims.as("dims"))
            named.push_back({name.value_or(sharding::kNone), axes, divides(size)});
        return rules.resolve(named);
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

// One call for all leaves; `memo` has the answers for earlier (names, shape).
py::list resolve_all(const py::list& names, const py::object& shapes, const py::dict& memo,
                     const py::function& make) {
    const bool has_shapes = !shapes.is_none();
    const py::list shape_list = has_shapes ? py::list(shapes) : py::list();
    if (has_shapes && shape_list.size() != names.size())
        throw std::invalid_argument("not one shape for each leaf");
    const std::size_t leaves = names.size();
    py::list answers;
    for (std::size_t i = 0; i < leaves; ++i) {  // an IndexError if `make` shortens the lists
        const py::object leaf = names[i];
        const py::object shape = has_shapes ? py::object(shape_list[i]) : py::object(py::none());
        const py::object key = has_shapes ? py::object(py::make_tuple(leaf, shape)) : leaf;
        auto answer =
            py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(memo.ptr(), key.ptr()));
        if (!answer) {
            if (PyErr_Occurred() != nullptr) throw py::error_already_set();
            answer = make(leaf, shape);
            memo[key] = answer;
        }
        answers.append(answer);
    }
    return answers;
}

// The values by row; None where only JAX can tell. See csrc/pytree/aligned_values.hpp.
py::object aligned_values(const py::object& rows, const py::object& values, std::size_t leaves) {
    py::list by_row(leaves);
    for (std::size_t i = 0; i < leaves; ++i) by_row[i] = py::none();
    const bool is_aligned = with_python_errors(
        [&] { return pytree::aligned_values(rows.ptr(), values.ptr(), by_row.ptr()); });
    return is_aligned ? py::object(by_row) : py::object(py::none());
}

}  // namespace

void register_logical(py::module_& module) {
    py::class_<LogicalRuleSet>(module, "LogicalRuleSet", initialized())
        .def(py::init(&logical_rule_set))
        .def("resolve", &resolve);
    module.def("resolve_all", &resolve_all);
    module.def("aligned_values", &aligned_values);
}

}  // namespace shardrules::bind
