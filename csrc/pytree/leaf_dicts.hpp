// Remembers, for a state of the automaton, the last small dict of leaves that was walked from there and
// what came out. A model's blocks repeat, so the next one there mostly has the same keys and the same
// kinds of leaves: it gets a copy of the earlier output, which takes CPython less than filling a new
// dict, and us a comparison instead of a walk. Runs no Python code. One entry per state, to a bound.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tree_path.hpp"
#include "walk.hpp"

namespace shardrules::pytree {

// A dict that is walked: its keys, and what the answer for each of them depends on.
class LeafDict {
  public:
    static constexpr std::size_t kMostKeys = 3;

    // An empty kind: this is no dict of leaves, or an answer depends on more.
    void add(PyObject* key, Ref kind) {
        known_ = known_ && kind && PyUnicode_CheckExact(key) && size_ < kMostKeys;
        if (!known_) return;
        keys_[size_] = Ref::borrow(key);
        kinds_[size_++] = std::move(kind);
    }
    // Whether it may be remembered, as far as it has been walked.
    bool known() const { return known_; }
    bool is_like(PyObject* dict, LeafVisitor& visitor) const {
        if (static_cast<std::size_t>(PyDict_GET_SIZE(dict)) != size_) return false;
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t at = 0;
        for (std::size_t i = 0; i < size_; ++i)
            if (!PyDict_Next(dict, &at, &key, &value) || !same_key(keys_[i].get(), key) ||
                !visitor.is_of_kind(value, kinds_[i].get()))
                return false;
        return true;
    }

  private:
    bool known_ = true;
    std::size_t size_ = 0;
    std::array<Ref, kMostKeys> keys_, kinds_;
};

class LeafDicts {
  public:
    using StateId = automata::LazyDfa::StateId;

    // A copy of what came out of a dict like this one, in the state where the automaton stands; or empty.
    Ref like(PyObject* dict, const automata::LazyDfa& dfa, LeafVisitor& visitor) const {
        const StateId state = dfa.position();
        if (state >= entries_.size()) return {};
        const Entry& entry = entries_[state];
        if (!entry.out || entry.epoch != dfa.epoch() || !entry.dict.is_like(dict, visitor)) return {};
        return Ref::checked(PyDict_Copy(entry.out.get()));
    }

    void remember(LeafDict dict, const automata::LazyDfa& dfa, const Ref& out) {
        const StateId state = dfa.position();
        if (state >= kMostStates) return;
        if (state >= entries_.size()) entries_.resize(state + std::size_t{1});
        entries_[state] = {std::move(dict), dfa.epoch(), out};
    }

  private:
    static constexpr StateId kMostStates = 1024;  // kNoState is above

    struct Entry {
        LeafDict dict{};
        std::uint64_t epoch = 0;
        Ref out{};
    };
    std::vector<Entry> entries_;
};

}  // namespace shardrules::pytree
