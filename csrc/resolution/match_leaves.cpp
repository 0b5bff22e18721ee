#include "match_leaves.hpp"

namespace shardrules::resolution {

using pytree::check;
using pytree::ShapeReader;
using pytree::TreePath;

namespace {

Ref rule_and_shape(automata::RuleId rule, const Ref& shape) {
    return Ref::checked(Py_BuildValue("(IO)", rule, shape.get()));
}

Ref rules_and_shape(const std::vector<automata::RuleId>& rules, const Ref& shape) {
    const Ref list = Ref::checked(PyList_New(0));
    for (const automata::RuleId rule : rules)
        check(PyList_Append(list.get(), Ref::checked(PyLong_FromUnsignedLong(rule)).get()));
    return Ref::checked(PyTuple_Pack(2, list.get(), shape.get()));
}

bool is_less(PyObject* left, PyObject* right) {
    const int result = PyObject_RichCompareBool(left, right, Py_LT);
    check(result);
    return result == 1;
}

}  // namespace

MatchLeaves::MatchLeaves(Answers& answers, const std::vector<FallbackRule>& fallbacks,
                         const MatchModes& modes, const DialectOptions& dialect,
                         const CallOptions& options)
    : answers_(answers),
      fallbacks_(fallbacks),
      modes_(modes),
      dialect_(dialect),
      options_(options),
      // Zero, the default, is no bound.
      has_min_size_(is_less(Ref::checked(PyLong_FromLong(0)).get(), options.min_size)),
      sizes_first_(dialect.size_one_is_scalar || (dialect.min_size_first && has_min_size_)),
      size_last_(options.strict && has_min_size_ && !dialect.min_size_first) {}

Ref MatchLeaves::answer(Leaf& leaf) {
    Py_ssize_t rank = kAnyRank;
    if (options_.strict) {
        rank = leaf.rank();
        has_dimensions_ |= rank > 0;
        if (rank == 0 && !dialect_.scalars_need_rules) return Ref::borrow(options_.replicated);
        if (sizes_first_ && needs_no_rule(leaf)) return Ref::borrow(options_.replicated);
    }
    const automata::RuleId decided = decide(leaf);
    if (decided >= kSeveral) return undecided(decided, leaf);
    if (size_last_ && leaf.shape() && too_small(leaf.shape().get())) {
        if (options_.record_events) report(events_, PY_SSIZE_T_MAX, leaf, Ref::borrow(Py_None));
        return Ref::borrow(options_.replicated);
    }
    const automata::RuleId rule = modes_.rule_of(decided);
    Answers::Answer answer = answers_.get(rule, leaf, rank);
    if (!answer.object) {
        report(misfits_, kMisfitsShown, leaf, rule_and_shape(rule, reported_shape(leaf)));
        return Ref::borrow(Py_None);
    }
    if (answer.truncated && options_.record_events)
        report(events_, PY_SSIZE_T_MAX, leaf, answer.object);
    return std::move(answer.object);
}

automata::RuleId MatchLeaves::decide(Leaf& leaf) {
    const auto path = [&] { return leaf.path().text(); };
    if (!dialect_.unique) return first_match(leaf.dfa().winner(), fallbacks_, path);
    leaf.dfa().matches(matches_);
    add_matches(fallbacks_, path, matches_, modes_.end_of_first_mode(matches_));
    modes_.keep_first_mode(matches_);
    if (matches_.size() > 1) return kSeveral;
    return matches_.empty() ? automata::kNoRule : matches_.front();
}

Ref MatchLeaves::undecided(automata::RuleId why, Leaf& leaf) {
    PyObject* answer = why == kSeveral ? options_.ambiguous : options_.unmatched;
    if (answer != Py_None) return Ref::borrow(answer);
    if (why == kSeveral) {
        modes_.fold(matches_);
        report(ambiguous_, kMisfitsShown, leaf, rules_and_shape(matches_, reported_shape(leaf)));
    } else {
        report(unmatched_, kUnmatchedShown, leaf, reported_shape(leaf));
    }
    return Ref::borrow(Py_None);
}

Ref MatchLeaves::reported_shape(Leaf& leaf) const {
    return options_.strict && leaf.shape() ? leaf.shape() : Ref::borrow(Py_None);
}

bool MatchLeaves::needs_no_rule(Leaf& leaf) const {
    const Ref& shape = leaf.shape();
    return shape && ((dialect_.size_one_is_scalar && ShapeReader::holds_one(shape.get())) ||
                     (dialect_.min_size_first && has_min_size_ && too_small(shape.get())));
}

bool MatchLeaves::too_small(PyObject* shape) const {
    Ref size = Ref::checked(PyLong_FromLong(1));
    const Ref dims = Ref::checked(PySequence_Tuple(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims.get()); ++i)
        size = Ref::checked(PyNumber_Multiply(size.get(), PyTuple_GET_ITEM(dims.get(), i)));
    return is_less(size.get(), options_.min_size);
}

void MatchLeaves::report(Listing& listing, Py_ssize_t most, Leaf& leaf, const Ref& detail) {
    const TreePath& path =
        leaf.path();  // read even if not listed: no other leaf may reuse the answer
    if (listing.count++ >= most) return;
    const Ref entry = Ref::checked(PyTuple_Pack(2, path.shown().get(), detail.get()));
    check(PyList_Append(listing.first.get(), entry.get()));
}

}  // namespace shardrules::resolution
