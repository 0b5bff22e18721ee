// The public interface of the automata: compiles a list of encoded rules, and finds those that
// match a text. Compiling is linear in the unrolled size of the patterns; a search costs one table
// look-up per character once its states are there. Safe to use from any thread. Knows nothing of
// trees or of regex syntax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "dfa_pool.hpp"

namespace shardrules::automata {

// A literal, words of the code of syntax.hpp, or a rule that is not searched here.
using EncodedPattern = std::variant<std::u32string, std::vector<std::uint32_t>, std::monostate>;

// Rules are numbered by their place in `patterns`, classes by theirs in `classes`.
struct EncodedRules {
    std::vector<EncodedPattern> patterns;
    std::vector<AsciiSet> classes{};  // the ASCII members of each
    std::optional<std::uint32_t> word_class{}, ascii_word_class{};
    // Python before 3.14: \B does not match the empty text.
    bool empty_text_has_no_non_boundary = false;
};

class RuleMatcher {
  public:
    using Cursor = DfaPool::Lease;

    // oracle: asked for the members of classes outside ASCII.
    // memory_budget: that of each LazyDfa.
    // std::invalid_argument if a pattern's code is malformed; std::length_error if the program
    // would be larger than kMaxNodes.
    RuleMatcher(const EncodedRules& rules, Oracle oracle, std::size_t memory_budget,
                Poll poll = {});

    // The first rule that matches the text, or kNoRule.
    RuleId first(Text text);
    // All rules that match, ascending.
    void all(Text text, std::vector<RuleId>& rules);
    // A DFA for one walk or search; its cursor is at the bottom.
    Cursor lend(Search search) { return Cursor(search == Search::kFirst ? first_ : all_); }

    // Of all searches that have ended.
    DfaStats stats() const;
    std::size_t node_count() const { return program_->node_count(); }

  private:
    std::shared_ptr<const Program> program_;
    DfaPool first_, all_;
};

}  // namespace shardrules::automata
