#include "lazy_dfa.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace shardrules::automata {
namespace {

// Unless as many characters were read per state built, on average, a cleared cache did not pay: a
// state takes about 1,300 instructions to make, and spares 70 to 360 at each step through it (see
// kCostOfState), so it pays after 4 to 19 steps. RE2 has 10 as well.
constexpr std::uint64_t kStepsThatPayForAState = 10;
// Bytes of a state besides its members: 16 for each of two allocations, a node (40) and a bucket
// (8) of the index; rounded up.
constexpr std::size_t kStateOverhead = 96;

std::size_t bytes_in(const Frontier& frontier) {
    return frontier.threads.capacity() * sizeof(Thread) +
           frontier.matched.capacity() * sizeof(RuleId);
}

template <class Visit>
void with_units(const Text& text, Visit visit) {
    const auto units = [&](const auto* p) { visit(p, p + text.length); };
    switch (text.width) {
        case 1: return units(static_cast<const std::uint8_t*>(text.data));
        case 2: return units(static_cast<const char16_t*>(text.data));
        case 4: return units(static_cast<const char32_t*>(text.data));
        default: throw std::invalid_argument("a code unit is 1, 2 or 4 bytes wide");
    }
}

}  // namespace

LazyDfa::LazyDfa(std::shared_ptr<const Program> program, Oracle oracle, Search search,
                 std::size_t memory_budget, Poll poll)
    : program_(std::move(program)),
      alphabet_(program_->tests(), std::move(oracle)),
      determinizer_(*program_, alphabet_, search),
      budget_(memory_budget),
      index_(64, ByFrontier{this}, ByFrontier{this}),
      poll_(std::move(poll)) {
    widen_rows();
    Frontier start;
    determinizer_.start(start);
    path_.push_back({add_state(start)});
    has_room_ = bytes_ <= budget_;
}

void LazyDfa::begin() {
    path_.shrink_to(1);
    only_simulate_ = !has_room_;
    if (cursor_bytes_ > budget_) forget_all_but(0);
}

// Adds a position at the same place as the top. A place that is entered from twice is worth a
// state.
void LazyDfa::push() {
    const std::size_t top = path_.size() - 1;
    if (path_[top].state == kNoState && path_[top].entered_from && !only_simulate_) {
        const StateId state = intern(simulated_[top].frontier);
        path_[top].state = state;
    }
    path_[top].entered_from = true;
    path_.push_back({path_[top].state});
    if (path_[top].state == kNoState) {
        if (simulated_.size() < path_.size()) simulated_.resize(path_.size());
        simulated_[top + 1].frontier = simulated_[top].frontier;
        count(simulated_[top]);
        if (cursor_bytes_ > budget_) forget_all_but(top + 1);
    }
}

// Positions below the top do not change until the cursor comes back.
void LazyDfa::count(Simulated& position) {
    const std::size_t bytes = bytes_in(position.frontier);
    cursor_bytes_ += bytes - position.counted;
    position.counted = bytes;
}

void LazyDfa::forget_all_but(std::size_t top) {
    for (std::size_t i = 0; i < simulated_.size(); ++i) {
        if (i == top) continue;
        if (i < top && path_[i].state == kNoState) path_[i].forgotten = true;
        simulated_[i] = {};
    }
    cursor_bytes_ = top < simulated_.size() ? simulated_[top].counted : 0;
}

void LazyDfa::replay(Text text) {
    const std::size_t top = path_.size() - 1;
    path_[top].forgotten = false;
    if (simulated_.size() <= top) simulated_.resize(top + 1);
    simulated_[top].frontier = states_[path_[0].state].frontier;
    with_units(text, [&](const auto* p, const auto* end) { simulate(p, end); });
}

void LazyDfa::poll() {
    work_left_ = kWorkPerPoll;
    if (poll_) poll_();
}

