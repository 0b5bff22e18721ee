// Memo of a walk: (DFA state, keys, reuse key of each leaf) -> output dict. Correct because a
// visitor's reuse key contains everything it read besides the state (leaf_visitor.hpp). It pays
// because the blocks of a model repeat: comparing a block with the last one in its state and
// copying that one's output is cheaper than walking it and filling a new dict. One entry per state,
// up to a bound. Runs no Python code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "leaf_visitor.hpp"
#include "tree_path.hpp"

namespace shardrules::pytree {

// A walked dict of leaves and of other such dicts: its keys, and the reuse key and answer of each
// leaf.
class SmallDict : public std::enable_shared_from_this<SmallDict> {
  public:
    static constexpr std::size_t kMostKeys = 8;
    // Up to there a new dict with inserted keys is cheaper than a copy whose values are
    // overwritten.
    static constexpr std::size_t kMostInserted = 3;
    // The levels of a copy are not counted against the bounds of the walk's depth, so it is made
    // far above them.
    static constexpr std::size_t kDeepest = 64;

    // Without a reuse key, this dict cannot be reused.
    void add_leaf(PyObject* key, const ReuseKey& reuse_key, const Ref& answer) {
        is_reusable_ = is_reusable_ && reuse_key;
        if (add(key)) children_.push_back({Ref::borrow(key), reuse_key, answer, nullptr});
    }
    // Null: a dict that cannot be reused.
    void add_dict(PyObject* key, const SmallDict* dict) {
        is_reusable_ = is_reusable_ && dict != nullptr && dict->levels_ < kMostLevels;
        if (!is_reusable_) return;
        levels_ = std::max(levels_, dict->levels_ + 1);
        keys_ += dict->keys_;
        if (add(key))
            children_.push_back(
                {Ref::borrow(key), {}, Ref::borrow(Py_None), dict->shared_from_this()});
    }
    void add_other() { is_reusable_ = false; }
    // Whether it can be reused, from what has been added so far.
    bool is_reusable() const { return is_reusable_; }

    // Whether a walk of `dict` from the same state would return this answer. False if unsure.
    bool matches(PyObject* dict, const ShapeReader& shapes) const {
        if (!PyDict_CheckExact(dict)) return false;
        if (static_cast<std::size_t>(PyDict_GET_SIZE(dict)) != children_.size()) return false;
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t at = 0;
        for (const Child& child : children_)
            if (!PyDict_Next(dict, &at, &key, &value) || !same_key(child.key.get(), key) ||
                !(child.dict ? child.dict->matches(value, shapes)
                             : child.reuse_key.fits(value, shapes)))
                return false;
        return true;
    }

    // A new output dict. It is never copied from one that users have: a node's unflatten function
    // may change the dicts that it gets.
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
    // A dict that differs only in its last leaf costs one useless comparison per level; hence the
    // bounds.
    static constexpr std::size_t kMostLevels = 4, kMostKeysInAll = 48;

    struct Child {
        Ref key;
        ReuseKey reuse_key;  // of a leaf
        Ref answer;          // of a leaf
        std::shared_ptr<const SmallDict> dict;
    };

    bool add(PyObject* key) {
        is_reusable_ = is_reusable_ && PyUnicode_CheckExact(key) && ++keys_ <= kMostKeysInAll;
        return is_reusable_;
    }
    Ref answers() const {
        Ref out = Ref::checked(PyDict_New());
        for (const Child& child : children_)
            check(PyDict_SetItem(out.get(), child.key.get(), child.answer.get()));
        return out;
    }

    bool is_reusable_ = true;
    std::size_t levels_ = 1, keys_ = 0;  // of this dict and those in it
    std::vector<Child> children_;
    // The output dict to copy, with None for each dict in it; made on first use.
    mutable Ref answers_;
};

class SmallDicts {
  public:
    using StateId = automata::LazyDfa::StateId;

    // The entry of the automaton's state if the dict matches it; else null. Valid until remember().
    const SmallDict* find(PyObject* dict, const automata::LazyDfa& dfa, const ShapeReader& shapes) {
        const StateId state = dfa.position();
        if (state >= entries_.size()) return nullptr;
        Entry& entry = entries_[state];
        if (!entry.dict || entry.epoch != dfa.epoch()) return nullptr;
        const bool is_match = entry.dict->matches(dict, shapes);
        entry.misses = is_match ? 0 : entry.misses + 1;
        return is_match ? entry.dict.get() : nullptr;
    }

    // Whether to remember the next dict in the automaton's state: of dicts that keep differing,
    // only one in eight.
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
