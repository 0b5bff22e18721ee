// The lazy DFA: finds the rules that match a path, with one table look-up per character.
//
// All rules are one nondeterministic automaton (program.hpp). After a prefix of a text it can be at
// many of its nodes at once. The set of these nodes, with the rules that have matched, is called a
// frontier (determinizer.hpp), and everything that follows depends on the frontier alone. A
// deterministic automaton (DFA) gives each frontier a number, its state, and has a table: state and
// character -> next state. There may be exponentially many frontiers, but real texts reach few. So
// this DFA is lazy: it begins with the start state only, and computes a state, and the entry of the
// table that leads to it, when a text gets there.
//
// A state takes as long to make as 5 to 16 steps without one, so a transition gets a state only
// after several texts have taken it. Until then the step is simulated: the next frontier is
// computed, and not stored. The states have a memory budget. When it is spent, all states but those
// in use are dropped, and if that was before they paid for themselves, the rest of the search is
// simulated. So the worst case is linear in text times program, never exponential. The cursor is a
// stack, because the paths of a tree share their prefixes: it goes down a key, and comes back up
// without reading anything again. One user at a time; a DfaPool lends DFAs out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

#include "determinizer.hpp"
#include "stack.hpp"

namespace shardrules::automata {

// Characters of one width, as CPython stores them: 1, 2 or 4 bytes a code point.
struct Text {
    const void* data;
    std::size_t length;
    int width;
};

// Called about every 10 ms of a long search. May throw, which ends the search.
using Poll = std::function<void()>;

struct DfaStats {
    std::uint64_t states_built = 0;
    std::uint64_t cache_clears = 0;
    std::uint64_t simulated_steps = 0;
};

class LazyDfa {
  public:
    using StateId = std::uint32_t;
    static constexpr StateId kNoState = 0xFFFFFFFF;

    // memory_budget: bytes for states, and as many for the cursor's positions that have no state.
    LazyDfa(std::shared_ptr<const Program> program, Oracle oracle, Search search,
            std::size_t memory_budget, Poll poll = {});

    // The cursor: a stack of positions, each further in the text than the one below. begin() leaves
    // the bottom alone, where nothing has been read.
    void begin();
    void enter(Text text) {
        push();
        extend(text);
    }
    // Enters the state that position() returned after the same text, from here, in this epoch.
    void enter(StateId known) { path_.push_back({known}); }
    // The same instead of extend().
    void move_to(StateId known) { path_.back().state = known; }
    // As enter(text), and fast if the text begins like the one of the last call.
    void enter_like_last(Text text);
    void extend(Text text);  // not at the bottom, from where later searches begin
    void leave() { path_.pop_back(); }
    // Whether leave() has come back to a position that had no state, and whose frontier was dropped
    // for the memory budget. Then replay() must get the whole text down to here before any other
    // call.
    bool forgotten() const { return path_.back().forgotten; }
    void replay(Text text);
    // kNoState if the position is simulated.
    StateId position() const { return path_.back().state; }
    // States are renumbered when it changes.
    std::uint64_t epoch() const { return stats_.cache_clears; }
    // Whether no further text can change what matches.
    bool decided() const {
        const StateId at = position();
        return at == kNoState ? determinizer_.decided(simulated_[path_.size() - 1].frontier)
                              : states_[at].decided;
    }
    // With Search::kFirst: the first rule that matches if the text ends here, or kNoRule.
    RuleId winner() const {
        const StateId at = position();
        return at == kNoState ? determinizer_.at_end(simulated_[path_.size() - 1].frontier)
                              : states_[at].at_end;
    }
    // With Search::kAll: all rules that match if the text ends here, ascending.
    void matches(std::vector<RuleId>& rules) const {
        const StateId at = position();
        determinizer_.all_at_end(
            at == kNoState ? simulated_[path_.size() - 1].frontier : states_[at].frontier, rules);
    }

    const DfaStats& stats() const { return stats_; }

