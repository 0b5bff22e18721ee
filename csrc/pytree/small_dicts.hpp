// Remembers, for a state of the automaton, the last small dict that was walked from there, down to its
// leaves, and what they got. A model's blocks repeat, so the next dict there mostly has the same keys
// and the same kinds of leaves: it gets a copy of the earlier answer, which takes CPython less than
// filling a new dict, and us a comparison instead of a walk. Runs no Python code. One entry per state,
// to a bound.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tree_path.hpp"
#include "walk.hpp"

namespace shardrules::pytree {

// A dict that was walked, of leaves and of other such dicts: its keys, what the answers depend on, and
// the answers.
class SmallDict : public std::enable_shared_from_this<SmallDict> {
  public:
    static constexpr std::size_t kMostKeys = 8;
    // Up to there a new dict with inserted keys is cheaper than a copy whose values are overwritten.
    static constexpr std::size_t kMostInserted = 3;

    // An empty kind: the answer depends on more.
    void add_leaf(PyObject* key, Ref kind, const Ref& answer) {
        known_ = known_ && kind;
        if (add(key)) children_.push_back({Ref::borrow(key), std::move(kind), answer, nullptr});
    }
    // Null: it is not known.
    void add_dict(PyObject* key, const SmallDict* dict) {
        known_ = known_ && dict != nullptr && dict->levels_ < kMostLevels;
        if (!known_) return;
        levels_ = std::max(levels_, dict->levels_ + 1);
        keys_ += dict->keys_;
        if (add(key))
            children_.push_back({Ref::borrow(key), {}, Ref::borrow(Py_None), dict->shared_from_this()});
    }
    void add_other() { known_ = false; }
    // Whether it may be remembered, as far as it has been walked.
    bool known() const { return known_; }

    bool is_like(PyObject* dict, LeafVisitor& visitor) const {
        if (!PyDict_CheckExact(dict)) return false;
        if (static_cast<std::size_t>(PyDict_GET_SIZE(dict)) != children_.size()) return false;
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t at = 0;
        for (const Child& child : children_)
            if (!PyDict_Next(dict, &at, &key, &value) || !same_key(child.key.get(), key) ||
                !(child.dict ? child.dict->is_like(value, visitor)
                             : visitor.is_of_kind(value, child.kind.get())))
                return false;
        return true;
    }

    // The answer for a dict that is like this one. What is copied is nobody else's: a node's own
    // unflatten function may change the dicts that it gets.
    Ref answer() const {
        const bool is_copied = levels_ == 1 || children_.size() > kMostInserted;
        if (is_copied && !answers_) answers_ = answers();
        Ref out = Ref::checked(is_copied ? PyDict_Copy(answers_.get()) : PyDict_New());
        if (levels_ == 1) return out;
        for (const Child& child : children_)
            if (child.dict)
                check(PyDict_SetItem(out.get(), child.key.get(), child.dict->answer().get()));
            else if (!is_copied)
                check(PyDict_SetItem(out.get(), child.key.get(), child.answer.get()));
        return out;
    }

  private:
    // What is like the earlier one but for its last leaf is compared in vain on each level.
    static constexpr std::size_t kMostLevels = 4, kMostKeysInAll = 48;

    struct Child {
        Ref key;
        Ref kind;    // of a leaf
        Ref answer;  // of a leaf
        std::shared_ptr<const SmallDict> dict;
    };

    bool add(PyObject* key) {
        known_ = known_ && PyUnicode_CheckExact(key) && ++keys_ <= kMostKeysInAll;
        return known_;
    }
    Ref answers() const {
        Ref out = Ref::checked(PyDict_New());
        for (const Child& child : children_)
            check(PyDict_SetItem(out.get(), child.key.get(), child.answer.get()));
        return out;
    }

    bool known_ = true;
    std::size_t levels_ = 1, keys_ = 0;  // of this dict and those in it
    std::vector<Child> children_;
    mutable Ref answers_;  // with None for each dict; made when it is needed first
};

class SmallDicts {
  public:
    using StateId = automata::LazyDfa::StateId;

    // What is remembered for the state where the automaton stands, if the dict is like it; else null.
    // Valid until something is remembered.
    const SmallDict* like(PyObject* dict, const automata::LazyDfa& dfa, LeafVisitor& visitor) {
        const StateId state = dfa.position();
        if (state >= entries_.size()) return nullptr;
        Entry& entry = entries_[state];
        if (!entry.dict || entry.epoch != dfa.epoch()) return nullptr;
        const bool is_like = entry.dict->is_like(dict, visitor);
        entry.misses = is_like ? 0 : entry.misses + 1;
        return is_like ? entry.dict.get() : nullptr;
    }

    // Whether to remember the next dict there: only some where each is unlike the one before.
    bool wants(const automata::LazyDfa& dfa) const {
        const StateId state = dfa.position();
        if (state >= entries_.size()) return state < kMostStates;
        return entries_[state].misses < 4 || entries_[state].misses % 8 == 0;
    }

    const SmallDict* remember(SmallDict dict, const automata::LazyDfa& dfa) {
        const StateId state = dfa.position();
        if (state >= kMostStates) return nullptr;
        if (state >= entries_.size()) entries_.resize(state + std::size_t{1});
        Entry& entry = entries_[state];
        entry.dict = std::make_shared<const SmallDict>(std::move(dict));
        entry.epoch = dfa.epoch();
        return entry.dict.get();
    }

  private:
    static constexpr StateId kMostStates = 1024;  // kNoState is above

    struct Entry {
        std::shared_ptr<const SmallDict> dict{};
        std::uint64_t epoch = 0;
        std::uint32_t misses = 0;
    };
    std::vector<Entry> entries_;
};

}  // namespace shardrules::pytree
