#include "pytree/templates.hpp"

#include "columns.hpp"
#include "errors.hpp"
#include "register.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

py::tuple templates(const py::list& paths) {
    return translated([&] {
        const pytree::Templates found = pytree::templates_of(paths.ptr());
        return py::make_tuple(py::reinterpret_borrow<py::object>(found.texts.get()),
                              column(found.of_path), column(found.numbers));
    });
}

}  // namespace

void register_templates(py::module_& module) {
    module.def("templates", &templates, py::arg("paths"));
}

}  // namespace shardrules::bind
