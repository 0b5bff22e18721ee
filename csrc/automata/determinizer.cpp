#include "determinizer.hpp"

#include <algorithm>
#include <optional>

namespace shardrules::automata {
namespace {

// What must follow. Assertions look one character ahead, or to the end over one final newline.
enum Ahead : std::uint16_t {
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

// What is left to demand once a character is consumed; nullopt if it is the wrong one.
std::optional<std::uint16_t> consume(std::uint16_t ahead, const CharFacts& c) {
    if (ahead == kNothing) return kNothing;
    const bool wrong = (ahead & kTextEnd) || ((ahead & kWord) && !c.word) ||
                       ((ahead & kNotWord) && c.word) || ((ahead & kAsciiWord) && !c.ascii_word) ||
                       ((ahead & kNotAsciiWord) && c.ascii_word) ||
                       ((ahead & (kNewlineOrEnd | kLastNewline)) && !c.newline);
    if (wrong) return std::nullopt;
    return (ahead & kLastNewline) ? kTextEnd : kNothing;
}

bool holds_at_end(std::uint16_t ahead) {
    return !(ahead & (kWord | kAsciiWord | kSomething));
}

std::uint16_t boundary(bool wanted, bool word_behind, std::uint16_t word, std::uint16_t not_word) {
    return wanted != word_behind ? word : not_word;
}

}  // namespace

Determinizer::Determinizer(const Program& program, const Alphabet& alphabet,
                           std::vector<bool>* collect)
    : program_(program), alphabet_(alphabet), collect_(collect), marks_(program.node_count(), 0) {}

void Determinizer::start(Frontier& out) {
    out.threads.clear();
    out.best = kNoRule;
    new_round();
    follow({kRoot, kNothing, 0}, {true, {}}, out);
    finish(out);
}

void Determinizer::step(const Frontier& from, CharClass c, Frontier& out) {
    const CharFacts& facts = alphabet_.facts(c);
    const Behind behind{false, facts};
    out.threads.clear();
    out.best = from.best;
    new_round();
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
        each_target(thread.node, c,
                    [&](NodeId target) { follow({target, *ahead, 0}, behind, out); });
    }
    // The search may begin anywhere.
    follow({kRoot, kNothing, 0}, behind, out);
    finish(out);
}

RuleId Determinizer::at_end(const Frontier& frontier) const {
    RuleId best = frontier.best;
    for (const Thread& thread : frontier.threads) {
        if (!thread.accepting || !holds_at_end(thread.ahead)) continue;
        const RuleId rule = program_.accepts(thread.node);
        best = std::min(best, rule);
        if (collect_)
            for (RuleId r = rule; r != kNoRule; r = program_.also_accepts(r)) (*collect_)[r] = true;
    }
    return best;
}

void Determinizer::new_round() {
    if (++round_ == 0) {  // wrapped: old marks would look new
        std::fill(marks_.begin(), marks_.end(), 0);
        round_ = 1;
    }
    constrained_.clear();
}

bool Determinizer::visit(const Thread& thread) {
    if (thread.ahead != kNothing)
        return constrained_.insert((std::uint64_t{thread.node} << 16) | thread.ahead).second;
    if (marks_[thread.node] == round_) return false;
    marks_[thread.node] = round_;
    return true;
}

void Determinizer::accept(RuleId rule, Frontier& out) const {
    if (collect_) {
        for (RuleId r = rule; r != kNoRule; r = program_.also_accepts(r)) (*collect_)[r] = true;
    } else {
        out.best = std::min(out.best, rule);
    }
}

// Everything that `first` reaches without consuming a character.
void Determinizer::follow(Thread first, const Behind& behind, Frontier& out) {
    stack_.clear();
    stack_.push_back(first);
    while (!stack_.empty()) {
        const Thread at = stack_.back();
        stack_.pop_back();
        if (program_.first_rule(at.node) >= out.best || !visit(at)) continue;
        if (const RuleId rule = program_.accepts(at.node); rule != kNoRule) {
            if (at.ahead == kNothing)
                accept(rule, out);
            else
                out.threads.push_back({at.node, at.ahead, 1});
        }
        // The root stays alive, edges or not: an assertion may hold further on.
        if (at.node == kRoot || !program_.edges(at.node).empty()) out.threads.push_back(at);
        for (const Jump& jump : program_.jumps(at.node)) {
            std::uint16_t ahead = at.ahead;
            const CharFacts& last = behind.last;
            switch (jump.assertion) {
                case Assertion::kNone: break;
                case Assertion::kBegin:
                    if (!behind.start) continue;
                    break;
                case Assertion::kBeginLine:
                    if (!behind.start && !last.newline) continue;
                    break;
                case Assertion::kDollar: ahead |= kLastNewline; break;
                case Assertion::kEndLine: ahead |= kNewlineOrEnd; break;
                case Assertion::kEnd: ahead |= kTextEnd; break;
                case Assertion::kWordBoundary:
                case Assertion::kNotWordBoundary:
                    ahead |= boundary(jump.assertion == Assertion::kWordBoundary, last.word, kWord,
                                      kNotWord);
                    break;
                case Assertion::kAsciiWordBoundary:
                case Assertion::kNotAsciiWordBoundary:
                    ahead |= boundary(jump.assertion == Assertion::kAsciiWordBoundary,
                                      last.ascii_word, kAsciiWord, kNotAsciiWord);
                    break;
            }
            const bool non_boundary = jump.assertion == Assertion::kNotWordBoundary ||
                                      jump.assertion == Assertion::kNotAsciiWordBoundary;
            if (non_boundary && behind.start && program_.empty_text_has_no_non_boundary())
                ahead |= kSomething;
            stack_.push_back({jump.target, ahead, 0});
        }
    }
}

void Determinizer::finish(Frontier& out) const {
    // Threads added before the best rule was known may be unable to win by now.
    std::erase_if(out.threads,
                  [&](const Thread& t) { return program_.first_rule(t.node) >= out.best; });
    std::sort(out.threads.begin(), out.threads.end());
    out.threads.erase(std::unique(out.threads.begin(), out.threads.end()), out.threads.end());
}

template <class Visit>
void Determinizer::each_target(NodeId node, CharClass c, Visit visit) const {
    const std::span<const CharEdge> edges = program_.edges(node);
    const std::vector<TestId>& tests = alphabet_.tests_of(c);
    if (edges.size() <= 4 * tests.size() + 4) {
        for (const CharEdge& edge : edges)
            if (alphabet_.accepts(c, edge.test)) visit(edge.target);
        return;
    }
    // A wide node, such as the root of many rules: look the few accepting tests up instead.
    for (const TestId test : tests) {
        const auto found = std::lower_bound(
            edges.begin(), edges.end(), test,
            [](const CharEdge& edge, TestId wanted) { return edge.test < wanted; });
        if (found != edges.end() && found->test == test) visit(found->target);
    }
}

}  // namespace shardrules::automata
