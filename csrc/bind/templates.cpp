#include "folding/templates.hpp"

#include "columns.hpp"
#include "errors.hpp"
#include "register.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

using pytree::Ref;

// The path in UTF-8, lone surrogates included; `kept` holds it where the str itself does not.
std::string_view utf8(PyObject* path, Ref& kept) {
    if (!PyUnicode_Check(path)) {
        PyErr_Format(PyExc_TypeError, "a path is a %.200s, not a str", Py_TYPE(path)->tp_name);
        throw pytree::PythonError{};
    }
    if (PyUnicode_IS_COMPACT_ASCII(path))
        return {static_cast<const char*>(PyUnicode_DATA(path)),
                static_cast<std::size_t>(PyUnicode_GET_LENGTH(path))};
    kept = Ref::checked(PyUnicode_AsEncodedString(path, "utf-8", "surrogatepass"));
    return {PyBytes_AS_STRING(kept.get()), static_cast<std::size_t>(PyBytes_GET_SIZE(kept.get()))};
}

py::str from_utf8(std::string_view text) {
    const Ref made = Ref::checked(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
    return py::reinterpret_borrow<py::str>(made.get());
}

py::tuple templates(const py::list& paths) {
    return translated([&] {
        folding::Templates found;
        pytree::SignalChecks signals;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(paths.ptr()); ++i) {
            signals.tick();
            // The list's own no longer, as a signal handler may have changed it.
            const Ref path = Ref::borrow(PyList_GetItem(paths.ptr(), i));
            if (!path) throw pytree::PythonError{};
            Ref kept;
            found.add(utf8(path.get(), kept));
        }
        py::list texts;
        for (const std::string_view text : found.texts()) {
            signals.tick();
            texts.append(from_utf8(text));
        }
        return py::make_tuple(texts, column(found.of_path()), column(found.numbers()));
    });
}

}  // namespace

void register_templates(py::module_& module) { module.def("templates", &templates); }

}  // namespace shardrules::bind
