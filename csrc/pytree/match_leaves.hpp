// The decision for one leaf, with the semantics of eformer's match_partition_rules (0.0.101): which
// spec it gets, whether it is too small or has no shape, and a record of what went unmatched. Reads
// a leaf's .shape and nothing else.
#pragma once

#include <vector>

#include "answers.hpp"
#include "searched_rules.hpp"
#include "shape_reader.hpp"
#include "walk.hpp"

namespace shardrules::pytree {

struct MatchOptions {
    bool strict;           // look at shapes: scalars, min_size, truncation
    PyObject* min_size;    // a number; leaves with fewer elements are replicated
    PyObject* replicated;  // what a leaf gets that no rule shards
    bool record_events;
};

class MatchLeaves final : public LeafVisitor {
  public:
    static constexpr Py_ssize_t kUnmatchedShown = 10, kProblemsShown = 20;

    MatchLeaves(Answers& answers, const std::vector<SearchedRule>& searched,
                const MatchOptions& options);
    Ref visit(PyObject* leaf, const LeafPlace& place) override;

    Py_ssize_t unmatched_count() const { return unmatched_count_; }
    Py_ssize_t problem_count() const { return problem_count_; }
    // Lists in the order of the walk: (path, shape or None); (path, (rule, shape)) of leaves that
    // their rule cannot be applied to; with record_events, (path, truncated spec or None when the
    // leaf was smaller than min_size).
    const Ref& unmatched() const { return unmatched_; }
    const Ref& problems() const { return problems_; }
    const Ref& events() const { return events_; }

  private:
    bool too_small(PyObject* shape) const;
    void record(const Ref& list, const LeafPlace& place, PyObject* what) const;

    Answers& answers_;
    const std::vector<SearchedRule>& searched_;
    MatchOptions options_;
    bool has_min_size_;
    ShapeReader shapes_;
    Py_ssize_t unmatched_count_ = 0, problem_count_ = 0;
    Ref unmatched_, problems_, events_;
};

}  // namespace shardrules::pytree
