// Decides for each leaf whether it needs a rule, and which answer it gets. Lists the leaves that no
// rule matches, or too many. Reads only .shape of a leaf.
#pragma once

#include <vector>

#include "answers.hpp"
#include "dialect_options.hpp"
#include "fallback_rules.hpp"
#include "match_modes.hpp"

namespace shardrules::resolution {

using pytree::Leaf;
using pytree::LeafVisitor;
using pytree::Ref;
using pytree::Visited;

struct CallOptions {
    bool strict;           // whether shapes matter: for scalars, min_size, truncation
    PyObject* min_size;    // a number; leaves with fewer elements are replicated
    PyObject* replicated;  // the answer for a leaf that needs no rule, or is too small
    PyObject* unmatched;   // the answer for a leaf that no rule matches; None: it is listed
    PyObject* ambiguous;  // the answer for a leaf that several rules match, if unique; None: listed
    bool record_events;
};

// Leaves to report, in the order of the walk: their number, and the first of them.
struct Listing {
    Py_ssize_t count = 0;
    Ref first = Ref::checked(PyList_New(0));  // of (path, detail)
};

class MatchLeaves final : public LeafVisitor {
  public:
    static constexpr Py_ssize_t kUnmatchedShown = 10, kMisfitsShown = 20;

    MatchLeaves(Answers& answers, const std::vector<FallbackRule>& fallbacks,
                const MatchModes& modes, const DialectOptions& dialect, const CallOptions& options);
    Visited visit(Leaf& leaf) override { return {answer(leaf), leaf.reuse_key()}; }

    // The details are: for leaves that no rule matches, the shape, or None;
    const Listing& unmatched() const { return unmatched_; }
    // for leaves that several rules match, if unique, (rules, shape);
    const Listing& ambiguous() const { return ambiguous_; }
    // for leaves that the winning rule cannot be applied to, (rule, shape);
    const Listing& misfits() const { return misfits_; }
    // with record_events, the truncated spec, or None for a leaf smaller than min_size.
    const Listing& events() const { return events_; }
    // Whether some leaf has dimensions; false if not strict.
    bool has_dimensions() const { return has_dimensions_; }

  private:
    static constexpr automata::RuleId kSeveral = automata::kNoRule - 1;

    // Its only effects are reports, which read the leaf's path, and a flag that each leaf of a rank
    // sets alike.
    Ref answer(Leaf& leaf);
    bool needs_no_rule(Leaf& leaf) const;
    bool too_small(PyObject* shape) const;
    automata::RuleId decide(Leaf& leaf);
    Ref undecided(automata::RuleId why, Leaf& leaf);
    // The leaf's shape, or None if shapes do not matter.
    Ref reported_shape(Leaf& leaf) const;
    static void report(Listing& listing, Py_ssize_t most, Leaf& leaf, const Ref& detail);

    Answers& answers_;
    const std::vector<FallbackRule>& fallbacks_;
    const MatchModes& modes_;
    const DialectOptions& dialect_;
    CallOptions options_;
    bool has_min_size_;
    bool sizes_first_, size_last_;  // whether sizes are read before the match, after it
    bool has_dimensions_ = false;
    Listing unmatched_, ambiguous_, misfits_, events_;
    std::vector<automata::RuleId> matches_;  // of the current leaf, if dialect_.unique
};

}  // namespace shardrules::resolution
