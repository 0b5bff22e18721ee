// One step of all rules at once, written once and used by the lazy DFA, by plain simulation and by
// all_matches: from the threads that are alive before a character to those alive after it. A step
// costs at most the size of the program; memory is one mark per node. One user at a time. Knows
// nothing of caches.
#pragma once

#include <compare>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "program.hpp"

namespace shardrules::automata {

// A position in the program, with what the text ahead of it must still be for it to count.
struct Thread {
    NodeId node;
    std::uint16_t ahead;      // Ahead bits
    std::uint16_t accepting;  // 1: only waits for `ahead`, then its node accepts
    auto operator<=>(const Thread&) const = default;
};

// What is known after some prefix of a path: the threads of the rules that could still win, and
// the best rule that has matched already.
struct Frontier {
    std::vector<Thread> threads;  // sorted, without duplicates
    RuleId best = kNoRule;

    // Nothing that follows can change the winner.
    bool decided() const { return threads.empty(); }
    bool operator==(const Frontier&) const = default;
};

class Determinizer {
  public:
    // Prunes rules behind the best one; with `collect`, follows every rule and notes each match.
    explicit Determinizer(const Program& program, const Alphabet& alphabet,
                          std::vector<bool>* collect = nullptr);

    void start(Frontier& out);
    void step(const Frontier& from, CharClass c, Frontier& out);  // &from != &out
    // The winner if the text ends here.
    RuleId at_end(const Frontier& frontier) const;

  private:
    struct Behind {  // what lies before the position
        bool start = false;
        CharFacts last{};
    };
    void new_round();
    void follow(Thread first, const Behind& behind, Frontier& out);
    bool visit(const Thread& thread);
    void accept(RuleId rule, Frontier& out) const;
    void finish(Frontier& out) const;
    template <class Visit>
    void each_target(NodeId node, CharClass c, Visit visit) const;

    const Program& program_;
    const Alphabet& alphabet_;
    std::vector<bool>* collect_;
    std::vector<std::uint32_t> marks_;  // per node: the round that visited it with nothing ahead
    std::uint32_t round_ = 0;
    std::unordered_set<std::uint64_t> constrained_;  // visited with something ahead
    std::vector<Thread> stack_;
};

}  // namespace shardrules::automata
