#include "walk.hpp"

#include <optional>

#include "keystr_texts.hpp"
#include "node_types.hpp"
#include "registry.hpp"
#include "small_dicts.hpp"
#include "stack_bound.hpp"
#include "step_memo.hpp"

namespace shardrules::pytree {
namespace {

// Turns Python's garbage collector off. A walk allocates thousands of containers and no garbage,
// and with many live objects in the process collections would take several times as long as the
// walk.
class CollectorPause {
  public:
    CollectorPause() : was_enabled_(PyGC_Disable() == 1) {}
    CollectorPause(const CollectorPause&) = delete;
    CollectorPause& operator=(const CollectorPause&) = delete;
    ~CollectorPause() {
        if (was_enabled_) PyGC_Enable();
    }

  private:
    bool was_enabled_;
};

class Walk {
  public:
    Walk(const PathStyle& path_style, automata::LazyDfa& dfa, LeafVisitor& visitor)
        : separator_(text_of(path_style.separator.get())),
          hidden_key_(path_style.hidden_key.get()),
          dfa_(dfa),
          visitor_(visitor),
          path_(path_style) {
        if (path_style.keystr) keystrs_.emplace();
    }

    Ref run(PyObject* tree) {
        try {
            const NodeType& type = types_.of(tree);
            if (type.kind == NodeKind::kLeaf) return leaf(tree);
            separator_waits_ = may_hide_its_key(tree, type);
            return node(tree, type);
        } catch (const PythonError&) {
            note_path();
            throw;
        } catch (const TooDeep& error) {
            PyErr_Format(PyExc_RecursionError, "the tree is nested more than %zu levels deep%s",
                         path_.depth(), error.more);
            note_path();
            throw PythonError{};
        }
    }

  private:
    // Becomes a RecursionError when the stack is unwound: at the bottom Python could not make one.
    struct TooDeep {
        const char* more = "";
    };

    Ref leaf(PyObject* object) {
        Leaf leaf(object, dfa_, path_, shapes_);
        Visited visited = visitor_.visit(leaf);
        last_reuse_key_ = std::move(visited.reuse_key);
        return std::move(visited.answer);
    }

    // A child of the node that the walk is in.
    Ref child(const Key& key, PyObject* object) {
        if (!keystrs_) return descend(key, object);
        return descend({keystrs_->of(key).get()}, object);
    }

    // Leaves the path as it is on errors, for the note.
    Ref descend(const Key& key, PyObject* object) {
        if (separator_waits_) {
            if (is_hidden(key, object)) return leaf(object);
            read_separator();
        }
        signals_.tick();
        path_.push(key);
        StepMemo::Step* const step = steps_.enter(dfa_, path_);
        const NodeType& type = types_.of(object);
        Ref result;
        if (type.kind == NodeKind::kLeaf) {
            result = leaf(object);
        } else {
            separator_waits_ = may_hide_its_key(object, type);
            if (!separator_waits_) pass_separator(step);
            result = node(object, type);
            separator_waits_ = false;
        }
        dfa_.leave();
        path_.pop();
        return result;
    }

    // `step`: the entry of the key before the separator, or null.
    void pass_separator(StepMemo::Step* step) {
        if (step == nullptr) return dfa_.extend(separator_);
        if (step->below != automata::LazyDfa::kNoState) return dfa_.move_to(step->below);
        dfa_.extend(separator_);
        if (step->epoch == dfa_.epoch()) step->below = dfa_.position();
    }

    // The separator is not read yet if the node's only child may have a hidden key, which has no
    // separator.
    bool may_hide_its_key(PyObject* object, const NodeType& type) const {
        if (hidden_key_ == nullptr) return false;
        switch (type.kind) {
            case NodeKind::kDict:
            case NodeKind::kOrderedDict:
            case NodeKind::kDefaultDict: return PyDict_GET_SIZE(object) == 1;
            case NodeKind::kNamedTuple: return PyTuple_GET_SIZE(object) == 1;
            case NodeKind::kRegistered: return !type.record || type.record->keys().size() == 1;
            default: return false;
        }
    }

