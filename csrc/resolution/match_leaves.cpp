#include "match_leaves.hpp"

#include <algorithm>

namespace shardrules::resolution {

using pytree::check;

namespace {

Ref or_none(const Ref& shape) { return shape ? shape : Ref::borrow(Py_None); }

Ref rule_and_shape(automata::RuleId rule, const Ref& shape) {
    return Ref::checked(Py_BuildValue("(IO)", rule, or_none(shape).get()));
}

Ref rules_and_shape(const std::vector<automata::RuleId>& rules, const Ref& shape) {
    const Ref list = Ref::checked(PyList_New(0));
    for (const automata::RuleId rule : rules)
        check(PyList_Append(list.get(), Ref::checked(PyLong_FromUnsignedLong(rule)).get()));
    return Ref::checked(PyTuple_Pack(2, list.get(), or_none(shape).get()));
}

bool is_less(PyObject* left, PyObject* right) {
    const int result = PyObject_RichCompareBool(left, right, Py_LT);
    check(result);
    return result == 1;
}

// Of plain ints; comparing them runs no Python code.
bool same_sizes(PyObject* shape, PyObject* other) {
    if (shape == other) return true;
    const Py_ssize_t rank = PyTuple_GET_SIZE(shape);
    if (rank != PyTuple_GET_SIZE(other)) return false;
    for (Py_ssize_t i = 0; i < rank; ++i) {
        PyObject *size = PyTuple_GET_ITEM(shape, i), *other_size = PyTuple_GET_ITEM(other, i);
        if (size == other_size) continue;
        if (!PyLong_CheckExact(size) || !PyLong_CheckExact(other_size)) return false;
        const int equal = PyObject_RichCompareBool(size, other_size, Py_EQ);
        check(equal);
        if (equal == 0) return false;
    }
    return true;
}

}  // namespace

MatchLeaves::MatchLeaves(Answers& answers, const std::vector<SearchedRule>& searched,
                         const MatchModes& modes, const Choices& choices, const MatchOptions& options)
    : answers_(answers),
      searched_(searched),
      modes_(modes),
      choices_(choices),
      options_(options),
      // No size is below zero, so zero asks nothing; it is the default.
      has_min_size_(is_less(Ref::checked(PyLong_FromLong(0)).get(), options.min_size)),
      sizes_first_(choices.size_one_is_scalar || (choices.min_size_first && has_min_size_)),
      size_last_(options.strict && has_min_size_ && !choices.min_size_first) {}

Ref MatchLeaves::visit(PyObject* leaf, const LeafPlace& place) {
    last_depends_on_ = DependsOn::kMore;
    Ref shape;
    Py_ssize_t rank = kAnyRank;
    if (options_.strict) {
        shape = shapes_.read(leaf);
        rank = ShapeReader::rank_of(leaf, shape);
        if (rank == 0 && !choices_.scalars_need_rules) return Ref::borrow(options_.replicated);
        if (sizes_first_ && shape && needs_no_rule(shape.get()))
            return Ref::borrow(options_.replicated);
    }
    const automata::RuleId decided = decide(place);
    if (decided >= kSeveral) return undecided(decided, place, shape);
    if (size_last_ && shape && too_small(shape.get())) {
        if (options_.record_events) report(events_, PY_SSIZE_T_MAX, place, or_none({}));
        return Ref::borrow(options_.replicated);
    }
    const automata::RuleId rule = modes_.rule_of(decided);
    Answers::Answer answer = answers_.get(rule, leaf, shape.get(), rank);
    if (!answer.object) {
        report(misfits_, kMisfitsShown, place, rule_and_shape(rule, shape));
        return Ref::borrow(Py_None);
    }
    if (answer.truncated && options_.record_events)
        report(events_, PY_SSIZE_T_MAX, place, answer.object);
    else if (searched_.empty())
        last_depends_on_ = has_min_size_ ? std::max(answer.depends_on, DependsOn::kShape) : answer.depends_on;
    last_shape_ = std::move(shape);
    return std::move(answer.object);
}

Ref MatchLeaves::last_kind() const {
    if (last_depends_on_ == DependsOn::kMore || !last_shape_ || !PyTuple_CheckExact(last_shape_.get()))
        return {};
    if (last_depends_on_ == DependsOn::kShape) return last_shape_;
    return Ref::checked(PyLong_FromSsize_t(PyTuple_GET_SIZE(last_shape_.get())));
}

bool MatchLeaves::is_of_kind(PyObject* leaf, PyObject* kind) const {
    PyObject* shape = shapes_.peek(leaf);
    if (shape == nullptr || !PyTuple_CheckExact(shape)) return false;
    if (PyTuple_CheckExact(kind)) return same_sizes(shape, kind);
    return PyTuple_GET_SIZE(shape) == PyLong_AsSsize_t(kind);
}

automata::RuleId MatchLeaves::decide(const LeafPlace& place) {
    const auto path = [&] { return place.path.text(); };
    if (!choices_.unique) return first_match(place.dfa.winner(), searched_, path);
    place.dfa.matches(matches_);
    add_matches(searched_, path, matches_, modes_.end_of_first_mode(matches_));
    modes_.keep_first_mode(matches_);
    if (matches_.size() > 1) return kSeveral;
    return matches_.empty() ? automata::kNoRule : matches_.front();
}

Ref MatchLeaves::undecided(automata::RuleId why, const LeafPlace& place, const Ref& shape) {
    PyObject* answer = why == kSeveral ? options_.ambiguous : options_.unmatched;
    if (answer != Py_None) return Ref::borrow(answer);
    if (why == kSeveral) {
        modes_.fold(matches_);
        report(ambiguous_, kMisfitsShown, place, rules_and_shape(matches_, shape));
    } else {
        report(unmatched_, kUnmatchedShown, place, or_none(shape));
    }
    return Ref::borrow(Py_None);
}

bool MatchLeaves::needs_no_rule(PyObject* shape) const {
    return (choices_.size_one_is_scalar && ShapeReader::holds_one(shape)) ||
           (choices_.min_size_first && has_min_size_ && too_small(shape));
}

bool MatchLeaves::too_small(PyObject* shape) const {
    Ref size = Ref::checked(PyLong_FromLong(1));
    const Ref dims = Ref::checked(PySequence_Tuple(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims.get()); ++i)
        size = Ref::checked(PyNumber_Multiply(size.get(), PyTuple_GET_ITEM(dims.get(), i)));
    return is_less(size.get(), options_.min_size);
}

void MatchLeaves::report(Listing& listing, Py_ssize_t most, const LeafPlace& place,
                       const Ref& what) const {
    if (listing.count++ >= most) return;
    const Ref entry = Ref::checked(PyTuple_Pack(2, place.path.shown().get(), what.get()));
    check(PyList_Append(listing.shown.get(), entry.get()));
}

}  // namespace shardrules::resolution
