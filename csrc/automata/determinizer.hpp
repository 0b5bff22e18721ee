// One step of all rules at once, written once and used to build states and to go without them: from
// what is alive before a character to what is alive after it. The threads inside the literal trie
// are one node, Aho and Corasick's; every other thread is listed. A step costs at most the size of
// the program; memory is one mark per node. One user at a time. Knows nothing of caches.
#pragma once

#include <compare>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "program.hpp"
#include "stack.hpp"

namespace shardrules::automata {

// Which rules are looked for: the first that matches, or all.
enum class Search : std::uint8_t { kFirst, kAll };

// A position in the program, with what the text ahead of it must still be for it to count.
struct Thread {
    NodeId node;
    std::uint16_t ahead;      // Ahead bits
    std::uint16_t accepting;  // 1: only waits for `ahead`, then its node accepts
    auto operator<=>(const Thread&) const = default;
};

// What is known after some prefix of a path: the threads of the rules that could still win, and
// the rules that have matched already.
struct Frontier {
    // Threads at the node, its suffix, that one's suffix, ..., and the root, along literal edges.
    NodeId literal = kRoot;
    RuleId best = kNoRule;          // Search::kFirst
    std::vector<RuleId> matched{};  // Search::kAll; ascending
    std::vector<Thread> threads{};  // the others; in canonical form sorted, without duplicates
    bool operator==(const Frontier&) const = default;
};

class Determinizer {
  public:
    Determinizer(const Program& program, const Alphabet& alphabet, Search search);

    void start(Frontier& out);
    void step(const Frontier& from, CharClass c, Frontier& out);  // &from != &out
    // Brings it into the form that equal ones share.
    static void canonicalize(Frontier& frontier);
    // Whether there is only the literal trie to step through.
    bool quiet(const Frontier& f) const { return !restarts_ && f.threads.empty(); }
    // A step from a quiet frontier, in place, if nothing happens there; or false, and nothing is
    // done.
    bool step_quietly(Frontier& at, CharClass c) const;
    // Nothing that follows can change what has matched.
    bool decided(const Frontier& f) const { return program_.first_rule(kRoot) >= f.best; }
    // The winner if the text ends here (Search::kFirst).
    RuleId at_end(const Frontier& frontier) const;
    // All rules that match if the text ends here, ascending (Search::kAll).
    void all_at_end(const Frontier& frontier, std::vector<RuleId>& rules) const;

  private:
    struct Behind {  // what lies before the position
        bool start = false;
        CharFacts last{};
    };
    void new_round(const Behind& behind);
    NodeId next_literal(NodeId from, CharClass c) const;
    void arrive(NodeId literal, Frontier& out);
    void add(NodeId node, std::uint16_t ahead, Frontier& out);
    void add_closure(NodeId node, std::uint16_t ahead, Frontier& out);
    void cross(const EpsilonEdge& edge, const Thread& at);
    bool visit(NodeId node, std::uint16_t ahead);
    void accept(RuleId rule, Frontier& out) const;
    void add_rule(RuleId rule, std::vector<RuleId>& rules) const;
    void drop_losers(RuleId best_before, Frontier& out) const;
    template <class Visit>
    void each_target(NodeId node, CharClass c, Visit visit) const;

    const Program& program_;
    const Alphabet& alphabet_;
    Search search_;
    bool restarts_;  // the root has more to it, later than at the start, than literal edges
    std::vector<std::uint32_t> marks_;  // per node: the round that visited it with nothing ahead
    std::uint32_t round_ = 0;
    Behind behind_;
    std::unordered_set<std::uint64_t> constrained_;  // visited with something ahead
    Stack<Thread> stack_;
};

}  // namespace shardrules::automata
