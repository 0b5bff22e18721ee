#include "match_leaves.hpp"

namespace shardrules::pytree {

MatchLeaves::MatchLeaves(Answers& answers, const std::vector<SearchedRule>& searched,
                         const MatchOptions& options)
    : answers_(answers),
      searched_(searched),
      options_(options),
      unmatched_(Ref::checked(PyList_New(0))),
      problems_(Ref::checked(PyList_New(0))),
      events_(Ref::checked(PyList_New(0))) {
    // No size is below zero, so zero asks nothing; it is the default.
    const Ref zero = Ref::checked(PyLong_FromLong(0));
    const int positive = PyObject_RichCompareBool(options.min_size, zero.get(), Py_GT);
    check(positive);
    has_min_size_ = positive == 1;
}

Ref MatchLeaves::visit(PyObject* leaf, const LeafPlace& place) {
    Ref shape;
    Py_ssize_t rank = kAnyRank;
    if (options_.strict) {
        shape = shapes_.read(leaf);
        rank = ShapeReader::rank_of(leaf, shape);
        if (rank == 0) return Ref::borrow(options_.replicated);
    }
    const automata::RuleId rule =
        first_match(place.dfa.winner(), searched_, [&] { return place.path.text(); });
    if (rule == automata::kNoRule) {
        if (unmatched_count_++ < kUnmatchedShown)
            record(unmatched_, place, shape ? shape.get() : Py_None);
        return Ref::borrow(Py_None);
    }
    if (options_.strict && has_min_size_ && too_small(shape.get())) {
        if (options_.record_events) record(events_, place, Py_None);
        return Ref::borrow(options_.replicated);
    }
    const Answers::Answer answer = answers_.get(rule, shape.get(), rank);
    if (answer.object == nullptr) {
        if (problem_count_++ < kProblemsShown) {
            const Ref what = Ref::checked(Py_BuildValue("(IO)", rule, shape.get()));
            record(problems_, place, what.get());
        }
        return Ref::borrow(Py_None);
    }
    if (answer.truncated && options_.record_events) record(events_, place, answer.object);
    return Ref::borrow(answer.object);
}

bool MatchLeaves::too_small(PyObject* shape) const {
    Ref size = Ref::checked(PyLong_FromLong(1));
    const Ref dims = Ref::checked(PySequence_Tuple(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims.get()); ++i)
        size = Ref::checked(PyNumber_Multiply(size.get(), PyTuple_GET_ITEM(dims.get(), i)));
    const int smaller = PyObject_RichCompareBool(size.get(), options_.min_size, Py_LT);
    check(smaller);
    return smaller == 1;
}

void MatchLeaves::record(const Ref& list, const LeafPlace& place, PyObject* what) const {
    const Ref entry = Ref::checked(PyTuple_Pack(2, place.path.text().get(), what));
    check(PyList_Append(list.get(), entry.get()));
}

}  // namespace shardrules::pytree
