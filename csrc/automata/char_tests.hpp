// The character tests of the patterns (a literal, or a class such as [^/] or \w), and the alphabet:
// characters for which all tests agree are one CharClass. The class of an ASCII character is
// computed once, that of another one when it first occurs, by asking an Oracle, so no Unicode table
// is needed here. Look-ups are O(1). One user at a time.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace shardrules::automata {

using TestId = std::uint32_t;
inline constexpr TestId kNoTest = 0xFFFFFFFF;
using CharClass = std::uint32_t;

inline constexpr char32_t kAsciiEnd = 128;
inline constexpr char32_t kCodePointEnd = 0x110000;
using AsciiSet = std::bitset<kAsciiEnd>;

// Whether class `number` of CharTests::add_class accepts this non-ASCII character. May throw, which
// leaves the alphabet unchanged.
using Oracle = std::function<bool(std::uint32_t number, char32_t c)>;

class CharTests {
  public:
    TestId literal(char32_t c);
    // Classes are numbered 0, 1, ... in the order of these calls.
    void add_class(const AsciiSet& ascii);
    TestId class_test(std::uint32_t number) const;  // std::invalid_argument when unknown
    bool is_literal(TestId test) const { return tests_[test].literal != kCodePointEnd; }

    // The tests of assertions. Those that no pattern uses do not split the alphabet.
    void use_newline() { newline_ = literal(U'\n'); }
    void use_word(std::uint32_t number) { word_ = class_test(number); }
    void use_ascii_word(std::uint32_t number) { ascii_word_ = class_test(number); }

  private:
    friend class Alphabet;
    struct Test {
        AsciiSet ascii;
        char32_t literal;      // kCodePointEnd for a class
        std::uint32_t number;  // of the class
    };
    std::vector<Test> tests_;
    std::unordered_map<char32_t, TestId> literals_;
    std::vector<TestId> classes_;
    std::optional<TestId> newline_, word_, ascii_word_;
};

// What assertions test.
struct CharFacts {
    bool newline = false, word = false, ascii_word = false;
};

class Alphabet {
  public:
    Alphabet(CharTests tests, Oracle oracle);

    CharClass class_of(char32_t c) { return c < kAsciiEnd ? ascii_[c] : non_ascii_class(c); }
    const CharClass* ascii() const { return ascii_.data(); }
    std::size_t class_count() const { return classes_.size(); }

    bool accepts(CharClass c, TestId test) const {
        return (classes_[c].accepted[test / 64] >> (test % 64)) & 1;
    }
    // The test of the class's only character, or kNoTest.
    TestId literal_of(CharClass c) const { return classes_[c].literal; }
    // The tests that accept the class, ascending.
    const std::vector<TestId>& tests_of(CharClass c) const { return classes_[c].tests; }
    const CharFacts& facts(CharClass c) const { return classes_[c].facts; }

  private:
    using Signature = std::vector<std::uint64_t>;
    struct Class {
        Signature accepted;
        std::vector<TestId> tests;
        TestId literal;
        CharFacts facts;
    };
    static constexpr std::size_t kPage = 256;
    static constexpr CharClass kUnknown = 0xFFFFFFFF;
    using Page = std::array<CharClass, kPage>;

    CharClass non_ascii_class(char32_t c);
    CharClass intern(const Signature& signature);

    CharTests tests_;
    Oracle oracle_;
    std::array<CharClass, kAsciiEnd> ascii_{};
    std::vector<std::unique_ptr<Page>> pages_{kCodePointEnd / kPage};
    std::vector<Class> classes_;
    std::map<Signature, CharClass> by_signature_;
};

}  // namespace shardrules::automata
