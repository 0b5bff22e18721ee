// Remembers where the automaton gets to from a state over a key: "kernel" comes back thousands of
// times. A fixed table, one entry per slot, found through the hash that a dict key carries anyway;
// a hit costs a comparison of texts, which for one and the same object is one of addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tree_path.hpp"

namespace shardrules::pytree {

class StepMemo {
  public:
    // dfa.enter() of the text of the path's last key.
    void enter(automata::LazyDfa& dfa, const TreePath& path) {
        const Key& key = path.last();
        const automata::LazyDfa::StateId from = dfa.position();
        if (from == automata::LazyDfa::kNoState) [[unlikely]] {
            if (dfa.forgotten()) dfa.replay(text_of(path.text_before_last().get()));
            return dfa.enter(KeyText(key).text());
        }
        if (key.object == nullptr || !PyUnicode_CheckExact(key.object))
            return dfa.enter(KeyText(key).text());
        const automata::Text text = text_of(key.object);
        // A long name, as in a flat checkpoint, is hardly met twice, but begins like the last one.
        if (text.length > kLongest) return dfa.enter_like_last(text);
        if (dfa.decided()) return dfa.enter(from);
        Slot& slot = slots_[index(from, PyObject_Hash(key.object))];
        const std::uint64_t epoch = dfa.epoch();
        if (slot.from == from && slot.epoch == epoch && same_text(slot, key.object, text))
            return dfa.enter(slot.to);
        dfa.enter(text);
        if (dfa.epoch() == epoch && dfa.position() != automata::LazyDfa::kNoState)
            slot = {Ref::borrow(key.object), epoch, from, dfa.position()};
    }

  private:
    struct Slot {
        Ref key;
        std::uint64_t epoch = 0;
        automata::LazyDfa::StateId from = 0, to = 0;
    };
    static constexpr std::size_t kSlots = 1024;
    static constexpr std::size_t kLongest = 32;

    static std::size_t index(automata::LazyDfa::StateId from, Py_hash_t hash) {
        return (static_cast<std::size_t>(hash) ^ (from * std::size_t{0x9E3779B1})) % kSlots;
    }

    static bool same_text(const Slot& slot, PyObject* key, const automata::Text& text) {
        if (slot.key.get() == key) return true;
        if (!slot.key) return false;
        const automata::Text known = text_of(slot.key.get());
        const std::size_t bytes = text.length * static_cast<std::size_t>(text.width);
        return known.length == text.length && known.width == text.width &&
               std::memcmp(known.data, text.data, bytes) == 0;
    }

    std::array<Slot, kSlots> slots_;
};

}  // namespace shardrules::pytree
