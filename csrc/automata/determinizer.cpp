#include "determinizer.hpp"

#include <algorithm>
#include <optional>

namespace shardrules::automata {
namespace {

// Conditions on the text ahead. Assertions look at one character, or at a final newline and the
// end.
enum Ahead : std::uint8_t {
    kNothing = 0,
    kWord = 1,
    kNotWord = 2,  // or the end
    kAsciiWord = 4,
    kNotAsciiWord = 8,   // or the end
    kNewlineOrEnd = 16,  // multi-line $
    kLastNewline = 32,   // $: the end, or one newline and the end
    kTextEnd = 64,
    kSomething = 128,  // not the end
};

// The condition that remains after a character; nullopt if the character violates it.
std::optional<std::uint16_t> consume(std::uint16_t ahead, const CharFacts& c) {
    if (ahead == kNothing) return kNothing;
    const bool wrong = (ahead & kTextEnd) || ((ahead & kWord) && !c.word) ||
                       ((ahead & kNotWord) && c.word) || ((ahead & kAsciiWord) && !c.ascii_word) ||
                       ((ahead & kNotAsciiWord) && c.ascii_word) ||
                       ((ahead & (kNewlineOrEnd | kLastNewline)) && !c.newline);
    if (wrong) return std::nullopt;
    return (ahead & kLastNewline) ? kTextEnd : kNothing;
}

bool holds_at_end(std::uint16_t ahead) { return !(ahead & (kWord | kAsciiWord | kSomething)); }

std::uint16_t boundary(bool is_boundary, bool word_behind, std::uint16_t word,
                       std::uint16_t not_word) {
    return is_boundary != word_behind ? word : not_word;
}

// Whether the root does more than read literals after the start of the text. Rules that it accepts
// have matched at the start.
bool has_late_events(const Program& program) {
    const auto is_late = [](const EpsilonEdge& edge) {
        return edge.assertion != Assertion::kBegin;
    };
    return !program.class_edges(kRoot).empty() ||
           std::ranges::any_of(program.epsilon_edges(kRoot), is_late);
}

}  // namespace

Determinizer::Determinizer(const Program& program, const Alphabet& alphabet, Search search)
    : program_(program),
      alphabet_(alphabet),
      search_(search),
      restarts_(has_late_events(program)),
      marks_(program.node_count(), 0) {}

void Determinizer::start(Frontier& out) {
    out = {};
    new_round({true, {}});
    arrive(kRoot, out);
    drop_losers(kNoRule, out);
    canonicalize(out);
}

inline bool Determinizer::visit(NodeId node, std::uint16_t ahead) {
    if (ahead != kNothing) return constrained_.insert((std::uint64_t{node} << 16) | ahead).second;
    if (marks_[node] == round_) return false;
    marks_[node] = round_;
    return true;
}

// Adds a thread. Most are at a node that only reads a character.
inline void Determinizer::add(NodeId node, std::uint16_t ahead, Frontier& out) {
    if (program_.first_rule(node) >= out.best) return;
    if (!program_.only_reads(node))
        add_closure(node, ahead, out);
    else if (visit(node, ahead))
        out.threads.push_back({node, ahead, 0});
}

// Visits the nodes that the character leads to from the node, without literal edges of the literal
// trie.
template <class Visit>
void Determinizer::each_target(NodeId node, CharClass c, Visit visit) const {
    const TestId literal = alphabet_.literal_of(c);
    if (literal != kNoTest && !program_.in_literal_trie(node)) {
        const NodeId target = program_.literal_child(node, literal);
        if (target != kNoNode) visit(target);
    }
    const std::span<const CharEdge> edges = program_.class_edges(node);
    const std::vector<TestId>& tests = alphabet_.tests_of(c);
    if (edges.size() <= 4 * tests.size() + 4) {
        for (const CharEdge& edge : edges)
            if (alphabet_.accepts(c, edge.test)) visit(edge.target);
        return;
    }
    // Many edges: look up the few tests that accept the character.
    for (const TestId test : tests) {
        auto edge = std::ranges::lower_bound(edges, test, {}, &CharEdge::test);
        for (; edge != edges.end() && edge->test == test; ++edge) visit(edge->target);
    }
}

void Determinizer::step(const Frontier& from, CharClass c, Frontier& out) {
    const CharFacts& facts = alphabet_.facts(c);
    out.best = from.best;
    if (search_ == Search::kAll) out.matched = from.matched;
    out.threads.clear();
    new_round({false, facts});
    for (const Thread& thread : from.threads) {
        const std::optional<std::uint16_t> ahead = consume(thread.ahead, facts);
        if (!ahead) continue;
        if (thread.accepting) {
            if (*ahead == kNothing)
                accept(program_.accepts(thread.node), out);
            else
                out.threads.push_back({thread.node, *ahead, 1});
            continue;
        }
        each_target(thread.node, c, [&](NodeId target) { add(target, *ahead, out); });
    }
    arrive(next_literal(from.literal, c), out);
    drop_losers(from.best, out);
}

bool Determinizer::step_in_literals(Frontier& at, CharClass c) const {
    const NodeId to = next_literal(at.literal, c);
    if (program_.output_link(to) != kRoot || program_.first_rule(to) >= at.best) return false;
    at.literal = to;
    return true;
}

RuleId Determinizer::at_end(const Frontier& frontier) const {
    RuleId best = frontier.best;
    for (const Thread& thread : frontier.threads)
        if (thread.accepting && holds_at_end(thread.ahead))
            best = std::min(best, program_.accepts(thread.node));
    return best;
}

void Determinizer::all_at_end(const Frontier& frontier, std::vector<RuleId>& rules) const {
    rules = frontier.matched;
    for (const Thread& thread : frontier.threads)
        if (thread.accepting && holds_at_end(thread.ahead))
            add_rule(program_.accepts(thread.node), rules);
}

void Determinizer::new_round(const Behind& behind) {
    behind_ = behind;
    if (++round_ == 0) {  // wrapped: old marks would look new
        std::ranges::fill(marks_, 0);
        round_ = 1;
    }
    if (!constrained_.empty()) constrained_.clear();
}

void Determinizer::accept(RuleId rule, Frontier& out) const {
    if (search_ == Search::kFirst)
        out.best = std::min(out.best, rule);
    else
        add_rule(rule, out.matched);
}

// Adds the rule and those of the same pattern.
void Determinizer::add_rule(RuleId rule, std::vector<RuleId>& rules) const {
    for (; rule != kNoRule; rule = program_.also_accepts(rule)) {
        const auto place = std::ranges::lower_bound(rules, rule);
        if (place == rules.end() || *place != rule) rules.insert(place, rule);
    }
}

NodeId Determinizer::next_literal(NodeId from, CharClass c) const {
    const TestId test = alphabet_.literal_of(c);
    if (test == kNoTest) return kRoot;
    for (;; from = program_.suffix(from)) {
        const NodeId to = program_.literal_child(from, test);
        if (to != kNoNode) return to;
        if (from == kRoot) return kRoot;
    }
}

// Adds the threads at a node of the literal trie, at its suffixes, and at the root, since a match
// may begin anywhere.
void Determinizer::arrive(NodeId literal, Frontier& out) {
    out.literal = literal;
    NodeId node = program_.output_link(literal);
    for (; node != kRoot; node = program_.output_link(program_.suffix(node)))
        add_closure(node, kNothing, out);
    if (behind_.start || restarts_) add_closure(kRoot, kNothing, out);
}

// Adds a thread and all that it reaches without consuming a character.
void Determinizer::add_closure(NodeId node, std::uint16_t ahead, Frontier& out) {
    stack_.push_back({node, ahead, 0});
    while (!stack_.empty()) {
        const Thread at = stack_.back();
        stack_.pop_back();
        if (program_.first_rule(at.node) >= out.best || !visit(at.node, at.ahead)) continue;
        if (const RuleId rule = program_.accepts(at.node); rule != kNoRule) {
            if (at.ahead == kNothing)
                accept(rule, out);
            else
                out.threads.push_back({at.node, at.ahead, 1});
        }
        const bool alive = program_.in_literal_trie(at.node)
                               ? !program_.class_edges(at.node).empty()
                               : program_.has_edges(at.node);
        if (alive) out.threads.push_back(at);
        for (const EpsilonEdge& edge : program_.epsilon_edges(at.node)) cross(edge, at);
    }
}

void Determinizer::cross(const EpsilonEdge& edge, const Thread& at) {
    std::uint16_t ahead = at.ahead;
    const CharFacts& last = behind_.last;
    switch (edge.assertion) {
        case Assertion::kNone: break;
        case Assertion::kBegin:
            if (!behind_.start) return;
            break;
        case Assertion::kBeginLine:
            if (!behind_.start && !last.newline) return;
            break;
        case Assertion::kDollar: ahead |= kLastNewline; break;
        case Assertion::kEndLine: ahead |= kNewlineOrEnd; break;
        case Assertion::kEnd: ahead |= kTextEnd; break;
        case Assertion::kWordBoundary:
        case Assertion::kNotWordBoundary:
            ahead |=
                boundary(edge.assertion == Assertion::kWordBoundary, last.word, kWord, kNotWord);
            break;
        case Assertion::kAsciiWordBoundary:
        case Assertion::kNotAsciiWordBoundary:
            ahead |= boundary(edge.assertion == Assertion::kAsciiWordBoundary, last.ascii_word,
                              kAsciiWord, kNotAsciiWord);
            break;
    }
    const bool non_boundary = edge.assertion == Assertion::kNotWordBoundary ||
                              edge.assertion == Assertion::kNotAsciiWordBoundary;
    if (non_boundary && behind_.start && program_.empty_text_has_no_non_boundary())
        ahead |= kSomething;
    stack_.push_back({edge.target, ahead, 0});
}

// Drops threads that were added before the best rule was known and cannot win.
void Determinizer::drop_losers(RuleId best_before, Frontier& out) const {
    const auto lost = [&](NodeId node) { return program_.first_rule(node) >= out.best; };
    while (out.literal != kRoot && lost(out.literal)) out.literal = program_.suffix(out.literal);
    if (out.best == best_before) return;
    std::erase_if(out.threads, [&](const Thread& t) { return lost(t.node); });
}

void Determinizer::canonicalize(Frontier& frontier) {
    std::vector<Thread>& threads = frontier.threads;
    std::ranges::sort(threads);
    threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
}

}  // namespace shardrules::automata
