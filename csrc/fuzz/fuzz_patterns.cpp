// Bytes as a pattern's code, decoded, built and matched. Malformed code is refused; well-formed
// code means what the reference says, whatever the memory budget.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "generate.hpp"

namespace {

using namespace shardrules::automata;
using namespace shardrules::automata::fuzz;

Words raw_words(std::span<const std::uint8_t> data) {
    Words code(data.size() / 4);
    if (!code.empty()) std::memcpy(code.data(), data.data(), code.size() * 4);
    return code;
}

// One word a byte: an operation where one may stand, and small numbers, so that the program stays
// small.
Words small_words(std::span<const std::uint8_t> data) {
    constexpr std::array<int, 6> kOperands = {1, 1, 0, 1, 2, 1};  // by the order of Op
    Words code;
    int operands = 0;
    for (const std::uint8_t byte : data) {
        const bool is_operation = operands == 0 && byte < kOperands.size();
        code.push_back(is_operation ? operation(byte) : byte);
        operands = is_operation ? kOperands[byte] : std::max(operands - 1, 0);
    }
    return code;
}

void only_decode(const Words& code) {
    CharTests tests;
    tests.add_class({});
    try {
        Syntax pattern = decode(code, tests);
        trim_for_search(pattern);
    } catch (const std::invalid_argument&) {
    }
}

void match_with_budget(const EncodedRules& rules, const std::u32string& text,
                       const std::vector<RuleId>& expected, std::size_t budget) {
    RuleMatcher matcher(rules, class_accepts, budget);
    for (int round = 0; round < 3; ++round) {
        MUST(matcher.first(view(text)) == (expected.empty() ? kNoRule : expected.front()));
        std::vector<RuleId> found;
        matcher.all(view(text), found);
        MUST(found == expected);
    }
    MUST(budget > 0 || matcher.stats().states_built == 2);  // the start of each search
}

void match_everywhere(const std::vector<Words>& rules, const std::u32string& text) {
    const EncodedRules code = encoded(rules);
    try {
        static_cast<void>(RuleMatcher(code, class_accepts, 0));
    } catch (const std::invalid_argument&) {
        return;
    } catch (const std::length_error&) {
        return;
    }
    const std::vector<RuleId> expected = expected_matches(rules, text);
    for (const std::size_t budget : {std::size_t{0}, std::size_t{2000}, std::size_t{1} << 20})
        match_with_budget(code, text, expected, budget);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::span<const std::uint8_t> input(data, size);
    Bytes bytes(input);
    const std::uint32_t mode = bytes.next(8);
    if (mode == 0) {
        only_decode(raw_words(input.subspan(size > 0 ? 1 : 0)));
        return 0;
    }
    const std::u32string text = text_from(bytes, 20);
    std::vector<Words> rules;
    if (mode == 1) {
        const std::size_t used = std::min(size, 2 + text.size());
        rules.push_back(small_words(input.subspan(used, std::min<std::size_t>(size - used, 40))));
    } else {
        for (std::uint32_t left = 1 + bytes.next(4); left > 0; --left)
            item_from(bytes, 4, rules.emplace_back());
    }
    match_everywhere(rules, text);
    return 0;
}
