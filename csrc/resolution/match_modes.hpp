// A dialect may have several match modes ("exact", then "fullmatch"). All rules are then in the
// automaton once for each mode: rule r of the list in mode m is number m * rules + r. Here such
// numbers become the list's own again, which costs nothing where there is one mode.
#pragma once

#include <algorithm>
#include <vector>

#include "automata/program.hpp"

namespace shardrules::resolution {

class MatchModes {
  public:
    explicit MatchModes(automata::RuleId rules) : rules_(rules) {}

    std::size_t rule_count() const { return rules_; }
    automata::RuleId rule_of(automata::RuleId numbered) const {
        return numbered < rules_ ? numbered : numbered % rules_;
    }
    // Replaces these numbers by the rules that they stand for, ascending, each once.
    void fold(std::vector<automata::RuleId>& numbered) const {
        if (numbered.empty() || numbered.back() < rules_) return;
        for (automata::RuleId& rule : numbered) rule = rule_of(rule);
        std::sort(numbered.begin(), numbered.end());
        numbered.erase(std::unique(numbered.begin(), numbered.end()), numbered.end());
    }
    // Of ascending numbers: the first number that is beyond the mode of their first; kNoRule if
    // there are none.
    automata::RuleId end_of_first_mode(const std::vector<automata::RuleId>& numbered) const {
        return numbered.empty() ? automata::kNoRule : (numbered.front() / rules_ + 1) * rules_;
    }
    // Of ascending numbers: keeps those of the first mode that has any.
    void keep_first_mode(std::vector<automata::RuleId>& numbered) const {
        const auto end =
            std::lower_bound(numbered.begin(), numbered.end(), end_of_first_mode(numbered));
        numbered.erase(end, numbered.end());
    }

  private:
    automata::RuleId rules_;
};

}  // namespace shardrules::resolution
