// The automata without Python: trimming, sharing, cursor, budget, alphabet. Exactness against `re`
// is tests/rules/test_exactness.py's job.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "patterns.hpp"

namespace {

using namespace shardrules::automata;
using namespace shardrules::automata::testing;

AsciiSet all_but_newline() {
    AsciiSet set;
    set.set();
    set.reset('\n');
    return set;
}
constexpr std::uint32_t kAny = 0;  // the class that builder() adds

bool never_asked(std::uint32_t, char32_t) { throw std::runtime_error("asked the oracle"); }
bool accepts_all(std::uint32_t, char32_t) { return true; }

struct Rules {
    explicit Rules(const std::vector<Words>& patterns, std::size_t budget = 1 << 20,
                   Oracle oracle = accepts_all)
        : matcher({.patterns = {patterns.begin(), patterns.end()}, .classes = {all_but_newline()}},
                  std::move(oracle), budget),
          dfa(matcher.lend(Search::kFirst)) {}
    RuleId first(std::string_view s) const {
        dfa->begin();
        dfa->enter(view(s));
        return dfa->winner();
    }
    std::vector<RuleId> all(std::string_view s) {
        std::vector<RuleId> rules;
        matcher.all(view(s), rules);
        return rules;
    }
    RuleMatcher matcher;
    RuleMatcher::Cursor dfa;
};

void optional_ends_are_trimmed() {
    const Words any = repeat(0, kUnbounded, cls(kAny));
    const Rules padded({sequence({any, text("ab"), any})});
    const Rules bare({text("ab")});
    EXPECT(padded.matcher.node_count() == bare.matcher.node_count());
    EXPECT(padded.first("x\nab") == 0);
    const Rules everything({any});
    EXPECT(everything.first("") == 0);
    EXPECT(everything.dfa->decided());
}

void rules_share_their_front() {
    const Rules two({text("layers/1"), text("layers/2")});
    EXPECT(two.matcher.node_count() == 1 + 7 + 2);
    // The same loop behind the same prefix exists once.
    const auto looped = [](char c) {
        return sequence(
            {text("l"), repeat(1, kUnbounded, cls(kAny)), literal(static_cast<char32_t>(c))});
    };
    const Rules one_loop({looped('a')});
    const Rules two_loops({looped('a'), looped('b')});
    EXPECT(two_loops.matcher.node_count() == one_loop.matcher.node_count() + 1);
}

void first_rule_wins_and_same_patterns_are_all_found() {
    Rules rules({text("b"), text("ab"), text("b")});
    EXPECT(rules.first("ab") == 0);
    EXPECT(rules.first("a") == kNoRule);
    EXPECT((rules.all("ab") == std::vector<RuleId>{0, 1, 2}));
    EXPECT(rules.all("a").empty());
}

void assertions_look_both_ways() {
    const Rules dollar({sequence({literal('a'), assertion(Assertion::kDollar)})});
    EXPECT(dollar.first("a") == 0);
    EXPECT(dollar.first("a\n") == 0);
    EXPECT(dollar.first("a\n\n") == kNoRule);
    EXPECT(dollar.first("ab") == kNoRule);
    const Rules begin({sequence({assertion(Assertion::kBegin), literal('a')})});
    EXPECT(begin.first("ab") == 0);
    EXPECT(begin.first("ba") == kNoRule);
    // Nothing but assertions: the search must stay alive without a character to wait for.
    const Rules late(
        {sequence({assertion(Assertion::kEndLine), assertion(Assertion::kBeginLine)})});
    EXPECT(late.first("a\n") == 0);
    EXPECT(late.first("a") == kNoRule);
}

void cursor_resumes_and_leaves() {
    const Rules rules({text("ax"), text("ay")});
    rules.dfa->begin();
    rules.dfa->enter(view("a"));
    rules.dfa->enter(view("x"));
    EXPECT(rules.dfa->winner() == 0);
    EXPECT(rules.dfa->decided());
    rules.dfa->leave();
    rules.dfa->extend(view("y"));
    EXPECT(rules.dfa->winner() == 1);
    EXPECT(!rules.dfa->decided());
}

void tiny_budget_gives_the_same_answers() {
    // a[ab]{6}c needs 2^7 states.
    const Words ab = alternate({literal('a'), literal('b')});
    const Words pattern = sequence({literal('a'), repeat(6, 6, ab), literal('c')});
    const Rules roomy({pattern}), tight({pattern}, 1), small({pattern}, 5000);
    std::uint32_t seed = 1;
    for (int i = 0; i < 2000; ++i) {
        std::string s;
        for (int k = 0; k < 24; ++k) {
            seed = seed * 1664525 + 1013904223;
            s.push_back("aabbabbc"[seed >> 29]);
        }
        const RuleId expected = roomy.first(s);
        EXPECT(tight.first(s) == expected);
        EXPECT(small.first(s) == expected);
    }
    EXPECT(tight.dfa->stats().states_built == 1);
    EXPECT(tight.dfa->stats().simulated_steps > 0);
    EXPECT(small.dfa->stats().cache_clears > 0);
}

void suffixes_of_literals_are_found() {
    // What Aho and Corasick's links are for: "she" ends in "he", and "hers" goes on from there.
    Rules rules({text("hers"), text("she"), text("he"), text("is")});
    EXPECT(rules.first("ushers") == 0);
    EXPECT(rules.first("ushe") == 1);
    EXPECT(rules.first("the") == 2);
    EXPECT((rules.all("this ushers") == std::vector<RuleId>{0, 1, 2, 3}));
    // A class edge of a suffix, while the longer literal goes on.
    const Rules mixed({text("abcd"), sequence({text("b"), cls(kAny), text("x")})});
    EXPECT(mixed.first("abcx") == 1);
    EXPECT(mixed.first("abcd") == 0);
}

void states_are_built_for_what_comes_back() {
    const Rules rules({text("layers/1/kernel")});
    rules.first("layers/1/kernel");
    EXPECT(rules.dfa->stats().states_built == 1);  // the start; one path alone is not worth more
    EXPECT(rules.dfa->stats().simulated_steps > 0);
    for (int i = 0; i < 40; ++i) EXPECT(rules.first("layers/1/kernel") == 0);
    const DfaStats learnt = rules.dfa->stats();
    EXPECT(learnt.states_built > 1);
    EXPECT(rules.first("layers/1/kernel") == 0);
    EXPECT(rules.dfa->stats().simulated_steps == learnt.simulated_steps);
}

void states_are_not_built_for_what_comes_back_seldom() {
    // 3,000 paths in turn, and one that is between them each time.
    std::vector<Words> patterns;
    std::vector<std::string> paths;
    for (int i = 0; i < 3000; ++i) {
        paths.push_back(std::to_string(i) + "/kernel");
        patterns.push_back(
            sequence({text(std::to_string(i) + "/"), repeat(0, kUnbounded, cls(kAny)), text("l")}));
    }
    const Rules rules(patterns);
    for (int round = 0; round < 10; ++round)
        for (RuleId i = 0; i < paths.size(); ++i) EXPECT(rules.first(paths[i]) <= i);
    const std::uint64_t built = rules.dfa->stats().states_built;
    EXPECT(built < paths.size());
    for (int i = 0; i < 40; ++i) rules.first("7/kernel");
    EXPECT(rules.dfa->stats().states_built > built);
}

void loops_and_what_follows_them() {
    // The loop of a class is an edge of a node that may have another one for the same class.
    const Words any = repeat(0, kUnbounded, cls(kAny));
    Rules rules({sequence({text("a"), any, cls(kAny), text("b")}),
                 sequence({text("a"), any, text("b")}),
                 sequence({text("a"), repeat(1, kUnbounded, cls(kAny)), text("c")})});
    EXPECT((rules.all("ab") == std::vector<RuleId>{1}));
    EXPECT((rules.all("axb") == std::vector<RuleId>{0, 1}));
    EXPECT(rules.all("ac").empty());
    EXPECT((rules.all("axxc") == std::vector<RuleId>{2}));
    EXPECT(rules.all("xb").empty());
}

void texts_that_begin_alike() {
    const Rules rules({text("layers.1.b"), text("layers.1.a"), text("s.2")});
    const char* const names[] = {"layers.1.a", "layers.1.b", "layers.1.c",
                                 "layers.2.a", "layers.1.a", "layers.1.bb",
                                 "layers.1",   "x",          "layers.2.bb"};
    for (int round = 0; round < 20; ++round) {
        for (const char* const name : names) {
            const RuleId expected = rules.first(name);
            rules.dfa->begin();
            rules.dfa->enter_like_last(view(name));
            EXPECT(rules.dfa->winner() == expected);
        }
    }
}

void oracle_is_asked_once_a_code_point() {
    int asked = 0;
    const Words pattern = sequence({cls(kAny), literal(0xE9)});
    const Rules rules({pattern}, 1 << 20, [&](std::uint32_t, char32_t) { return ++asked > 0; });
    const char16_t word[] = u"\u00e9\u00e9\u4e00\u00e9\u00e9";
    for (int i = 0; i < 10; ++i) {
        rules.dfa->begin();
        rules.dfa->enter({word, 5, 2});
        EXPECT(rules.dfa->winner() == 0);
    }
    EXPECT(asked == 2);

    const Rules ascii_only({pattern}, 1 << 20, never_asked);
    EXPECT(ascii_only.first("plain") == kNoRule);
}

void unrolling_is_bounded() {
    const Words inner = repeat(4000, 4000, cls(kAny));
    bool refused = false;
    try {
        const Rules huge({sequence({text("x"), repeat(4000, 4000, inner), text("y")})});
    } catch (const std::length_error&) {
        refused = true;
    }
    EXPECT(refused);
    // Billions of nothing are nothing.
    const Words nothing = repeat(0xFFFFFFF0, 0xFFFFFFFE, sequence({}));
    const Rules rules({sequence({text("x"), nothing, text("y")})});
    EXPECT(rules.first("xy") == 0);
}

void malformed_codes_are_refused() {
    const std::uint32_t cls = word(Op::kClass), assert = word(Op::kAssert),
                        never = word(Op::kNever), alternate = word(Op::kAlternate),
                        repeat = word(Op::kRepeat), sequence = word(Op::kSequence);
    Words deep;
    for (int i = 0; i < 1000; ++i) deep.insert(deep.end(), {sequence, 1});
    deep.insert(deep.end(), {sequence, 0});
    const std::vector<Words> bad = {{},
                                    {sequence + 1},
                                    {0xFFFFFFFF},
                                    {U'a', U'b'},
                                    {cls},
                                    {cls, 7},
                                    {assert, 0},
                                    {assert, 99},
                                    {never, 0},
                                    {alternate, 5},
                                    {repeat, 2, 1, sequence, 0},
                                    {repeat, 1, 2},
                                    {sequence, 0, sequence, 0},
                                    {sequence, 0xFFFFFFFF},
                                    deep};
    for (const Words& code : bad) {
        CharTests tests;
        bool refused = false;
        try {
            decode(code, tests);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        EXPECT(refused);
    }
}

}  // namespace

int main() {
    optional_ends_are_trimmed();
    rules_share_their_front();
    first_rule_wins_and_same_patterns_are_all_found();
    assertions_look_both_ways();
    cursor_resumes_and_leaves();
    suffixes_of_literals_are_found();
    states_are_built_for_what_comes_back();
    states_are_not_built_for_what_comes_back_seldom();
    loops_and_what_follows_them();
    texts_that_begin_alike();
    tiny_budget_gives_the_same_answers();
    oracle_is_asked_once_a_code_point();
    unrolling_is_bounded();
    malformed_codes_are_refused();
    std::printf("automata: %d failures\n", failures.load());
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
