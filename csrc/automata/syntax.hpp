// The syntax tree of one regular pattern: characters are numbers of tests, and there are no groups.
// Decoding and trimming are linear in the encoded size and bounded in depth. Knows nothing of
// Python or of regex syntax.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "char_tests.hpp"

namespace shardrules::automata {

// A condition between two characters of the text. The numbers are part of the encoding.
enum class Assertion : std::uint8_t {
    kNone = 0,
    kBegin = 1,            // \A, and ^ without MULTILINE
    kBeginLine = 2,        // ^ with MULTILINE
    kDollar = 3,           // $ without MULTILINE: the end, or before a final newline
    kEndLine = 4,          // $ with MULTILINE
    kEnd = 5,              // \Z
    kWordBoundary = 6,     // \b
    kNotWordBoundary = 7,  // \B
    kAsciiWordBoundary = 8,
    kNotAsciiWordBoundary = 9,
};
inline constexpr std::uint32_t kLastAssertion = 9;

// First words of items in the encoding (prefix form, 32-bit words), which
// python/shardrules/_rules/patterns.py writes. A literal is its code point; operations have the
// numbers after the last code point.
enum class Op : std::uint32_t {
    kClass = kCodePointEnd,  // number of a class given to CharTests::add_class
    kAssert,                 // Assertion
    kNever,                  // matches nothing
    kAlternate,              // n, then n items
    kRepeat,                 // min, max, then one item
    kSequence,               // n, then n items
};

inline constexpr std::uint32_t kUnbounded = 0xFFFFFFFF;
inline constexpr int kMaxDepth = 200;

struct Syntax {
    enum class Kind : std::uint8_t { kChar, kAssert, kNever, kAlternate, kRepeat, kSequence };
    Kind kind = Kind::kSequence;
    Assertion assertion = Assertion::kNone;
    TestId test = 0;        // kChar
    std::uint32_t min = 0;  // kRepeat
    std::uint32_t max = 0;
    std::vector<Syntax> children{};

    bool empty() const {
        return (kind == Kind::kSequence && children.empty()) || (kind == Kind::kRepeat && max == 0);
    }
};

// Decodes one pattern, numbering its literals in `tests`.
// Throws std::invalid_argument on a code that is malformed or deeper than kMaxDepth.
Syntax decode(std::span<const std::uint32_t> code, CharTests& tests);

// Drops optional repeats at both ends of the pattern: a search finds `.*kernel.*` where it finds
// `kernel`.
void trim_for_search(Syntax& pattern);

// Appends words that are equal exactly for equal trees.
void append_key(const Syntax& syntax, std::vector<std::uint32_t>& key);

}  // namespace shardrules::automata
