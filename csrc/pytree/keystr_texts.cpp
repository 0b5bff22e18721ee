#include "keystr_texts.hpp"

namespace shardrules::pytree {

Ref KeystrTexts::of(const Key& key) {
    if (key.object == nullptr) return Ref::checked(PyUnicode_FromFormat("[%zd]", key.index));
    if (key.is_attribute) return Ref::checked(PyUnicode_FromFormat(".%S", key.object));
    if (!PyUnicode_CheckExact(key.object) || PyUnicode_GET_LENGTH(key.object) > kLongest)
        return Ref::checked(PyUnicode_FromFormat("[%R]", key.object));
    if (PyObject* known = PyDict_GetItemWithError(known_.get(), key.object))
        return Ref::borrow(known);
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    Ref made = Ref::checked(PyUnicode_FromFormat("[%R]", key.object));
    if (PyDict_GET_SIZE(known_.get()) >= kMostKnown) PyDict_Clear(known_.get());
    check(PyDict_SetItem(known_.get(), key.object, made.get()));
    return made;
}

}  // namespace shardrules::pytree
