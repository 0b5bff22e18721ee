#include "char_tests.hpp"

#include <stdexcept>

namespace shardrules::automata {

TestId CharTests::literal(char32_t c) {
    const auto [found, added] = literals_.try_emplace(c, static_cast<TestId>(tests_.size()));
    if (added) {
        Test test{{}, c, 0};
        if (c < kAsciiEnd) test.ascii.set(c);
        tests_.push_back(test);
    }
    return found->second;
}

void CharTests::add_class(const AsciiSet& ascii) {
    const auto number = static_cast<std::uint32_t>(classes_.size());
    classes_.push_back(static_cast<TestId>(tests_.size()));
    tests_.push_back({ascii, kCodePointEnd, number});
}

TestId CharTests::class_test(std::uint32_t number) const {
    if (number >= classes_.size()) throw std::invalid_argument("unknown character class");
    return classes_[number];
}

Alphabet::Alphabet(CharTests tests, Oracle oracle)
    : tests_(std::move(tests)), oracle_(std::move(oracle)) {
    const std::size_t words = (tests_.tests_.size() + 63) / 64;
    std::vector<Signature> signatures(kAsciiEnd, Signature(words, 0));
    for (TestId t = 0; t < tests_.tests_.size(); ++t) {
        const CharTests::Test& test = tests_.tests_[t];
        const std::uint64_t bit = std::uint64_t{1} << (t % 64);
        if (test.literal < kAsciiEnd) {
            signatures[test.literal][t / 64] |= bit;
        } else if (test.literal == kCodePointEnd) {
            for (char32_t c = 0; c < kAsciiEnd; ++c)
                if (test.ascii[c]) signatures[c][t / 64] |= bit;
        }
    }
    for (char32_t c = 0; c < kAsciiEnd; ++c) ascii_[c] = intern(signatures[c]);
}

CharClass Alphabet::non_ascii_class(char32_t c) {
    if (c >= kCodePointEnd) throw std::invalid_argument("not a code point");
    std::unique_ptr<Page>& page = pages_[c / kPage];
    if (!page) {
        page = std::make_unique<Page>();
        page->fill(kUnknown);
    }
    CharClass& slot = (*page)[c % kPage];
    if (slot == kUnknown) {
        Signature signature((tests_.tests_.size() + 63) / 64, 0);
        for (TestId t = 0; t < tests_.tests_.size(); ++t) {
            const CharTests::Test& test = tests_.tests_[t];
            const bool accepted =
                test.literal == kCodePointEnd ? oracle_(test.number, c) : test.literal == c;
            if (accepted) signature[t / 64] |= std::uint64_t{1} << (t % 64);
        }
        slot = intern(signature);
    }
    return slot;
}

CharClass Alphabet::intern(const Signature& signature) {
    const auto next = static_cast<CharClass>(classes_.size());
    const auto [found, added] = by_signature_.try_emplace(signature, next);
    if (added) {
        Class made{signature, {}, kNoTest, {}};
        for (TestId t = 0; t < tests_.tests_.size(); ++t) {
            if (((signature[t / 64] >> (t % 64)) & 1) == 0) continue;
            made.tests.push_back(t);
            if (tests_.is_literal(t)) made.literal = t;
        }
        const auto has = [&](const std::optional<TestId>& t) {
            return t && ((signature[*t / 64] >> (*t % 64)) & 1);
        };
        made.facts = {has(tests_.newline_), has(tests_.word_), has(tests_.ascii_word_)};
        classes_.push_back(std::move(made));
    }
    return found->second;
}

}  // namespace shardrules::automata
