// A dialect may have several match modes ("exact", then "fullmatch"). The automaton then has all
// rules once for each mode: rule r of the list in mode m is number m * rules + r. This turns such
// numbers back into rules of the list, at no cost if there is one mode.
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
    // Replaces the numbers by the rules of the list, ascending, without duplicates.
    void fold(std::vector<automata::RuleId>& numbered) const {
        if (numbered.empty() || numbered.back() < rules_) return;
        for (automata::RuleId& rule : numbered) rule = rule_of(rule);
        std::ranges::sort(numbered);
        numbered.erase(std::unique(numbered.begin(), numbered.end()), numbered.end());
    }
    // Of ascending numbers: the end of the mode of the first of them; kNoRule without numbers.
    automata::RuleId end_of_first_mode(const std::vector<automata::RuleId>& numbered) const {
        return numbered.empty() ? automata::kNoRule : (numbered.front() / rules_ + 1) * rules_;
    }
    // Of ascending numbers: keeps those in the mode of the first of them.
    void keep_first_mode(std::vector<automata::RuleId>& numbered) const {
        const auto end = std::ranges::lower_bound(numbered, end_of_first_mode(numbered));
        numbered.erase(end, numbered.end());
    }

  private:
    automata::RuleId rules_;
};

}  // namespace shardrules::resolution
