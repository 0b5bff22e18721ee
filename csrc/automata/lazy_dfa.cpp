#include "lazy_dfa.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace shardrules::automata {
namespace {

// A cache that is cleared before each of its states was stepped through this often, on average,
// does not pay for itself.
constexpr std::uint64_t kStepsThatPayForAState = 10;
// Allocator and hash-index share of one state, roughly.
constexpr std::size_t kStateOverhead = 96;

template <class Visit>
auto with_units(Text text, Visit visit) {
    switch (text.width) {
        case 1: {
            const auto* p = static_cast<const std::uint8_t*>(text.data);
            return visit(p, p + text.length);
        }
        case 2: {
            const auto* p = static_cast<const char16_t*>(text.data);
            return visit(p, p + text.length);
        }
        case 4: {
            const auto* p = static_cast<const char32_t*>(text.data);
            return visit(p, p + text.length);
        }
        default: throw std::invalid_argument("a code unit is 1, 2 or 4 bytes wide");
    }
}

}  // namespace

LazyDfa::LazyDfa(std::shared_ptr<const Program> program, Oracle oracle, std::size_t memory_budget)
    : program_(std::move(program)),
      alphabet_(program_->tests(), std::move(oracle)),
      determinizer_(*program_, alphabet_),
      budget_(memory_budget),
      index_(64, ByFrontier{this}, ByFrontier{this}) {
    widen_rows();
    Frontier start;
    determinizer_.start(start);
    path_.push_back(add_state(start));
}

void LazyDfa::begin() {
    path_.resize(1);
    simulating_ = false;
}

LazyDfa::StateId LazyDfa::advance(StateId from, Text text) {
    if (states_[from].decided) return from;
    read_since_clear_ += text.length;
    return with_units(text, [&](const auto* p, const auto* end) {
        return simulating_ ? simulate(from, p, end) : run(from, p, end);
    });
}

template <class Unit>
LazyDfa::StateId LazyDfa::run(StateId at, const Unit* text, const Unit* end) {
    const CharClass* ascii = alphabet_.ascii();
    for (; text != end; ++text) {
        const auto unit = static_cast<char32_t>(*text);
        CharClass c;
        if (unit < kAsciiEnd) [[likely]] {
            c = ascii[unit];
        } else {
            c = alphabet_.class_of(unit);
            if (alphabet_.class_count() > (std::size_t{1} << shift_)) widen_rows();
        }
        StateId next = table_[(std::size_t{at} << shift_) | c];
        if (next == kUnknown) [[unlikely]] {
            next = build_transition(at, c);
            if (simulating_) return simulate(next, text + 1, end);
        }
        at = next;
    }
    return at;
}

template <class Unit>
LazyDfa::StateId LazyDfa::simulate(StateId from, const Unit* text, const Unit* end) {
    Frontier at = states_[from].frontier;
    Frontier next;
    for (; text != end && !at.decided(); ++text) {
        determinizer_.step(at, alphabet_.class_of(static_cast<char32_t>(*text)), next);
        std::swap(at, next);
        ++stats_.simulated_steps;
    }
    if (alphabet_.class_count() > (std::size_t{1} << shift_)) widen_rows();
    return intern(at);
}

LazyDfa::StateId LazyDfa::build_transition(StateId from, CharClass c) {
    determinizer_.step(states_[from].frontier, c, scratch_);
    const std::uint64_t clears = stats_.cache_clears;
    const StateId to = intern(scratch_);
    // A clear has renumbered the states; then the transition is simply not remembered.
    if (stats_.cache_clears == clears) table_[(std::size_t{from} << shift_) | c] = to;
    return to;
}

LazyDfa::StateId LazyDfa::intern(const Frontier& frontier) {
    if (const auto found = index_.find(frontier); found != index_.end()) return *found;
    if (bytes_ > budget_) make_room();
    if (const auto found = index_.find(frontier); found != index_.end()) return *found;
    return add_state(frontier);
}

LazyDfa::StateId LazyDfa::add_state(const Frontier& frontier) {
    const auto id = static_cast<StateId>(states_.size());
    const std::size_t row = std::size_t{1} << shift_;
    states_.push_back({frontier, determinizer_.at_end(frontier), frontier.decided()});
    // What is decided stays where it is, whatever follows.
    table_.resize(table_.size() + row, frontier.decided() ? id : kUnknown);
    index_.insert(id);
    bytes_ += sizeof(State) + frontier.threads.size() * sizeof(Thread) +
              row * sizeof(StateId) + kStateOverhead;
    ++stats_.states_built;
    ++built_since_clear_;
    return id;
}

// Forgets every state but those that the cursor stands on.
void LazyDfa::make_room() {
    simulating_ = read_since_clear_ < kStepsThatPayForAState * built_since_clear_;
    std::vector<Frontier> kept;
    kept.reserve(path_.size());
    for (const StateId s : path_) kept.push_back(states_[s].frontier);
    index_.clear();
    states_.clear();
    table_.clear();
    bytes_ = 0;
    for (std::size_t i = 0; i < path_.size(); ++i) {
        const auto found = index_.find(kept[i]);
        path_[i] = found != index_.end() ? *found : add_state(kept[i]);
    }
    ++stats_.cache_clears;
    read_since_clear_ = built_since_clear_ = 0;
}

void LazyDfa::widen_rows() {
    const unsigned old_shift = shift_;
    while ((std::size_t{1} << shift_) < alphabet_.class_count()) ++shift_;
    if (states_.empty()) return;
    std::vector<StateId> wider(states_.size() << shift_, kUnknown);
    const std::size_t old_row = std::size_t{1} << old_shift;
    for (StateId s = 0; s < states_.size(); ++s) {
        const auto row = table_.begin() + static_cast<std::ptrdiff_t>(s * old_row);
        const auto to = wider.begin() + static_cast<std::ptrdiff_t>(std::size_t{s} << shift_);
        if (states_[s].decided)
            std::fill_n(to, std::size_t{1} << shift_, s);
        else
            std::copy_n(row, old_row, to);
    }
    bytes_ += (wider.size() - table_.size()) * sizeof(StateId);
    table_ = std::move(wider);
}

std::size_t LazyDfa::ByFrontier::hash(const Frontier& frontier) {
    std::uint64_t h = frontier.best;
    for (const Thread& t : frontier.threads) {
        h ^= (std::uint64_t{t.node} << 32) | (std::uint64_t{t.ahead} << 1) | t.accepting;
        h *= 0x9E3779B97F4A7C15ULL;
        h ^= h >> 29;
    }
    return static_cast<std::size_t>(h);
}

std::vector<RuleId> all_matches(const Program& program, const Oracle& oracle, Text text) {
    Alphabet alphabet(program.tests(), oracle);
    std::vector<bool> matched(program.rule_count(), false);
    Determinizer determinizer(program, alphabet, &matched);
    Frontier at, next;
    determinizer.start(at);
    with_units(text, [&](const auto* p, const auto* end) {
        for (; p != end; ++p) {
            determinizer.step(at, alphabet.class_of(static_cast<char32_t>(*p)), next);
            std::swap(at, next);
        }
    });
    determinizer.at_end(at);
    std::vector<RuleId> rules;
    for (RuleId r = 0; r < matched.size(); ++r)
        if (matched[r]) rules.push_back(r);
    return rules;
}

}  // namespace shardrules::automata
