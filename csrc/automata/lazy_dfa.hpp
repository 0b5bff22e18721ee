// The rules' automaton made deterministic on demand, and a cursor into a tree of paths. A step
// over a known transition is one table look-up; states live inside a memory budget: when it is
// spent the cache is cleared, and when that does not pay any more, steps are simulated instead
// (linear in text times program, never exponential). One user at a time: RuleSet lends them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "determinizer.hpp"

namespace shardrules::automata {

// Characters of one width, as CPython stores them: 1, 2 or 4 bytes a code point.
struct Text {
    const void* data;
    std::size_t length;
    int width;
};

struct DfaStats {
    std::uint64_t states_built = 0;
    std::uint64_t cache_clears = 0;
    std::uint64_t simulated_steps = 0;
};

class LazyDfa {
  public:
    using StateId = std::uint32_t;

    LazyDfa(std::shared_ptr<const Program> program, Oracle oracle, std::size_t memory_budget);

    // The cursor: a stack of positions, each some text further than the one below. At the bottom,
    // which begin() makes, nothing has been read.
    void begin();
    void enter(Text text) { path_.push_back(advance(path_.back(), text)); }
    // Enters a state that position() showed here in the same epoch, after the same text.
    void enter(StateId known) { path_.push_back(known); }
    void extend(Text text) { path_.back() = advance(path_.back(), text); }
    void leave() { path_.pop_back(); }
    StateId position() const { return path_.back(); }
    // States are renumbered when it changes.
    std::uint64_t epoch() const { return stats_.cache_clears; }
    // No further text can change the winner at this position.
    bool decided() const { return states_[path_.back()].decided; }
    // The first rule that matches if the text ends at this position, or kNoRule.
    RuleId winner() const { return states_[path_.back()].at_end; }

    const DfaStats& stats() const { return stats_; }

  private:
    static constexpr StateId kUnknown = 0xFFFFFFFF;
    struct State {
        Frontier frontier;
        RuleId at_end;
        bool decided;
    };
    struct ByFrontier {  // hashes and compares states by what they hold
        using is_transparent = void;
        const LazyDfa* dfa;
        const Frontier& of(const Frontier& frontier) const { return frontier; }
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

    StateId advance(StateId from, Text text);
    template <class Unit>
    StateId run(StateId at, const Unit* text, const Unit* end);
    template <class Unit>
    StateId simulate(StateId from, const Unit* text, const Unit* end);
    StateId build_transition(StateId from, CharClass c);
    StateId intern(const Frontier& frontier);
    StateId add_state(const Frontier& frontier);
    void make_room();
    void widen_rows();

    std::shared_ptr<const Program> program_;
    Alphabet alphabet_;
    Determinizer determinizer_;
    std::size_t budget_;

    std::vector<State> states_;
    std::vector<StateId> table_;  // row-major: state << shift_ | class
    unsigned shift_ = 0;
    std::unordered_set<StateId, ByFrontier, ByFrontier> index_;
    std::size_t bytes_ = 0;
    std::vector<StateId> path_;

    bool simulating_ = false;
    std::uint64_t read_since_clear_ = 0;
    std::uint64_t built_since_clear_ = 0;
    Frontier scratch_, other_scratch_;
    DfaStats stats_;
};

// Every rule that matches the text, ascending; nothing is cached.
std::vector<RuleId> all_matches(const Program& program, const Oracle& oracle, Text text);

}  // namespace shardrules::automata
