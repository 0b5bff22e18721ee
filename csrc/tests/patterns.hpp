// For tests: encodings of patterns by hand (words of Op), and expectations.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <vector>

#include "automata/rule_matcher.hpp"

namespace shardrules::automata::testing {

using Words = std::vector<std::uint32_t>;

inline std::atomic<int> failures = 0;

#define EXPECT(condition)                                                       \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                         \
        }                                                                       \
    } while (false)

inline std::uint32_t word(Op op) { return static_cast<std::uint32_t>(op); }
inline Words literal(char32_t c) { return {static_cast<std::uint32_t>(c)}; }
inline Words cls(std::uint32_t number) { return {word(Op::kClass), number}; }
inline Words assertion(Assertion a) { return {word(Op::kAssert), static_cast<std::uint32_t>(a)}; }
inline Words joined(Words head, const std::vector<Words>& parts) {
    head.push_back(static_cast<std::uint32_t>(parts.size()));
    for (const Words& part : parts) head.insert(head.end(), part.begin(), part.end());
    return head;
}
inline Words sequence(const std::vector<Words>& parts) {
    return joined({word(Op::kSequence)}, parts);
}
inline Words alternate(const std::vector<Words>& parts) {
    return joined({word(Op::kAlternate)}, parts);
}
inline Words repeat(std::uint32_t min, std::uint32_t max, const Words& body) {
    Words out{word(Op::kRepeat), min, max};
    out.insert(out.end(), body.begin(), body.end());
    return out;
}
inline Words text(std::string_view s) {
    std::vector<Words> parts;
    for (const char c : s) parts.push_back(literal(static_cast<char32_t>(c)));
    return sequence(parts);
}

inline Text view(std::string_view s) { return {s.data(), s.size(), 1}; }

}  // namespace shardrules::automata::testing