void LazyDfa::extend(Text text) {
    if (decided()) return;
    read_since_clear_ += text.length;
    with_units(text, [&](const auto* p, const auto* end) { run(p, end, nullptr); });
}

void LazyDfa::enter_like_last(Text text) {
    push();
    if (position() == kNoState || decided()) return extend(text);
    const std::size_t shared = shared_prefix(text);
    const std::size_t skipped = shared * static_cast<std::size_t>(text.width);
    if (shared == 0) {
        trail_.from = position();
        trail_.epoch = epoch();
        trail_.width = text.width;
    } else {
        path_.back().state = trail_.states[shared - 1];
    }
    const auto* bytes = static_cast<const unsigned char*>(text.data);
    const std::size_t size = text.length * static_cast<std::size_t>(text.width);
    trail_.text.resize(skipped);
    trail_.text.insert(trail_.text.end(), bytes + skipped, bytes + size);
    trail_.states.resize(shared);
    read_since_clear_ += text.length;
    with_units({bytes + skipped, text.length - shared, text.width},
               [&](const auto* p, const auto* end) { run(p, end, &trail_.states); });
    if (trail_.epoch != epoch()) trail_.from = kNoState;
}

// The number of characters at the text's front whose states the trail has.
std::size_t LazyDfa::shared_prefix(const Text& text) const {
    if (trail_.from != position() || trail_.epoch != epoch() || trail_.width != text.width)
        return 0;
    const auto width = static_cast<std::size_t>(text.width);
    const std::size_t most = std::min(trail_.states.size(), text.length) * width;
    const auto* bytes = static_cast<const unsigned char*>(text.data);
    const auto differs = std::mismatch(bytes, bytes + most, trail_.text.begin());
    return static_cast<std::size_t>(differs.first - bytes) / width;
}

// Steps the top through known transitions and those that are worth a state, and simulates the rest.
// The states are appended to the trail.
template <class Unit>
void LazyDfa::run(const Unit* text, const Unit* end, std::vector<StateId>* trail) {
    StateId at = position();
    if (at == kNoState) return simulate(text, end);
    const CharClass* ascii = alphabet_.ascii();
    bool build = false;
    for (; text != end; ++text) {
        const auto unit = static_cast<char32_t>(*text);
        CharClass c;
        if (unit < kAsciiEnd) [[likely]] {
            c = ascii[unit];
        } else {
            c = alphabet_.class_of(unit);
            if (alphabet_.class_count() > (std::size_t{1} << shift_)) widen_rows();
        }
        const std::size_t transition = (std::size_t{at} << shift_) | c;
        StateId next = table_[transition];
        if (next > kLastState) [[unlikely]] {
            build = build || worth_building(transition, states_[at]);
            if (!build) {
                if (simulated_.size() < path_.size()) simulated_.resize(path_.size());
                simulated_[path_.size() - 1].frontier = states_[at].frontier;
                path_.back().state = kNoState;
                return simulate(text, end);
            }
            next = build_transition(at, c);
        }
        at = next;
        if (trail != nullptr) trail->push_back(at);
    }
    path_.back().state = at;
}

bool LazyDfa::worth_building(std::size_t transition, const State& from) {
    if (only_simulate_) return false;
    const auto number = static_cast<std::uint32_t>(transition);
    Candidates& set = candidates_[number * 0x9E3779B1U >> 24];
    const auto is_it = [&](const Candidate& candidate) { return candidate.transition == number; };
    const auto candidate = std::find_if(set.begin(), set.end() - 1, is_it);
    if (!is_it(*candidate)) *candidate = {number, 0};
    std::rotate(set.begin(), candidate, candidate + 1);
    set.front().cost += from.only_literals ? kCostOfLiteralStep : kCostOfStep;
    return set.front().cost >= kCostOfState;
}

