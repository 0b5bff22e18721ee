#include "spec_table.hpp"

#include <stdexcept>

namespace shardrules::resolution {

SpecTable::SpecTable(std::span<const Ref> specs, std::span<const Py_ssize_t> lengths, Ref make)
    : make_(std::move(make)) {
    if (specs.size() != lengths.size()) throw std::invalid_argument("not one length per spec");
    rows_.reserve(lengths.size());
    for (std::size_t rule = 0; rule < lengths.size(); ++rule) {
        const Py_ssize_t length = lengths[rule];
        if (length < 0) throw std::invalid_argument("a spec has no negative length");
        rows_.push_back({specs_.size(), length});
        specs_.resize(specs_.size() + static_cast<std::size_t>(length) + 1);
        if (specs[rule].get() != Py_None) specs_.back() = specs[rule];
    }
}

PyObject* SpecTable::make(automata::RuleId rule, Py_ssize_t entries) {
    Ref made = Ref::checked(PyObject_CallFunction(make_.get(), "In", rule, entries));
    if (made.get() == Py_None) return nullptr;
    // Python code may have filled the slot meanwhile.
    Ref& slot = specs_[rows_[rule].start + static_cast<std::size_t>(entries)];
    if (!slot) slot = std::move(made);
    return slot.get();
}

int SpecTable::traverse(visitproc visit, void* arg) const {
    Py_VISIT(make_.get());
    for (const Ref& spec : specs_) Py_VISIT(spec.get());
    return 0;
}

void SpecTable::clear() {
    make_ = Ref::borrow(Py_None);  // not null: a later call is a TypeError
    for (Ref& spec : specs_) spec = {};
}

}  // namespace shardrules::resolution
