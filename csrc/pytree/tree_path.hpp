// The path of a walk: the keys from the root down, as objects or indices. A push or pop costs a few
// instructions; the path's text is built when it is needed.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "automata/lazy_dfa.hpp"
#include "ref.hpp"

namespace shardrules::pytree {

// How the texts of keys become the text of a path.
struct PathStyle {
    Ref separator;        // between keys, for rules
    Ref shown_separator;  // between keys, for people
    bool keystr = false;  // a key's text is as jax.tree_util.keystr has it, instead of its str()
    Ref hidden_key{};     // left out if it is the key of a node's only child, a leaf; or empty
};

// A dict key or attribute name (any object, whose str() is the text), or a sequence index.
struct Key {
    PyObject* object = nullptr;  // borrowed
    Py_ssize_t index = 0;        // without an object
    bool is_attribute = false;
};

// The text of a key, valid as long as this object.
class KeyText {
  public:
    explicit KeyText(const Key& key);
    KeyText(const KeyText&) = delete;
    KeyText& operator=(const KeyText&) = delete;
    const automata::Text& text() const { return text_; }

  private:
    Ref made_;
    char digits_[20]{};
    automata::Text text_{};
};

inline automata::Text text_of(PyObject* unicode) {  // an exact or derived str
    return {PyUnicode_DATA(unicode), static_cast<std::size_t>(PyUnicode_GET_LENGTH(unicode)),
            static_cast<int>(PyUnicode_KIND(unicode))};
}

// Of an exact str; a dict key has it already.
inline Py_hash_t hash_of(PyObject* unicode) {
    const Py_hash_t known = reinterpret_cast<PyASCIIObject*>(unicode)->hash;
    return known != -1 ? known : PyObject_Hash(unicode);
}

// Whether two keys are the same object, or str of the same text.
inline bool same_key(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (!PyUnicode_CheckExact(a) || !PyUnicode_CheckExact(b) || hash_of(a) != hash_of(b))
        return false;
    const automata::Text text = text_of(a), other = text_of(b);
    const std::size_t bytes = text.length * static_cast<std::size_t>(text.width);
    return text.length == other.length && text.width == other.width &&
           std::memcmp(text.data, other.data, bytes) == 0;
}

class TreePath {
  public:
    explicit TreePath(const PathStyle& style) : style_(style) {}
    TreePath(const TreePath&) = delete;
    TreePath& operator=(const TreePath&) = delete;
    ~TreePath() {
        while (!keys_.empty()) pop();
    }
    // Owns the key: after an error the path is written when the frames of the walk are gone.
    void push(const Key& key) {
        keys_.push_back(key);  // may fail
        Py_XINCREF(key.object);
    }
    void pop() {
        PyObject* object = keys_.back().object;
        keys_.pop_back();
        Py_XDECREF(object);
    }
    std::size_t depth() const { return keys_.size(); }
    // The texts of the keys, joined by the separator, as rules match it.
    Ref text() const;
    // The same before the last key, including the separator.
    Ref text_before_last() const;
    const Key& last() const { return keys_.back(); }
    // As people read it.
    Ref shown() const;
    // The same, shortened, for notes on errors in deep trees.
    Ref shown_briefly() const;

  private:
    const PathStyle& style_;
    automata::Stack<Key> keys_;
};

}  // namespace shardrules::pytree
