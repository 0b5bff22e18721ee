// One matcher, many threads: answers as with one thread, and no data race
// (run under ThreadSanitizer by `make sanitize`, preset tsan).
#include <barrier>
#include <cstdlib>
#include <string>
#include <thread>

#include "patterns.hpp"

namespace {

using namespace shardrules::automata;
using namespace shardrules::automata::testing;

constexpr int kThreads = 8;
constexpr int kTexts = 400;

// Literals, a loop, and a[ab]{6}c, which alone wants 2^7 states.
EncodedRules rules() {
    const Words ab = alternate({literal('a'), literal('b')});
    return {.patterns = {sequence({literal('a'), repeat(6, 6, ab), literal('c')}),
                         sequence({text("b"), repeat(0, kUnbounded, literal('c')), text("a")}),
                         U"abcab"}};
}

std::string random_text(std::uint32_t seed) {
    std::string s;
    for (int k = 0; k < 40; ++k) {
        seed = seed * 1664525 + 1013904223;
        s.push_back("aabbabbc"[seed >> 29]);
    }
    return s;
}

std::vector<RuleId> answers(RuleMatcher& matcher, int thread) {
    std::vector<RuleId> found;
    for (int i = 0; i < kTexts; ++i) {
        const std::string s = random_text(static_cast<std::uint32_t>(i + thread * 17));
        const RuleMatcher::Cursor dfa = matcher.lend(Search::kFirst);
        dfa->enter(view(s));
        found.push_back(dfa->winner());
        // As when a leaf's shape resolves another tree.
        EXPECT(matcher.first(view(s)) == found.back());
    }
    return found;
}

void many_threads_share_a_matcher(std::size_t memory_budget) {
    RuleMatcher alone(rules(), nullptr, 1 << 20), shared(rules(), nullptr, memory_budget);
    std::vector<std::vector<RuleId>> found(kThreads);
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            start.arrive_and_wait();
            found[static_cast<std::size_t>(t)] = answers(shared, t);
            static_cast<void>(shared.stats());
        });
    for (std::thread& thread : threads) thread.join();
    for (int t = 0; t < kThreads; ++t)
        EXPECT(found[static_cast<std::size_t>(t)] == answers(alone, t));
    EXPECT(shared.stats().simulated_steps > 0);
}

}  // namespace

int main() {
    many_threads_share_a_matcher(0);
    many_threads_share_a_matcher(3000);
    many_threads_share_a_matcher(1 << 20);
    std::printf("threads: %d failures\n", failures.load());
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
