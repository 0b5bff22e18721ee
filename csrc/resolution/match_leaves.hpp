// The decision for one leaf: whether it needs a rule, and which answer it gets; and lists of the leaves
// that no rule matches, or too many. The choices are the dialect's. Reads a leaf's .shape and nothing
// else.
#pragma once

#include <vector>

#include "answers.hpp"
#include "choices.hpp"
#include "match_modes.hpp"
#include "searched_rules.hpp"
#include "shape_reader.hpp"
#include "pytree/walk.hpp"

namespace shardrules::resolution {

using pytree::LeafPlace;
using pytree::LeafVisitor;
using pytree::Ref;

struct MatchOptions {
    bool strict;           // look at shapes: scalars, min_size, truncation
    PyObject* min_size;    // a number; leaves with fewer elements are replicated
    PyObject* replicated;  // what a leaf gets that needs no rule, or is too small
    PyObject* unmatched;   // what a leaf gets that no rule matches; None: it is listed
    PyObject* ambiguous;   // what a leaf gets that several match, where only one may; None: it is listed
    bool record_events;
};

// Leaves to report, in the order of the walk: how many, and the first of them.
struct Listing {
    Py_ssize_t count = 0;
    Ref shown = Ref::checked(PyList_New(0));  // (path, what there is to say of it)
};

class MatchLeaves final : public LeafVisitor {
  public:
    static constexpr Py_ssize_t kUnmatchedShown = 10, kMisfitsShown = 20;

    MatchLeaves(Answers& answers, const std::vector<SearchedRule>& searched, const MatchModes& modes,
                const Choices& choices, const MatchOptions& options);
    Ref visit(PyObject* leaf, const LeafPlace& place) override;
    // The rank, an int, or the shape.
    Ref last_kind() const override;
    bool is_of_kind(PyObject* leaf, PyObject* kind) const override;

    const Listing& unmatched() const { return unmatched_; }  // shape, or None
    // (rules, shape): several of them match, where only one may.
    const Listing& ambiguous() const { return ambiguous_; }
    const Listing& misfits() const { return misfits_; }  // (rule, shape): it cannot be applied
    // With record_events: the truncated spec, or None when the leaf was smaller than min_size.
    const Listing& events() const { return events_; }

  private:
    static constexpr automata::RuleId kSeveral = automata::kNoRule - 1;

    bool needs_no_rule(PyObject* shape) const;
    bool too_small(PyObject* shape) const;
    automata::RuleId decide(const LeafPlace& place);
    Ref undecided(automata::RuleId why, const LeafPlace& place, const Ref& shape);
    void report(Listing& listing, Py_ssize_t most, const LeafPlace& place, const Ref& what) const;

    Answers& answers_;
    const std::vector<SearchedRule>& searched_;
    const MatchModes& modes_;
    const Choices& choices_;
    MatchOptions options_;
    bool has_min_size_;
    bool sizes_first_, size_last_;  // looked at before and after the match
    ShapeReader shapes_;
    Ref last_shape_;
    DependsOn last_depends_on_ = DependsOn::kMore;
    Listing unmatched_, ambiguous_, misfits_, events_;
    std::vector<automata::RuleId> matches_;  // of the leaf at hand, with choices_.unique
};

}  // namespace shardrules::resolution