    bool is_hidden(const Key& key, PyObject* object) {
        return key.object != nullptr && PyUnicode_Check(key.object) &&
               PyUnicode_Compare(key.object, hidden_key_) == 0 &&
               types_.of(object).kind == NodeKind::kLeaf;
    }

    void read_separator() {
        separator_waits_ = false;
        if (path_.depth() != 0) dfa_.extend(separator_);  // none follows the root
    }

    Ref node(PyObject* object, const NodeType& type) {
        if (path_.depth() > kMaxTreeDepth) throw TooDeep{};
        if (stack_.is_reached())
            throw TooDeep{
                ", which is all that the C stack of this thread has room for: "
                "threading.stack_size() gives new threads a larger one"};
        if (Py_EnterRecursiveCall(" while walking a pytree") != 0) {
            PyErr_Clear();
            throw TooDeep{};
        }
        const struct Leave {
            ~Leave() { Py_LeaveRecursiveCall(); }
        } leave{};
        switch (type.kind) {
            case NodeKind::kNone: return Ref::borrow(Py_None);
            case NodeKind::kDict: return dict(object);
            case NodeKind::kOrderedDict: return ordered_dict(object);
            case NodeKind::kDefaultDict: return default_dict(object);
            case NodeKind::kList: return list(object);
            case NodeKind::kTuple: return tuple(object);
            case NodeKind::kNamedTuple: return named_tuple(object, type);
            case NodeKind::kRegistered: return registered(object, type);
            case NodeKind::kLeaf: break;
        }
        return leaf(object);
    }

    Ref dict(PyObject* object) {
        last_dict_ = nullptr;
        if (hidden_key_ != nullptr || path_.depth() > SmallDict::kDeepest ||
            PyDict_GET_SIZE(object) > Py_ssize_t{SmallDict::kMostKeys})
            return new_dict(object, nullptr);
        if (const SmallDict* match = small_dicts_.find(object, dfa_, shapes_)) {
            Ref out = match->answer();
            last_dict_ = match;
            return out;
        }
        if (!small_dicts_.wants(dfa_)) return new_dict(object, nullptr);
        SmallDict walked;
        Ref out = new_dict(object, &walked);
        if (walked.is_reusable()) last_dict_ = small_dicts_.remember(std::move(walked), dfa_);
        return out;
    }

    Ref new_dict(PyObject* object, SmallDict* walked) {
        const bool copied = PyDict_GET_SIZE(object) > Py_ssize_t{SmallDict::kMostInserted};
        Ref out = Ref::checked(copied ? PyDict_Copy(object) : PyDict_New());
        map_values(copied ? out.get() : object, out.get(), walked);
        check_size(PyDict_GET_SIZE(object) == PyDict_GET_SIZE(out.get()), object);
        last_dict_ = nullptr;
        return out;
    }

    Ref default_dict(PyObject* object) {
        const Ref children = Ref::checked(PyDict_Copy(object));
        map_values(children.get(), children.get(), nullptr);
        check_size(PyDict_GET_SIZE(object) == PyDict_GET_SIZE(children.get()), object);
        const Ref factory = Ref::checked(PyObject_GetAttrString(object, "default_factory"));
        return Ref::checked(PyObject_CallFunctionObjArgs(
            reinterpret_cast<PyObject*>(Py_TYPE(object)), factory.get(), children.get(), nullptr));
    }

    // Sets each key of `from` in `to`, which may be the same dict, to the output of its value.
    void map_values(PyObject* from, PyObject* to, SmallDict* walked) {
        PyObject *borrowed_key = nullptr, *borrowed_value = nullptr;
        Py_ssize_t at = 0;
        bool only_str = true;
        for (Py_ssize_t left = PyDict_GET_SIZE(from); left > 0; --left) {
            if (!PyDict_Next(from, &at, &borrowed_key, &borrowed_value)) break;
            const Ref key = Ref::borrow(borrowed_key), value = Ref::borrow(borrowed_value);
            if (only_str && !PyUnicode_CheckExact(key.get())) {
                only_str = false;
                check_sortable(from);
            }
            const Ref result = child({key.get()}, value.get());
            check(PyDict_SetItem(to, key.get(), result.get()));
            if (walked != nullptr && walked->is_reusable())
                add_child(*walked, key.get(), value.get(), result);
        }
    }

