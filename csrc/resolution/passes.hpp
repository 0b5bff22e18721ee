// Rules that are tried in several ways, one way after the other, are in the automaton once for each:
// a pass is the whole list, met in one way. Folds the automaton's numbers back to the list's; costs
// nothing where there is one pass.
#pragma once

#include <algorithm>
#include <vector>

#include "automata/program.hpp"

namespace shardrules::resolution {

class Passes {
  public:
    explicit Passes(automata::RuleId rules) : rules_(rules) {}

    std::size_t rule_count() const { return rules_; }
    automata::RuleId rule_of(automata::RuleId numbered) const {
        return numbered < rules_ ? numbered : numbered % rules_;
    }
    // The rules behind these numbers, ascending.
    void fold(std::vector<automata::RuleId>& numbered) const {
        if (numbered.empty() || numbered.back() < rules_) return;
        for (automata::RuleId& rule : numbered) rule = rule_of(rule);
        std::sort(numbered.begin(), numbered.end());
        numbered.erase(std::unique(numbered.begin(), numbered.end()), numbered.end());
    }
    // Where the pass of the first of these numbers ends, ascending; kNoRule if there is none.
    automata::RuleId end_of_first(const std::vector<automata::RuleId>& numbered) const {
        return numbered.empty() ? automata::kNoRule : (numbered.front() / rules_ + 1) * rules_;
    }
    // Leaves only those of the first pass that has any.
    void keep_first(std::vector<automata::RuleId>& numbered) const {
        const auto end = std::lower_bound(numbered.begin(), numbered.end(), end_of_first(numbered));
        numbered.erase(end, numbered.end());
    }

  private:
    automata::RuleId rules_;
};

}  // namespace shardrules::resolution
