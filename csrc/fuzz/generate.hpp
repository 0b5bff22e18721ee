// Rule lists and texts out of the bytes that a fuzzer makes, and what the rules match by a
// reference that is as plain as can be: sets of positions, a pattern's code interpreted word by
// word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "automata/rule_matcher.hpp"

namespace shardrules::automata::fuzz {

using Words = std::vector<std::uint32_t>;

// Unlike assert, not only in debug builds; the fuzzer keeps the input.
#define MUST(condition)                                                         \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (false)

class Bytes {
  public:
    explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}
    bool empty() const { return data_.empty(); }
    // 0 when there are no more.
    std::uint32_t next(std::uint32_t end) {
        if (data_.empty()) return 0;
        const std::uint32_t byte = data_.front();
        data_ = data_.subspan(1);
        return byte % end;
    }

  private:
    std::span<const std::uint8_t> data_;
};

inline constexpr std::u32string_view kCharacters = U"ab/_B0\n \u00e9\u00c9\u4e00\U0001f600";
inline constexpr std::uint32_t kClasses = 4, kWordClass = 1, kAsciiWordClass = 2;

inline bool is_ascii_word(char32_t c) {
    return c == 'a' || c == 'b' || c == 'B' || c == '_' || c == '0';
}

inline bool class_accepts(std::uint32_t number, char32_t c) {
    switch (number) {
        case 0: return c != '\n';
        case kWordClass: return is_ascii_word(c) || (c >= kAsciiEnd && c < 0x10000);
        case kAsciiWordClass: return is_ascii_word(c);
        default: return c == 'a' || c == '/' || c == 0xE9;
    }
}

inline std::u32string text_from(Bytes& bytes, std::size_t longest) {
    std::u32string text;
    for (std::size_t left = bytes.next(static_cast<std::uint32_t>(longest) + 1); left > 0; --left)
        text.push_back(kCharacters[bytes.next(static_cast<std::uint32_t>(kCharacters.size()))]);
    return text;
}

inline std::uint32_t operation(std::uint32_t number) { return kCodePointEnd + number; }

// Appends the code of one item.
inline void item_from(Bytes& bytes, int depth, Words& code) {
    const auto children = [&](std::uint32_t most) {
        const std::uint32_t count = bytes.next(most + 1);
        code.push_back(count);
        for (std::uint32_t i = 0; i < count; ++i) item_from(bytes, depth - 1, code);
    };
    const std::uint32_t kind = bytes.next(depth > 0 ? 7 : 4);
    if (kind == 0) {
        code.push_back(kCharacters[bytes.next(static_cast<std::uint32_t>(kCharacters.size()))]);
        return;
    }
    const std::uint32_t op = operation(kind - 1);
    code.push_back(op);
    switch (static_cast<Op>(op)) {
        case Op::kClass: code.push_back(bytes.next(kClasses)); break;
        case Op::kAssert: code.push_back(1 + bytes.next(kLastAssertion)); break;
        case Op::kNever: break;
        case Op::kAlternate: children(3); break;
        case Op::kRepeat: {
            const std::uint32_t min = bytes.next(4), more = bytes.next(5);
            code.insert(code.end(), {min, more == 4 ? kUnbounded : min + more});
            item_from(bytes, depth - 1, code);
            break;
        }
        case Op::kSequence: children(4); break;
    }
}

// What a code matches in a text of at most 31 characters. Sets of positions are bits.
class Reference {
  public:
    explicit Reference(std::u32string_view text) : text_(text) {}

    bool found(const Words& code) {
        std::size_t at = 0;
        return item(code, at, (std::uint32_t{2} << text_.size()) - 1) != 0;
    }

  private:
    // Where the item at `at` ends if it begins at one of `from`; moves `at` behind it.
    std::uint32_t item(const Words& code, std::size_t& at, std::uint32_t from) {
        const std::uint32_t word = code[at++];
        if (word < kCodePointEnd) return step(from, [&](char32_t c) { return c == word; });
        const auto op = static_cast<Op>(word);
        const std::uint32_t first = op == Op::kNever ? 0 : code[at++];
        switch (op) {
            case Op::kClass: return step(from, [&](char32_t c) { return class_accepts(first, c); });
            case Op::kAssert: return holding(static_cast<Assertion>(first), from);
            case Op::kNever: return 0;
            case Op::kAlternate: {
                std::uint32_t out = 0;
                for (std::uint32_t i = 0; i < first; ++i) out |= item(code, at, from);
                return out;
            }
            case Op::kRepeat: return repeat(code, at, from, first);
            case Op::kSequence:
                for (std::uint32_t i = 0; i < first; ++i) from = item(code, at, from);
                return from;
        }
        std::abort();
    }

