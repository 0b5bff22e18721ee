// Where a walk stands: the keys from the root to here, as objects, indices or texts. Pushing and
// popping cost a few instructions; the path's text is built only when someone asks for it.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "automata/lazy_dfa.hpp"
#include "ref.hpp"

namespace shardrules::pytree {

// How the texts of keys become the text of a path.
struct PathStyle {
    Ref separator;        // joins them, for the rules
    Ref shown_separator;  // joins them for people
    bool keystr = false;  // a key's text is as jax.tree_util.keystr has it, instead of its str()
    Ref hidden_key{};     // left out where a node's only child, a leaf, has it; or empty
};

// A dict key or attribute name (any object, whose str() is the text), or a sequence index.
struct Key {
    PyObject* object = nullptr;  // borrowed
    Py_ssize_t index = 0;        // without an object
    bool is_attribute = false;
};

// The text of one key, valid as long as this object.
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

// Of an exact str; a key of a dict knows it already.
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
    // Keeps the key alive: after an error the path is told, when the frames that knew it are gone.
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
    // The keys' texts, joined by the separator: what rules meet.
    Ref text() const;
    // The same up to the last key: what has been read where the walk is about to go down.
    Ref text_before_last() const;
    const Key& last() const { return keys_.back(); }
    // What people see.
    Ref shown() const;
    // The same, but short: for notes on errors in trees of any depth.
    Ref shown_briefly() const;

  private:
    const PathStyle& style_;
    automata::Stack<Key> keys_;
};

}  // namespace shardrules::pytree
