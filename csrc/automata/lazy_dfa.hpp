// The rules' automaton made deterministic on demand, and a cursor into a tree of paths. A step
// over a known transition is one table look-up. A transition is worth a state only once it has been
// met a few times, not too far apart; until then it is simulated, as everything is when the memory
// budget is spent and clearing the states does not pay (linear in text times program, never
// exponential). One user at a time: DfaPool lends them out.
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

// Called now and then while a search goes on, if it is long. May throw, which ends the search.
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

    // memory_budget: bytes of states; and as many for what the cursor's positions hold beside them.
    LazyDfa(std::shared_ptr<const Program> program, Oracle oracle, Search search,
            std::size_t memory_budget, Poll poll = {});

    // The cursor: a stack of positions, each some text further than the one below. At the bottom,
    // which begin() makes, nothing has been read.
    void begin();
    void enter(Text text) {
        push();
        extend(text);
    }
    // Enters a state that position() showed here in the same epoch, after the same text.
    void enter(StateId known) { path_.push_back({known}); }
    // The same without entering, after an extension.
    void move_to(StateId known) { path_.back().state = known; }
    // The same as enter(text), for a text that begins as the one before it did.
    void enter_like_last(Text text);
    void extend(Text text);  // not at the bottom, from where later searches begin
    void leave() { path_.pop_back(); }
    // Whether leaving has led to a position, one without a state, that the memory budget had no
    // room for: before anything else is asked of it, replay() has to be told all the text down to
    // here.
    bool forgotten() const { return path_.back().forgotten; }
    void replay(Text text);
    // kNoState if the position is not worth one so far.
    StateId position() const { return path_.back().state; }
    // States are renumbered when it changes.
    std::uint64_t epoch() const { return stats_.cache_clears; }
    // No further text can change what matches at this position.
    bool decided() const {
        const StateId at = position();
        return at == kNoState ? determinizer_.decided(simulated_[path_.size() - 1].frontier)
                              : states_[at].decided;
    }
    // Search::kFirst: the first rule that matches if the text ends here, or kNoRule.
    RuleId winner() const {
        const StateId at = position();
        return at == kNoState ? determinizer_.at_end(simulated_[path_.size() - 1].frontier)
                              : states_[at].at_end;
    }
    // Search::kAll: all of them, ascending.
    void matches(std::vector<RuleId>& rules) const {
        const StateId at = position();
        determinizer_.all_at_end(
            at == kNoState ? simulated_[path_.size() - 1].frontier : states_[at].frontier, rules);
    }

    const DfaStats& stats() const { return stats_; }

  private:
    static constexpr StateId kUnknown = 0xFFFFFFFF;  // in the table
    static constexpr StateId kLastState = kUnknown - 1;

    // An unknown transition that was met. What has cost as much as a state becomes one, if it comes
    // back before others take its place: states that are met once in ten thousand leaves would
    // leave the processor's caches before they are met again, and then cost more than steps. A set
    // has room for several, the last one met first, so that two which take turns do not drive each
    // other out.
    struct Candidate {
        std::uint32_t transition = 0;
        std::uint32_t cost = 0;
    };
    using Candidates = std::array<Candidate, 4>;
    static constexpr std::size_t kCandidateSets = 256;  // a power of two
    // The unit is some 80 instructions: by callgrind a quiet step takes 79, another one 280 to 370.
    static constexpr std::uint32_t kCostOfQuietStep = 1, kCostOfStep = 3, kCostOfState = 16;

    // In threads, of some 140 instructions each: a poll every 10 ms or so.
    static constexpr std::size_t kWorkPerPoll = std::size_t{1} << 18;

    struct Position {
        StateId state;
        bool entered_from = false;  // by kNoState positions
        bool forgotten = false;     // without state; its frontier is gone, too
    };
    struct Simulated {
        Frontier frontier;
        std::size_t counted = 0;  // its share of cursor_bytes_
    };
    struct State {
        Frontier frontier;
        RuleId at_end;
        bool decided;
        bool quiet;
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
    // The states along the text that enter_like_last() saw last.
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
    std::vector<Simulated> simulated_;  // of the positions in path_ without a state
    std::size_t cursor_bytes_ = 0;      // in simulated_, without the top
    Poll poll_;
    std::size_t work_left_ = kWorkPerPoll;  // until the next poll
    Trail trail_;

    bool has_room_ = false;  // the budget is for more than the start
    bool only_simulate_ = false;
    std::uint64_t read_since_clear_ = 0;
    std::uint64_t built_since_clear_ = 0;
    Frontier scratch_;
    DfaStats stats_;
};

}  // namespace shardrules::automata
