// Reads the .shape of leaves. Where a type keeps it in a slot, as jax.ShapeDtypeStruct does, the
// slot is read directly (a load instead of an attribute look-up); otherwise it is an attribute like
// any other. What is known about a type is kept for one walk. Knows nothing of what a shape means.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

class ShapeReader {
  public:
    // The shape, or empty if the leaf has none (AttributeError, as hasattr has it).
    Ref read(PyObject* leaf) {
        PyTypeObject* type = Py_TYPE(leaf);
        if (type != type_) inspect(type);
        if (slot_ == 0) return read_attribute(leaf);
        return Ref::borrow(*reinterpret_cast<PyObject**>(reinterpret_cast<char*>(leaf) + slot_));
    }

    // The shape without running Python, borrowed: null unless `object` has the last leaf's type,
    // and that type a slot for it.
    PyObject* peek(PyObject* object) const {
        if (slot_ == 0 || Py_TYPE(object) != type_) return nullptr;
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot_);
    }

    // The rank of the shape that read() gave; 0 without one.
    static Py_ssize_t rank_of(PyObject* leaf, const Ref& shape);
    // Whether an array of this shape has one element.
    static bool holds_one(PyObject* shape);

  private:
    void inspect(PyTypeObject* type);
    static Ref read_attribute(PyObject* leaf);

    PyTypeObject* type_ = nullptr;  // the last leaf's
    Ref alive_;                     // keeps type_'s address from being used again
    Py_ssize_t slot_ = 0;           // offset in the object; 0: none
};

}  // namespace shardrules::pytree
