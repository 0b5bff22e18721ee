// Steps all rules over one character: from the frontier before it to the frontier after it. LazyDfa
// uses it to build states and to simulate. The threads in the literal trie are one node, by Aho and
// Corasick; every other thread is listed. A step costs at most the size of the program; memory is
// one mark per node. One user at a time. Knows nothing of states.
#pragma once

#include <compare>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "program.hpp"
#include "stack.hpp"

namespace shardrules::automata {

// Which matching rules a search finds.
enum class Search : std::uint8_t { kFirst, kAll };

// A position in the program, and a condition on the text ahead.
struct Thread {
    NodeId node;
    std::uint16_t ahead;      // Ahead bits
    std::uint16_t accepting;  // 1: the node accepts once `ahead` is known to hold
    auto operator<=>(const Thread&) const = default;
};

// All that is known after some prefix of a text: the threads of the rules that can still win, and
// the rules that have matched.
struct Frontier {
    // Stands for threads at this node, its suffix, the suffix of that, ..., and the root.
    NodeId literal = kRoot;
    RuleId best = kNoRule;          // Search::kFirst
    std::vector<RuleId> matched{};  // Search::kAll; ascending
    std::vector<Thread> threads{};  // the others; canonical: sorted, without duplicates
    bool operator==(const Frontier&) const = default;
};

class Determinizer {
  public:
    Determinizer(const Program& program, const Alphabet& alphabet, Search search);

    void start(Frontier& out);
    void step(const Frontier& from, CharClass c, Frontier& out);  // &from != &out
    // Equal frontiers have one canonical form.
    static void canonicalize(Frontier& frontier);
    // Whether all threads are in the literal trie.
    bool only_literals(const Frontier& f) const { return !restarts_ && f.threads.empty(); }
    // A step in place, if the frontier is only_literals() before and after it and no rule matches;
    // else false, and no step.
    bool step_in_literals(Frontier& at, CharClass c) const;
    // Whether no further text can change what matches.
    bool decided(const Frontier& f) const { return program_.first_rule(kRoot) >= f.best; }
    // With Search::kFirst: the first rule that matches if the text ends here.
    RuleId at_end(const Frontier& frontier) const;
    // With Search::kAll: all rules that match if the text ends here, ascending.
    void all_at_end(const Frontier& frontier, std::vector<RuleId>& rules) const;

  private:
    struct Behind {  // the text before the position
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
    bool restarts_;  // whether the root does more than read literals, after the start of the text
    std::vector<std::uint32_t>
        marks_;  // per node: the last round that visited it with nothing ahead
    std::uint32_t round_ = 0;
    Behind behind_;
    std::unordered_set<std::uint64_t> constrained_;  // visited with something ahead
    Stack<Thread> stack_;
};

}  // namespace shardrules::automata
