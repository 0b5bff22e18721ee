#include "folding/templates.hpp"

#include "pybind_extras.hpp"
#include "register.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

using pytree::Ref;

// The path in UTF-8, lone surrogates included; in `encoded` unless the str itself has it.
std::string_view utf8(PyObject* path, Ref& encoded) {
    if (!PyUnicode_Check(path)) {
        PyErr_Format(PyExc_TypeError, "a path is a %.200s, not a str", Py_TYPE(path)->tp_name);
        throw pytree::PythonError{};
    }
    if (PyUnicode_IS_COMPACT_ASCII(path))
        return {static_cast<const char*>(PyUnicode_DATA(path)),
                static_cast<std::size_t>(PyUnicode_GET_LENGTH(path))};
    encoded = Ref::checked(PyUnicode_AsEncodedString(path, "utf-8", "surrogatepass"));
    return {PyBytes_AS_STRING(encoded.get()),
            static_cast<std::size_t>(PyBytes_GET_SIZE(encoded.get()))};
}

py::str from_utf8(std::string_view text) {
    Ref decoded = Ref::checked(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
    return py::reinterpret_steal<py::str>(decoded.release());
}

py::tuple templates_of(const py::list& paths) {
    return with_python_errors([&] {
        folding::Templates templates;
        pytree::SignalChecks signals;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(paths.ptr()); ++i) {
            signals.tick();
            // Checked, and owned from here on: a signal handler may change the list.
            const Ref path = Ref::borrow(PyList_GetItem(paths.ptr(), i));
            if (!path) throw pytree::PythonError{};
            Ref encoded;
            templates.add(utf8(path.get(), encoded));
        }
        py::list texts;
        for (const std::string_view text : templates.texts()) {
            signals.tick();
            texts.append(from_utf8(text));
        }
        return py::make_tuple(texts, bytes_of(templates.of_path()), bytes_of(templates.numbers()));
    });
}

}  // namespace

void register_templates(py::module_& module) { module.def("templates", &templates_of); }

}  // namespace shardrules::bind
