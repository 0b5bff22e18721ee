// One program, one pool of lazy DFAs, many threads: answers as with one thread, and no data race
// (run under ThreadSanitizer by `make sanitize`, preset tsan).
#include <barrier>
#include <cstdlib>
#include <string>
#include <thread>

#include "automata/dfa_pool.hpp"
#include "patterns.hpp"

namespace {

using namespace shardrules::automata;
using namespace shardrules::automata::testing;

constexpr int kThreads = 8;
constexpr int kTexts = 400;

// Literals, a loop, and a[ab]{6}c, which alone wants 2^7 states.
std::shared_ptr<const Program> program() {
    ProgramBuilder made;
    const Words ab = alternate({literal('a'), literal('b')});
    made.add_pattern(decode(sequence({literal('a'), repeat(6, 6, ab), literal('c')}), made.tests()));
    made.add_pattern(
        decode(sequence({text("b"), repeat(0, kUnbounded, literal('c')), text("a")}), made.tests()));
    made.add_literal(U"abcab");
    return std::make_shared<const Program>(std::move(made).build());
}

std::string random_text(std::uint32_t seed) {
    std::string s;
    for (int k = 0; k < 40; ++k) {
        seed = seed * 1664525 + 1013904223;
        s.push_back("aabbabbc"[seed >> 29]);
    }
    return s;
}

std::vector<RuleId> answers(DfaPool& pool, int thread) {
    std::vector<RuleId> found;
    for (int i = 0; i < kTexts; ++i) {
        const std::string s = random_text(static_cast<std::uint32_t>(i + thread * 17));
        const DfaPool::Lease dfa(pool);
        dfa->enter(view(s));
        found.push_back(dfa->winner());
        const DfaPool::Lease nested(pool);  // as when a leaf's shape resolves another tree
        nested->enter(view(s));
        EXPECT(nested->winner() == found.back());
    }
    return found;
}

void many_threads_share_a_pool(std::size_t memory_budget) {
    DfaPool alone(program(), nullptr, Search::kFirst, 1 << 20);
    DfaPool shared(program(), nullptr, Search::kFirst, memory_budget);
    std::vector<std::vector<RuleId>> found(kThreads);
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
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
    many_threads_share_a_pool(0);
    many_threads_share_a_pool(3000);
    many_threads_share_a_pool(1 << 20);
    std::printf("threads: %d failures\n", failures.load());
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