  private:
    static constexpr StateId kUnknown = 0xFFFFFFFF;  // in the table
    static constexpr StateId kLastState = kUnknown - 1;

    // A transition that was simulated, and what that has cost. It gets a state once it has cost as
    // much as a state, if other candidates have not taken its place before: a state that is needed
    // once in ten thousand leaves is in no cache of the processor when it is needed again, and
    // slower than steps. A set has room for four, the latest first, so that two that alternate
    // stay.
    struct Candidate {
        std::uint32_t transition = 0;
        std::uint32_t cost = 0;
    };
    using Candidates = std::array<Candidate, 4>;
    static constexpr std::size_t kCandidateSets = 256;  // a power of two
    // The unit is 80 instructions. By callgrind a step among literals takes 79, another one 280 to
    // 370.
    static constexpr std::uint32_t kCostOfLiteralStep = 1, kCostOfStep = 3, kCostOfState = 16;

    // In threads, of about 140 instructions each.
    static constexpr std::size_t kWorkPerPoll = std::size_t{1} << 18;

    struct Position {
        StateId state;
        bool entered_from = false;  // whether another position was entered from it
        bool forgotten = false;     // whether it has neither a state nor a frontier
    };
    struct Simulated {
        Frontier frontier;
        std::size_t counted = 0;  // bytes of it in cursor_bytes_
    };
    struct State {
        Frontier frontier;
        RuleId at_end;
        bool decided;
        bool only_literals;
    };
    struct ByFrontier {  // hashes and compares states by their frontiers
        using is_transparent = void;
        const LazyDfa* dfa;
        static const Frontier& of(const Frontier& frontier) { return frontier; }
        const Frontier& of(StateId s) const { return dfa->states_[s].frontier; }
        template <class A>
        std::size_t operator()(const A& a) const {
            return hash(of(a));
        }
        template <class A, class B>
        bool operator()(const A& a, const B& b) const {
            return of(a) == of(b);
        }
        static std::size_t hash(const Frontier& frontier);
    };
    // The states along the last text of enter_like_last().
    struct Trail {
        StateId from = kNoState;
        std::uint64_t epoch = 0;
        int width = 0;
        std::vector<unsigned char> text{};
        std::vector<StateId> states{};
    };

    void push();
    void count(Simulated& position);
    void forget_all_but(std::size_t top);
    void worked(std::size_t threads) {
        if (threads < work_left_)
            work_left_ -= threads;
        else
            poll();
    }
    void poll();
    template <class Unit>
    void run(const Unit* text, const Unit* end, std::vector<StateId>* trail);
    template <class Unit>
    void simulate(const Unit* text, const Unit* end);
    bool worth_building(std::size_t transition, const State& from);
    StateId build_transition(StateId from, CharClass c);
    StateId intern(Frontier& frontier);  // canonicalizes it
    StateId add_state(const Frontier& frontier);
    void clear_cache();
    void widen_rows();
    std::size_t shared_prefix(const Text& text) const;

    std::shared_ptr<const Program> program_;
    Alphabet alphabet_;
    Determinizer determinizer_;
    std::size_t budget_;

    std::vector<State> states_;
    std::vector<StateId> table_;  // row-major: state << shift_ | class
    std::array<Candidates, kCandidateSets> candidates_{};
    unsigned shift_ = 0;
    std::unordered_set<StateId, ByFrontier, ByFrontier> index_;
    std::size_t bytes_ = 0;
    Stack<Position> path_;
    std::vector<Simulated> simulated_;  // per position of path_; used if that has no state
    std::size_t cursor_bytes_ = 0;      // of simulated_, except the top
    Poll poll_;
    std::size_t work_left_ = kWorkPerPoll;  // until the next poll
    Trail trail_;

    bool has_room_ = false;  // for more states than the start
    bool only_simulate_ = false;
    std::uint64_t read_since_clear_ = 0;
    std::uint64_t built_since_clear_ = 0;
    Frontier scratch_;
    DfaStats stats_;
};

}  // namespace shardrules::automata
