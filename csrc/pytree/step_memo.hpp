// Remembers where the automaton gets to from a state over a key object: the same interned "kernel"
// comes back thousands of times. A fixed table, one entry per slot; a hit costs one comparison.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tree_path.hpp"

namespace shardrules::pytree {

class StepMemo {
  public:
    // dfa.enter() of the key's text.
    void enter(automata::LazyDfa& dfa, const Key& key) {
        const automata::LazyDfa::StateId from = dfa.position();
        if (dfa.decided()) return dfa.enter(from);
        if (key.object == nullptr || !PyUnicode_CheckExact(key.object))
            return dfa.enter(KeyText(key).text());
        Slot& slot = slots_[index(from, key.object)];
        if (slot.from == from && slot.key.get() == key.object && slot.epoch == dfa.epoch())
            return dfa.enter(slot.to);
        const std::uint64_t epoch = dfa.epoch();
        dfa.enter(text_of(key.object));
        if (dfa.epoch() == epoch)
            slot = {Ref::borrow(key.object), epoch, from, dfa.position()};
    }

  private:
    struct Slot {
        Ref key;  // owned, so that no other object can have its address
        std::uint64_t epoch = 0;
        automata::LazyDfa::StateId from = 0, to = 0;
    };
    static constexpr std::size_t kSlots = 1024;

    static std::size_t index(automata::LazyDfa::StateId from, PyObject* key) {
        const auto address = reinterpret_cast<std::uintptr_t>(key);
        return ((address >> 4) ^ (address >> 14) ^ (from * std::size_t{0x9E3779B1})) % kSlots;
    }

    std::array<Slot, kSlots> slots_;
};

}  // namespace shardrules::pytree
