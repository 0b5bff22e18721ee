// Memo: (DFA state, key) -> DFA state after the key, since "kernel" comes back thousands of times.
// A hash table with one entry per slot, which uses the hash that a dict key has anyway; a hit
// compares texts, or addresses if the key is one and the same object. Grows to a bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tree_path.hpp"

namespace shardrules::pytree {

class StepMemo {
  public:
    using StateId = automata::LazyDfa::StateId;
    struct Step {
        Ref key;
        std::uint64_t epoch = 0;
        StateId from = 0, to = 0;
        // After the separator that follows the key, once known.
        StateId below = automata::LazyDfa::kNoState;
    };

    // Does dfa.enter() with the text of the path's last key. Returns its entry, valid until the
    // next call, or null.
    Step* enter(automata::LazyDfa& dfa, const TreePath& path) {
        const Key& key = path.last();
        const StateId from = dfa.position();
        if (from == automata::LazyDfa::kNoState) [[unlikely]] {
            if (dfa.forgotten()) dfa.replay(text_of(path.text_before_last().get()));
            return dfa.enter(KeyText(key).text()), nullptr;
        }
        if (key.object == nullptr || !PyUnicode_CheckExact(key.object))
            return dfa.enter(KeyText(key).text()), nullptr;
        // A long name, as in a flat checkpoint, hardly comes back, but begins like the last one.
        if (PyUnicode_GET_LENGTH(key.object) > kLongest)
            return dfa.enter_like_last(text_of(key.object)), nullptr;
        if (dfa.decided()) return dfa.enter(from), nullptr;
        Step& step = slot(from, key.object);
        const std::uint64_t epoch = dfa.epoch();
        if (step.from == from && step.epoch == epoch && step.key &&
            same_key(step.key.get(), key.object)) {
            dfa.enter(step.to);
            return &step;
        }
        dfa.enter(text_of(key.object));
        if (dfa.epoch() != epoch || dfa.position() == automata::LazyDfa::kNoState) return nullptr;
        return remember({Ref::borrow(key.object), epoch, from, dfa.position()});
    }

  private:
    static constexpr std::size_t kFirst = 16, kMost = 1024;  // slots
    static constexpr Py_ssize_t kLongest = 32;

    Step& slot(StateId from, PyObject* key) {
        const auto hash = static_cast<std::size_t>(hash_of(key));
        return slots_[(hash ^ (from * std::size_t{0x9E3779B1})) & (slots_.size() - 1)];
    }

    Step* remember(Step new_step) {
        if (++remembered_ > slots_.size() / 2 && slots_.size() < kMost) {
            std::vector<Step> before = std::exchange(slots_, std::vector<Step>(slots_.size() * 4));
            for (Step& step : before)
                if (step.key) std::swap(slot(step.from, step.key.get()), step);
        }
        Step& step = slot(new_step.from, new_step.key.get());
        step = std::move(new_step);
        return &step;
    }

    std::vector<Step> slots_{kFirst};
    std::size_t remembered_ = 0;
};

}  // namespace shardrules::pytree
