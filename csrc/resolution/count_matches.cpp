#include "count_matches.hpp"

namespace shardrules::resolution {

Visited CountMatches::visit(Leaf& leaf) {
    if (!strict_ || !needs_no_rule(leaf))
        count_here(leaf.dfa(), [&] { return leaf.path().text(); });
    return {Ref::borrow(Py_None)};
}

void CountMatches::count(automata::LazyDfa& dfa, const Ref& path) {
    dfa.enter_like_last(pytree::text_of(path.get()));
    count_here(dfa, [&] { return path; });
    dfa.leave();
}

template <class PathText>
void CountMatches::count_here(const automata::LazyDfa& dfa, PathText path_text) {
    dfa.matches(rules_);
    add_matches(fallbacks_, path_text, rules_);
    if (rules_.empty()) {
        ++unmatched_;
        return;
    }
    const automata::RuleId winner = modes_.rule_of(rules_.front());
    modes_.fold(rules_);
    ++won_[winner];
    for (const automata::RuleId rule : rules_) {
        ++matched_[rule];
        if (rule != winner) ++lost_[{rule, winner}];
    }
}

bool CountMatches::needs_no_rule(Leaf& leaf) const {
    if (leaf.rank() == 0) return !dialect_.scalars_need_rules;
    return dialect_.size_one_is_scalar && pytree::ShapeReader::holds_one(leaf.shape().get());
}

}  // namespace shardrules::resolution
