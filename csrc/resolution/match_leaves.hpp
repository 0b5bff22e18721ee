// The decision for one leaf: whether it needs a rule, and which answer it gets; and lists of the
// leaves that no rule matches, or too many. The choices are the dialect's. Reads a leaf's .shape
// and nothing else.
#pragma once

#include <vector>

#include "answers.hpp"
#include "choices.hpp"
#include "match_modes.hpp"
#include "searched_rules.hpp"

namespace shardrules::resolution {

using pytree::Leaf;
using pytree::LeafVisitor;
using pytree::Ref;
using pytree::Visited;

struct MatchOptions {
    bool strict;           // look at shapes: scalars, min_size, truncation
    PyObject* min_size;    // a number; leaves with fewer elements are replicated
    PyObject* replicated;  // what a leaf gets that needs no rule, or is too small
    PyObject* unmatched;   // what a leaf gets that no rule matches; None: it is listed
    PyObject* ambiguous;   // the same where several match and only one may
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

    MatchLeaves(Answers& answers, const std::vector<SearchedRule>& searched,
                const MatchModes& modes, const Choices& choices, const MatchOptions& options);
    Visited visit(Leaf& leaf) override { return {answer(leaf), leaf.reuse_key()}; }

    const Listing& unmatched() const { return unmatched_; }  // shape, or None
    // (rules, shape): several of them match, where only one may.
    const Listing& ambiguous() const { return ambiguous_; }
    const Listing& misfits() const { return misfits_; }  // (rule, shape): it cannot be applied
    // With record_events: the truncated spec, or None when the leaf was smaller than min_size.
    const Listing& events() const { return events_; }

  private:
    static constexpr automata::RuleId kSeveral = automata::kNoRule - 1;

    // Has no effect but reports, which name the leaf's path.
    Ref answer(Leaf& leaf);
    bool needs_no_rule(Leaf& leaf) const;
    bool too_small(PyObject* shape) const;
    automata::RuleId decide(Leaf& leaf);
    Ref undecided(automata::RuleId why, Leaf& leaf);
    // The leaf's shape, or None where no shapes are looked at.
    Ref shown_shape(Leaf& leaf) const;
    static void report(Listing& listing, Py_ssize_t most, Leaf& leaf, const Ref& what);

    Answers& answers_;
    const std::vector<SearchedRule>& searched_;
    const MatchModes& modes_;
    const Choices& choices_;
    MatchOptions options_;
    bool has_min_size_;
    bool sizes_first_, size_last_;  // looked at before and after the match
    Listing unmatched_, ambiguous_, misfits_, events_;
    std::vector<automata::RuleId> matches_;  // of the leaf at hand, with choices_.unique
};

}  // namespace shardrules::resolution
