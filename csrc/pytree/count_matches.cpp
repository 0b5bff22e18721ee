#include "count_matches.hpp"

namespace shardrules::pytree {

Ref CountMatches::visit(PyObject* leaf, const LeafPlace& place) {
    if (strict_ && ShapeReader::rank_of(leaf, shapes_.read(leaf)) == 0)
        return Ref::borrow(Py_None);
    place.dfa.matches(rules_);
    add_matches(searched_, [&] { return place.path.text(); }, rules_);
    if (rules_.empty()) {
        ++unmatched_;
        return Ref::borrow(Py_None);
    }
    const automata::RuleId winner = rules_.front();
    ++won_[winner];
    for (const automata::RuleId rule : rules_) {
        ++matched_[rule];
        if (rule != winner) ++lost_[{rule, winner}];
    }
    return Ref::borrow(Py_None);
}

}  // namespace shardrules::pytree
