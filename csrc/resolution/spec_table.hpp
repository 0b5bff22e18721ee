// The specs of a rule list: one object per (rule, rank), made by Python when first needed and
// shared by all leaves. A look-up is O(1). Guarded by the GIL. Knows nothing of what a spec is.
#pragma once

#include <span>
#include <vector>

#include "answers.hpp"

namespace shardrules::resolution {

using pytree::Ref;

class SpecTable final : public Answers {
  public:
    // specs[rule]: its spec, or None if it is not made yet.
    // lengths[rule]: the entries of its spec; a leaf of at least that rank gets the full spec.
    // make(rule, entries): the spec with so many entries; None if it cannot be applied to such a
    // leaf.
    SpecTable(std::span<const Ref> specs, std::span<const Py_ssize_t> lengths, Ref make);

    std::size_t rule_count() const override { return rows_.size(); }

    Answer get(automata::RuleId rule, pytree::Leaf&, Py_ssize_t rank) override {
        const Row& row = rows_[rule];
        const bool truncated = rank < row.length;
        const Py_ssize_t entries = truncated ? rank : row.length;
        const Ref& slot = specs_[row.start + static_cast<std::size_t>(entries)];
        return {slot ? slot : Ref::borrow(make(rule, entries)), truncated};
    }

    // For the garbage collector.
    int traverse(visitproc visit, void* arg) const;
    void clear();

  private:
    struct Row {
        std::size_t start;
        Py_ssize_t length;
    };
    PyObject* make(automata::RuleId rule, Py_ssize_t entries);

    std::vector<Row> rows_;
    std::vector<Ref> specs_;
    Ref make_;
};

}  // namespace shardrules::resolution
