// Reads the .shape of leaves. If the type has it in a slot, as jax.ShapeDtypeStruct does, that is a
// load instead of an attribute look-up. Knows nothing of what a shape means.
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

    // The shape, borrowed, without running Python; null unless `object` has the type of the last
    // leaf read, and that type a shape slot.
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

    PyTypeObject* type_ = nullptr;  // of the last leaf
    Ref alive_;                     // owns type_, so that its address is not reused
    Py_ssize_t slot_ = 0;           // its offset in the object; 0: none
};

}  // namespace shardrules::pytree
