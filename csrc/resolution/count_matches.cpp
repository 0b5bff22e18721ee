#include "count_matches.hpp"

namespace shardrules::resolution {

Visited CountMatches::visit(Leaf& leaf) {
    Visited nothing{Ref::borrow(Py_None)};
    if (strict_ && needs_no_rule(leaf)) return nothing;
    leaf.dfa().matches(rules_);
    add_matches(fallbacks_, [&] { return leaf.path().text(); }, rules_);
    if (rules_.empty()) {
        ++unmatched_;
        return nothing;
    }
    const automata::RuleId winner = modes_.rule_of(rules_.front());
    modes_.fold(rules_);
    ++won_[winner];
    for (const automata::RuleId rule : rules_) {
        ++matched_[rule];
        if (rule != winner) ++lost_[{rule, winner}];
    }
    return nothing;
}

bool CountMatches::needs_no_rule(Leaf& leaf) const {
    if (leaf.rank() == 0) return !dialect_.scalars_need_rules;
    return dialect_.size_one_is_scalar && pytree::ShapeReader::holds_one(leaf.shape().get());
}

}  // namespace shardrules::resolution
