// Owning references to Python objects, and Python's errors as a C++ exception. Costs no more than
// the bare calls. Knows nothing of trees.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>

namespace shardrules::pytree {

// Thrown while a Python error is set. The handler returns to Python or clears the error.
struct PythonError {};

class Ref {
  public:
    Ref() = default;
    static Ref steal(PyObject* object) { return Ref(object); }
    static Ref borrow(PyObject* object) {
        Py_XINCREF(object);
        return Ref(object);
    }
    // For calls that return a new reference, or nullptr with an error set.
    static Ref checked(PyObject* object) {
        if (object == nullptr) throw PythonError{};
        return Ref(object);
    }
    Ref(const Ref& other) : object_(other.object_) { Py_XINCREF(object_); }
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    explicit Ref(PyObject* object) : object_(object) {}
    PyObject* object_ = nullptr;
};

inline void check(int status) {
    if (status < 0) throw PythonError{};
}

// A name for a function's static variable, owned until the process ends. After an error the next
// call of that function tries again.
inline PyObject* interned(const char* name) {
    return Ref::checked(PyUnicode_InternFromString(name)).release();
}

inline Ref attribute(PyObject* object, const char* name) {
    return Ref::checked(PyObject_GetAttrString(object, name));
}

// Clears the error that is set, where an error means "no". Throws PythonError if it concerns the
// whole program: out of memory, or not an Exception, such as KeyboardInterrupt.
inline void clear_if_ordinary() {
    if (PyErr_ExceptionMatches(PyExc_MemoryError) || !PyErr_ExceptionMatches(PyExc_Exception))
        throw PythonError{};
    PyErr_Clear();
}

inline Ref imported(const char* module) { return Ref::checked(PyImport_ImportModule(module)); }

// Lets Ctrl-C interrupt a loop over millions of objects.
class SignalChecks {
  public:
    void tick() {
        if (++ticks_ % kTicks == 0) check(PyErr_CheckSignals());
    }

  private:
    static constexpr std::uint32_t kTicks = 4096;
    std::uint32_t ticks_ = 0;
};

}  // namespace shardrules::pytree
