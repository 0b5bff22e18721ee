// The syntax tree of one pattern, as the automata see it: characters are tests by number, groups
// are gone, and everything left is regular. Decoding and trimming are linear in the encoded size
// and bounded in depth. Knows nothing of Python or of how a pattern was written.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "char_tests.hpp"

namespace shardrules::automata {

// What must hold between two characters of the text. The numbers are part of the encoding.
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

// Leading words of the encoding (prefix form, 32-bit words);
// python/shardrules/_matching/patterns.py writes it. A code point is the literal; operations come
// behind the last one.
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

// Drops what a search can do without: an optional repeat at either end of the pattern. Whether
// `.*kernel.*` is found somewhere is whether `kernel` is.
void trim_for_search(Syntax& pattern);

// Words that two syntax trees share exactly if they are the same tree.
void append_key(const Syntax& syntax, std::vector<std::uint32_t>& key);

}  // namespace shardrules::automata
