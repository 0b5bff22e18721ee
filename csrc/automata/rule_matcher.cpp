#include "rule_matcher.hpp"

#include <utility>

namespace shardrules::automata {
namespace {

Program program_of(const EncodedRules& rules) {
    ProgramBuilder builder;
    builder.set_empty_text_has_no_non_boundary(rules.empty_text_has_no_non_boundary);
    for (const AsciiSet& members : rules.classes) builder.tests().add_class(members);
    if (rules.word_class) builder.tests().use_word(*rules.word_class);
    if (rules.ascii_word_class) builder.tests().use_ascii_word(*rules.ascii_word_class);
    for (const EncodedPattern& pattern : rules.patterns) {
        if (const auto* literal = std::get_if<std::u32string>(&pattern))
            builder.add_literal(*literal);
        else if (const auto* code = std::get_if<std::vector<std::uint32_t>>(&pattern))
            builder.add_pattern(decode(*code, builder.tests()));
        else
            builder.skip();
    }
    return std::move(builder).build();
}

}  // namespace

RuleMatcher::RuleMatcher(const EncodedRules& rules, Oracle oracle, std::size_t memory_budget,
                         Poll poll)
    : program_(std::make_shared<const Program>(program_of(rules))),
      first_(program_, oracle, Search::kFirst, memory_budget, poll),
      all_(program_, std::move(oracle), Search::kAll, memory_budget, std::move(poll)) {}

RuleId RuleMatcher::first(Text text) {
    const Cursor cursor = lend(Search::kFirst);
    cursor->enter(text);
    return cursor->winner();
}

void RuleMatcher::all(Text text, std::vector<RuleId>& rules) {
    const Cursor cursor = lend(Search::kAll);
    cursor->enter(text);
    cursor->matches(rules);
}

DfaStats RuleMatcher::stats() const {
    const DfaStats first = first_.stats(), all = all_.stats();
    return {.states_built = first.states_built + all.states_built,
            .cache_clears = first.cache_clears + all.cache_clears,
            .simulated_steps = first.simulated_steps + all.simulated_steps};
}

}  // namespace shardrules::automata
