#include "tree_path.hpp"

#include <charconv>

namespace shardrules::pytree {
namespace {

constexpr std::size_t kShownKeys = 16;

Ref key_object(const Key& key) {
    if (key.object == nullptr) return Ref::checked(PyUnicode_FromFormat("%zd", key.index));
    return Ref::checked(PyObject_Str(key.object));
}

Ref join(const Ref& separator, const automata::Stack<Key>& keys, std::size_t count) {
    const Ref texts = Ref::checked(PyList_New(0));
    for (std::size_t i = 0; i < count; ++i)
        check(PyList_Append(texts.get(), key_object(keys[i]).get()));
    return Ref::checked(PyUnicode_Join(separator.get(), texts.get()));
}

}  // namespace

KeyText::KeyText(const Key& key) {
    if (key.object == nullptr) {
        const auto written = std::to_chars(digits_, digits_ + sizeof digits_, key.index);
        text_ = {digits_, static_cast<std::size_t>(written.ptr - digits_), 1};
    } else if (PyUnicode_CheckExact(key.object)) {
        text_ = text_of(key.object);
    } else {
        made_ = Ref::checked(PyObject_Str(key.object));
        text_ = text_of(made_.get());
    }
}

Ref TreePath::text() const { return join(style_.separator, keys_, keys_.size()); }

Ref TreePath::text_before_last() const {
    const Ref parents = join(style_.separator, keys_, keys_.size() - 1);
    return Ref::checked(PyUnicode_Concat(parents.get(), style_.separator.get()));
}

Ref TreePath::shown() const { return join(style_.shown_separator, keys_, keys_.size()); }

Ref TreePath::shown_briefly() const {
    if (keys_.size() <= kShownKeys) return shown();
    const Ref front = join(style_.shown_separator, keys_, kShownKeys);
    return Ref::checked(PyUnicode_FromFormat("%U%U... (%zu keys deep)", front.get(),
                                             style_.shown_separator.get(), keys_.size()));
}

}  // namespace shardrules::pytree
