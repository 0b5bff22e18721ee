#include "count_matches.hpp"

namespace shardrules::resolution {

Ref CountMatches::visit(PyObject* leaf, const LeafPlace& place) {
    if (strict_ && needs_no_rule(leaf)) return Ref::borrow(Py_None);
    place.dfa.matches(rules_);
    add_matches(searched_, [&] { return place.path.text(); }, rules_);
    if (rules_.empty()) {
        ++unmatched_;
        return Ref::borrow(Py_None);
    }
    const automata::RuleId winner = modes_.rule_of(rules_.front());
    modes_.fold(rules_);
    ++won_[winner];
    for (const automata::RuleId rule : rules_) {
        ++matched_[rule];
        if (rule != winner) ++lost_[{rule, winner}];
    }
    return Ref::borrow(Py_None);
}

bool CountMatches::needs_no_rule(PyObject* leaf) {
    const Ref shape = shapes_.read(leaf);
    if (ShapeReader::rank_of(leaf, shape) == 0) return !choices_.scalars_need_rules;
    return choices_.size_one_is_scalar && ShapeReader::holds_one(shape.get());
}

}  // namespace shardrules::resolution