    // Positions only grow, so no set changes any more after as many rounds as there are positions.
    std::uint32_t repeat(const Words& code, std::size_t& at, std::uint32_t from,
                         std::uint32_t min) {
        constexpr std::uint32_t kEnough = 40;
        const std::uint32_t max = code[at++];
        const std::size_t body = at;
        static_cast<void>(item(code, at, 0));
        const auto again = [&](std::uint32_t positions) {
            std::size_t start = body;
            return item(code, start, positions);
        };
        for (std::uint32_t i = 0; i < std::min(min, kEnough); ++i) from = again(from);
        std::uint32_t out = from;
        for (std::uint32_t i = 0; i < std::min(max - min, kEnough); ++i) out |= from = again(from);
        return out;
    }

    template <class Accepts>
    std::uint32_t step(std::uint32_t from, Accepts accepts) const {
        std::uint32_t out = 0;
        for (std::size_t i = 0; i < text_.size(); ++i)
            if (((from >> i) & 1) != 0 && accepts(text_[i])) out |= std::uint32_t{2} << i;
        return out;
    }

    std::uint32_t holding(Assertion assertion, std::uint32_t from) const {
        std::uint32_t out = 0;
        for (std::size_t i = 0; i <= text_.size(); ++i)
            if (((from >> i) & 1) != 0 && holds(assertion, i)) out |= std::uint32_t{1} << i;
        return out;
    }

    bool holds(Assertion assertion, std::size_t i) const {
        const std::size_t n = text_.size();
        const auto newline_at = [&](std::size_t k) { return k < n && text_[k] == '\n'; };
        const auto is = [&](std::uint32_t number, std::size_t k) {
            return k < n && class_accepts(number, text_[k]);
        };
        const auto boundary = [&](std::uint32_t number) {
            return (i > 0 && is(number, i - 1)) != is(number, i);
        };
        switch (assertion) {
            case Assertion::kNone: return true;
            case Assertion::kBegin: return i == 0;
            case Assertion::kBeginLine: return i == 0 || newline_at(i - 1);
            case Assertion::kDollar: return i == n || (i + 1 == n && newline_at(i));
            case Assertion::kEndLine: return i == n || newline_at(i);
            case Assertion::kEnd: return i == n;
            case Assertion::kWordBoundary: return boundary(kWordClass);
            case Assertion::kNotWordBoundary: return n > 0 && !boundary(kWordClass);
            case Assertion::kAsciiWordBoundary: return boundary(kAsciiWordClass);
            case Assertion::kNotAsciiWordBoundary: return n > 0 && !boundary(kAsciiWordClass);
        }
        std::abort();
    }

    std::u32string_view text_;
};

inline std::vector<RuleId> expected_matches(const std::vector<Words>& rules,
                                            std::u32string_view text) {
    std::vector<RuleId> out;
    for (std::size_t rule = 0; rule < rules.size(); ++rule)
        if (Reference(text).found(rules[rule])) out.push_back(static_cast<RuleId>(rule));
    return out;
}

inline EncodedRules encoded(const std::vector<Words>& rules) {
    EncodedRules out{.patterns = {rules.begin(), rules.end()},
                     .word_class = kWordClass,
                     .ascii_word_class = kAsciiWordClass,
                     .empty_text_has_no_non_boundary = true};
    for (std::uint32_t number = 0; number < kClasses; ++number) {
        AsciiSet& ascii = out.classes.emplace_back();
        for (char32_t c = 0; c < kAsciiEnd; ++c) ascii[c] = class_accepts(number, c);
    }
    return out;
}

inline Text view(const std::u32string& text) { return {text.data(), text.size(), 4}; }

}  // namespace shardrules::automata::fuzz