    // Adds the child that was walked last.
    void add_child(SmallDict& walked, PyObject* key, PyObject* object, const Ref& result) {
        switch (types_.of(object).kind) {
            case NodeKind::kLeaf: return walked.add_leaf(key, last_reuse_key_, result);
            case NodeKind::kDict: return walked.add_dict(key, last_dict_);
            default: return walked.add_other();
        }
    }

    // JAX sorts the keys of a dict, and refuses one that it cannot sort.
    static void check_sortable(PyObject* dict) {
        const Ref keys = Ref::checked(PyDict_Keys(dict));
        if (PyList_Sort(keys.get()) == 0) return;
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw PythonError{};
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError,
                        "JAX cannot sort the keys of this dict, so it is no pytree: use keys of "
                        "one type");
        throw PythonError{};
    }

    Ref ordered_dict(PyObject* object) {
        // The type's method, which yields pairs; the object may have an attribute of this name.
        auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
        const Ref items = Ref::checked(PyObject_CallMethod(type, "items", "O", object));
        const Ref pairs = Ref::checked(PySequence_List(items.get()));
        Ref out = Ref::checked(PyObject_CallNoArgs(type));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pairs.get()); ++i) {
            PyObject* pair = PyList_GET_ITEM(pairs.get(), i);
            PyObject* key = PyTuple_GET_ITEM(pair, 0);
            const Ref result = child({key}, PyTuple_GET_ITEM(pair, 1));
            check(PyObject_SetItem(out.get(), key, result.get()));
        }
        check_size(PyDict_GET_SIZE(object) == PyList_GET_SIZE(pairs.get()), object);
        return out;
    }

    Ref list(PyObject* object) {
        const Py_ssize_t size = PyList_GET_SIZE(object);
        Ref out = untracked(PyList_New(size));
        for (Py_ssize_t i = 0; i < size; ++i) {
            check_size(PyList_GET_SIZE(object) == size, object);
            const Ref item = Ref::borrow(PyList_GET_ITEM(object, i));
            PyList_SET_ITEM(out.get(), i, child({nullptr, i}, item.get()).release());
        }
        check_size(PyList_GET_SIZE(object) == size, object);
        PyObject_GC_Track(out.get());
        return out;
    }

    Ref tuple(PyObject* object) {
        const Py_ssize_t size = PyTuple_GET_SIZE(object);
        if (size == 0) return Ref::borrow(object);  // there is only one
        Ref out = untracked(PyTuple_New(size));
        for (Py_ssize_t i = 0; i < size; ++i)
            PyTuple_SET_ITEM(out.get(), i,
                             child({nullptr, i}, PyTuple_GET_ITEM(object, i)).release());
        PyObject_GC_Track(out.get());
        return out;
    }

    Ref named_tuple(PyObject* object, const NodeType& type) {
        const Py_ssize_t size = PyTuple_GET_SIZE(object);
        PyObject* fields = type.fields.get();
        if (PyTuple_GET_SIZE(fields) != size) {
            PyErr_Format(PyExc_ValueError, "a %.200s has %zd items but %zd names in _fields",
                         Py_TYPE(object)->tp_name, size, PyTuple_GET_SIZE(fields));
            throw PythonError{};
        }
        const std::size_t base = values_.size();
        for (Py_ssize_t i = 0; i < size; ++i)
            values_.push_back(
                child(attribute_key(PyTuple_GET_ITEM(fields, i)), PyTuple_GET_ITEM(object, i)));
        Ref out;
        if (type.constructor_is_tuple) {
            PyTypeObject* exact = Py_TYPE(object);
            out = Ref::checked(exact->tp_alloc(exact, size));
            for (Py_ssize_t i = 0; i < size; ++i)
                PyTuple_SET_ITEM(out.get(), i, value(base, i).release());
        } else {
            out = Ref::checked(PyObject_CallObject(type.type.get(), tuple_from(base).get()));
        }
        values_.resize(base);
        return out;
    }

    Ref registered(PyObject* object, const NodeType& type) {
        const std::size_t base = values_.size();
        if (!type.record || !type.record->read(object, values_)) return flattened(object, type);
        const std::vector<Ref>& keys = type.record->keys();
        for (std::size_t i = 0; i < keys.size(); ++i) {
            const Ref original = std::move(values_[base + 1 + i]);
            Ref result = child(attribute_key(keys[i].get()), original.get());
            values_[base + 1 + i] = std::move(result);  // the vector may have grown meanwhile
        }
        Ref out = type.record->make(values_.data() + base);
        values_.resize(base);
        return out;
    }

    Ref flattened(PyObject* object, const NodeType& type) {
        const std::size_t base = values_.size();
        const KeyedChildren flat = flatten_one_level(object);
        if (!flat.pairs) {
            PyErr_Format(PyExc_TypeError, "JAX's registry does not flatten %.200s any more",
                         Py_TYPE(object)->tp_name);
            throw PythonError{};
        }
        if (separator_waits_ && PyTuple_GET_SIZE(flat.pairs.get()) != 1) read_separator();
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(flat.pairs.get()); ++i) {
            const Ref pair = key_and_child(object, flat.pairs.get(), i);
            PyObject* entry = PyTuple_GET_ITEM(pair.get(), 0);
            const Ref text = keystrs_ ? Ref::checked(PyObject_Str(entry)) : key_entry_text(entry);
            values_.push_back(descend({text.get()}, PyTuple_GET_ITEM(pair.get(), 1)));
        }
        const Ref children = tuple_from(base);
        values_.resize(base);
        if (!type.unflatten) return with_children(object, children.get());
        return Ref::checked(PyObject_CallFunctionObjArgs(type.unflatten.get(), flat.auxiliary.get(),
                                                         children.get(), nullptr));
    }

    static Key attribute_key(PyObject* name) { return {.object = name, .is_attribute = true}; }

    Ref& value(std::size_t base, Py_ssize_t i) {
        return values_[base + static_cast<std::size_t>(i)];
    }

    // Moves the values from `base` on into a tuple.
    Ref tuple_from(std::size_t base) {
        const auto size = static_cast<Py_ssize_t>(values_.size() - base);
        Ref out = Ref::checked(PyTuple_New(size));
        for (Py_ssize_t i = 0; i < size; ++i)
            PyTuple_SET_ITEM(out.get(), i, value(base, i).release());
        return out;
    }

    // A new list or tuple that is not yet filled, so the garbage collector must not show it to user
    // code.
    static Ref untracked(PyObject* container) {
        Ref out = Ref::checked(container);
        PyObject_GC_UnTrack(container);
        return out;
    }

    static void check_size(bool same_size, PyObject* object) {
        if (same_size) return;
        PyErr_Format(PyExc_RuntimeError, "a %.200s changed size while it was walked",
                     Py_TYPE(object)->tp_name);
        throw PythonError{};
    }

    // Adds a note with the path to the error that is set. If that fails, there is no note.
    void note_path() {
        PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        try {
            const Ref where = path_.shown_briefly();
            const Ref note =
                Ref::checked(PyUnicode_FromFormat("shardrules: at %R in the tree", where.get()));
            Ref::checked(PyObject_CallMethod(value, "add_note", "O", note.get()));
        } catch (const PythonError&) {
            PyErr_Clear();
        }
        PyErr_Restore(type, value, traceback);
    }

    automata::Text separator_;
    PyObject* hidden_key_;          // borrowed; null if there is none
    bool separator_waits_ = false;  // whether the separator after the current node is not read yet
    automata::LazyDfa& dfa_;
    LeafVisitor& visitor_;
    TreePath path_;
    NodeTypes types_;
    ShapeReader shapes_;
    StackBound stack_;
    StepMemo steps_;
    SmallDicts small_dicts_;
    ReuseKey last_reuse_key_;               // of the last visit
    const SmallDict* last_dict_ = nullptr;  // of the last dict, if it was remembered
    SignalChecks signals_;
    std::optional<KeystrTexts> keystrs_;
    std::vector<Ref> values_;  // a stack: the values of the records, namedtuples and flattened
                               // nodes that the walk is in
};

}  // namespace

Ref map_tree(PyObject* tree, const PathStyle& path_style, automata::LazyDfa& dfa,
             LeafVisitor& visitor) {
    const CollectorPause pause;
    return Walk(path_style, dfa, visitor).run(tree);
}

}  // namespace shardrules::pytree
