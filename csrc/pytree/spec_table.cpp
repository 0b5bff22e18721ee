#include "spec_table.hpp"

#include <stdexcept>

namespace shardrules::pytree {

SpecTable::SpecTable(std::span<const Py_ssize_t> lengths, Ref make) : make_(std::move(make)) {
    std::size_t start = 0;
    rows_.reserve(lengths.size());
    for (const Py_ssize_t length : lengths) {
        if (length < 0) throw std::invalid_argument("a spec has no negative length");
        rows_.push_back({start, length});
        start += static_cast<std::size_t>(length) + 1;
    }
    specs_.resize(start);
}

PyObject* SpecTable::make(automata::RuleId rule, Py_ssize_t entries) {
    Ref made = Ref::checked(PyObject_CallFunction(make_.get(), "In", rule, entries));
    // Making it ran Python code, which may have come here first.
    Ref& slot = specs_[rows_[rule].start + static_cast<std::size_t>(entries)];
    if (!slot) slot = std::move(made);
    return slot.get();
}

}  // namespace shardrules::pytree
