#include "keystr_texts.hpp"

namespace shardrules::pytree {

Ref KeystrTexts::of(const Key& key) {
    if (key.object == nullptr) return Ref::checked(PyUnicode_FromFormat("[%zd]", key.index));
    if (key.is_attribute) return Ref::checked(PyUnicode_FromFormat(".%S", key.object));
    if (!PyUnicode_CheckExact(key.object) || PyUnicode_GET_LENGTH(key.object) > kLongest)
        return Ref::checked(PyUnicode_FromFormat("[%R]", key.object));
    if (PyObject* text = PyDict_GetItemWithError(texts_.get(), key.object))
        return Ref::borrow(text);
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    Ref text = Ref::checked(PyUnicode_FromFormat("[%R]", key.object));
    if (PyDict_GET_SIZE(texts_.get()) >= kMostTexts) PyDict_Clear(texts_.get());
    check(PyDict_SetItem(texts_.get(), key.object, text.get()));
    return text;
}

}  // namespace shardrules::pytree