template <class Unit>
void LazyDfa::simulate(const Unit* text, const Unit* end) {
    Frontier& top = simulated_[path_.size() - 1].frontier;
    Frontier *at = &top, *next = &scratch_;
    for (; text != end && !determinizer_.decided(*at); ++text) {
        const CharClass c = alphabet_.class_of(static_cast<char32_t>(*text));
        ++stats_.simulated_steps;
        if (determinizer_.only_literals(*at) && determinizer_.step_in_literals(*at, c)) continue;
        determinizer_.step(*at, c, *next);
        std::swap(at, next);
        worked(1 + at->threads.size());
    }
    if (at != &top) std::swap(top, scratch_);
    if (alphabet_.class_count() > (std::size_t{1} << shift_)) widen_rows();
}

LazyDfa::StateId LazyDfa::build_transition(StateId from, CharClass c) {
    determinizer_.step(states_[from].frontier, c, scratch_);
    worked(1 + scratch_.threads.size());
    const std::uint64_t clears = stats_.cache_clears;
    const StateId to = intern(scratch_);
    // After a clear, `from` is another state's number.
    if (stats_.cache_clears == clears) table_[(std::size_t{from} << shift_) | c] = to;
    return to;
}

LazyDfa::StateId LazyDfa::intern(Frontier& frontier) {
    Determinizer::canonicalize(frontier);
    if (const auto found = index_.find(frontier); found != index_.end()) return *found;
    if (bytes_ > budget_ || states_.size() > kLastState) clear_cache();
    if (const auto found = index_.find(frontier); found != index_.end()) return *found;
    return add_state(frontier);
}

LazyDfa::StateId LazyDfa::add_state(const Frontier& frontier) {
    const auto id = static_cast<StateId>(states_.size());
    const std::size_t row = std::size_t{1} << shift_;
    const bool decided = determinizer_.decided(frontier);
    states_.push_back(
        {frontier, determinizer_.at_end(frontier), decided, determinizer_.only_literals(frontier)});
    // A decided state leads to itself.
    table_.resize(table_.size() + row, decided ? id : kUnknown);
    index_.insert(id);
    bytes_ += sizeof(State) + frontier.threads.size() * sizeof(Thread) +
              frontier.matched.size() * sizeof(RuleId) + row * sizeof(StateId) + kStateOverhead;
    ++stats_.states_built;
    ++built_since_clear_;
    return id;
}

// Drops every state except those of the cursor's positions. If these are too many, the lower ones
// are dropped, too, and their positions forgotten.
void LazyDfa::clear_cache() {
    only_simulate_ = read_since_clear_ < kStepsThatPayForAState * built_since_clear_;
    std::vector<Frontier> kept;
    kept.reserve(path_.size());
    for (std::size_t i = 0; i < path_.size(); ++i) {
        const StateId state = path_[i].state;
        kept.push_back(state == kNoState ? Frontier{} : states_[state].frontier);
    }
    index_.clear();
    states_.clear();
    table_.clear();
    bytes_ = 0;
    for (std::size_t i = path_.size(); i-- > 0;) {
        if (path_[i].state == kNoState) continue;
        if (bytes_ > budget_ && i > 0) {
            path_[i].state = kNoState;
            path_[i].forgotten = true;
            continue;
        }
        const auto found = index_.find(kept[i]);
        path_[i].state = found != index_.end() ? *found : add_state(kept[i]);
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
    std::uint64_t h = (std::uint64_t{frontier.literal} << 32) | frontier.best;
    const auto mix = [&](std::uint64_t word) {
        h = (h ^ word) * 0x9E3779B97F4A7C15ULL;
        h ^= h >> 29;
    };
    mix(frontier.matched.size());
    for (const RuleId rule : frontier.matched) mix(rule);
    for (const Thread& t : frontier.threads)
        mix((std::uint64_t{t.node} << 32) | (std::uint64_t{t.ahead} << 1) | t.accepting);
    return static_cast<std::size_t>(h);
}

}  // namespace shardrules::automata
