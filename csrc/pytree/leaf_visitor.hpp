// How a visitor of a walk sees a leaf, and when the walk may reuse the visitor's answer for another
// leaf without a visit, as small_dicts.hpp does. The contract:
//
// - An answer is reused only in the same state of the automaton and for the same reuse key.
// - The key contains everything that the visitor read of the leaf and of its path. It is complete:
//   a visitor sees them only through Leaf, which records each read. The state stands for the rest
//   of the path. What is the same for all leaves of a walk (options, rules, answers) is in no key.
// - A visit that does more than answer, such as counting or listing the leaf, returns no key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "automata/lazy_dfa.hpp"
#include "shape_reader.hpp"
#include "tree_path.hpp"

namespace shardrules::pytree {

// The shape of a leaf whose visit read nothing else, or only its rank; or empty.
class ReuseKey {
  public:
    ReuseKey() = default;
    ReuseKey(Ref shape, bool rank_is_enough)
        : shape_(std::move(shape)), rank_is_enough_(rank_is_enough) {}
    explicit operator bool() const { return static_cast<bool>(shape_); }

    // True only if a visit of the leaf would return this key; false if unsure. Runs no Python.
    bool fits(PyObject* leaf, const ShapeReader& shapes) const {
        PyObject* shape = shapes.peek(leaf);
        if (shape == shape_.get()) return true;
        if (shape == nullptr || !PyTuple_CheckExact(shape)) return false;
        if (PyTuple_GET_SIZE(shape) != PyTuple_GET_SIZE(shape_.get())) return false;
        return rank_is_enough_ || same_sizes(shape, shape_.get());
    }

  private:
    // Of two shapes of one rank. Sizes that are not plain ints are compared by identity.
    static bool same_sizes(PyObject* shape, PyObject* other) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
            PyObject *size = PyTuple_GET_ITEM(shape, i), *other_size = PyTuple_GET_ITEM(other, i);
            if (size == other_size) continue;
            if (!PyLong_CheckExact(size) || !PyLong_CheckExact(other_size)) return false;
            const int equal = PyObject_RichCompareBool(size, other_size, Py_EQ);
            check(equal);
            if (equal == 0) return false;
        }
        return true;
    }

    Ref shape_;  // a tuple
    bool rank_is_enough_ = false;
};

// A leaf as a visitor sees it. Records what is read, for the reuse key.
class Leaf {
  public:
    Leaf(PyObject* object, const automata::LazyDfa& dfa, const TreePath& path, ShapeReader& shapes)
        : object_(object), dfa_(dfa), path_(path), shapes_(shapes) {}
    Leaf(const Leaf&) = delete;
    Leaf& operator=(const Leaf&) = delete;

    // At the leaf's path. Its state is compared besides the key.
    const automata::LazyDfa& dfa() const { return dfa_; }
    // The length of the shape; 0 without one.
    Py_ssize_t rank() {
        note(Read::kRank);
        return ShapeReader::rank_of(object_, read_shape());
    }
    // Empty if the leaf has none.
    const Ref& shape() {
        note(Read::kShape);
        return read_shape();
    }
    PyObject* object() {
        note(Read::kMore);
        return object_;
    }
    const TreePath& path() {
        note(Read::kMore);
        return path_;
    }

    // Of all reads so far; empty if they are more than a shape, which has to be a tuple in a slot.
    ReuseKey reuse_key() const {
        const bool is_more = read_ == Read::kNothing || read_ == Read::kMore;
        if (is_more || !shape_ || shapes_.peek(object_) != shape_.get()) return {};
        if (!PyTuple_CheckExact(shape_.get())) return {};
        return {shape_, read_ == Read::kRank};
    }

  private:
    enum class Read : std::uint8_t { kNothing, kRank, kShape, kMore };

    void note(Read read) { read_ = std::max(read_, read); }
    const Ref& read_shape() {
        if (!has_shape_read_) shape_ = shapes_.read(object_);
        has_shape_read_ = true;
        return shape_;
    }

    PyObject* object_;  // borrowed
    const automata::LazyDfa& dfa_;
    const TreePath& path_;
    ShapeReader& shapes_;
    Ref shape_;
    bool has_shape_read_ = false;
    Read read_ = Read::kNothing;
};

struct Visited {
    Ref answer;
    ReuseKey reuse_key{};  // empty: the answer must not be reused
};

class LeafVisitor {
  public:
    virtual Visited visit(Leaf& leaf) = 0;

  protected:
    ~LeafVisitor() = default;
};

}  // namespace shardrules::pytree
