#include "syntax.hpp"

#include <stdexcept>
#include <utility>

namespace shardrules::automata {
namespace {

class Decoder {
  public:
    Decoder(std::span<const std::uint32_t> code, CharTests& tests) : code_(code), tests_(tests) {}

    Syntax pattern() {
        Syntax root = item(0);
        if (at_ != code_.size()) throw std::invalid_argument("pattern code: words left over");
        return root;
    }

  private:
    std::uint32_t word() {
        if (at_ == code_.size()) throw std::invalid_argument("pattern code: too short");
        return code_[at_++];
    }

    Syntax item(int depth) {
        using Kind = Syntax::Kind;
        if (depth > kMaxDepth) throw std::invalid_argument("pattern code: nested too deeply");
        Syntax out;
        const std::uint32_t first = word();
        if (first < kCodePointEnd) {
            out.kind = Kind::kChar;
            out.test = tests_.literal(static_cast<char32_t>(first));
            return out;
        }
        switch (static_cast<Op>(first)) {
            case Op::kClass:
                out.kind = Kind::kChar;
                out.test = tests_.class_test(word());
                return out;
            case Op::kAssert:
                out.kind = Kind::kAssert;
                out.assertion = assertion(word());
                return out;
            case Op::kNever: out.kind = Kind::kNever; return out;
            case Op::kAlternate:
                out.kind = Kind::kAlternate;
                children(out, word(), depth);
                return out;
            case Op::kRepeat:
                out.kind = Kind::kRepeat;
                out.min = word();
                out.max = word();
                if (out.min > out.max) throw std::invalid_argument("pattern code: min > max");
                children(out, 1, depth);
                return out;
            case Op::kSequence:
                children(out, word(), depth);
                if (out.children.size() != 1) return out;
                return std::move(out.children.front());
        }
        throw std::invalid_argument("pattern code: unknown operation");
    }

    void children(Syntax& parent, std::uint32_t count, int depth) {
        if (count > code_.size() - at_) throw std::invalid_argument("pattern code: too short");
        parent.children.reserve(count);
        for (std::uint32_t i = 0; i < count; ++i) parent.children.push_back(item(depth + 1));
    }

    Assertion assertion(std::uint32_t number) {
        if (number == 0 || number > kLastAssertion)
            throw std::invalid_argument("pattern code: unknown assertion");
        const auto kind = static_cast<Assertion>(number);
        if (kind == Assertion::kBeginLine || kind == Assertion::kDollar ||
            kind == Assertion::kEndLine)
            tests_.use_newline();
        return kind;
    }

    std::span<const std::uint32_t> code_;
    std::size_t at_ = 0;
    CharTests& tests_;
};

enum class End : std::uint8_t { kFront, kBack };

void trim(Syntax& syntax, End end) {
    using Kind = Syntax::Kind;
    switch (syntax.kind) {
        case Kind::kRepeat:
            // A search needs only `min` copies at the edge.
            syntax.max = syntax.min;
            return;
        case Kind::kAlternate:
            for (Syntax& branch : syntax.children) trim(branch, end);
            return;
        case Kind::kSequence:
            while (!syntax.children.empty()) {
                Syntax& edge =
                    end == End::kFront ? syntax.children.front() : syntax.children.back();
                trim(edge, end);
                if (!edge.empty()) return;
                if (end == End::kFront)
                    syntax.children.erase(syntax.children.begin());
                else
                    syntax.children.pop_back();
            }
            return;
        case Kind::kChar:
        case Kind::kAssert:
        case Kind::kNever: return;
    }
}

}  // namespace

Syntax decode(std::span<const std::uint32_t> code, CharTests& tests) {
    return Decoder(code, tests).pattern();
}

void trim_for_search(Syntax& pattern) {
    trim(pattern, End::kFront);
    trim(pattern, End::kBack);
}

void append_key(const Syntax& syntax, std::vector<std::uint32_t>& key) {
    key.push_back(static_cast<std::uint32_t>(syntax.kind));
    switch (syntax.kind) {
        case Syntax::Kind::kChar: key.push_back(syntax.test); return;
        case Syntax::Kind::kAssert:
            key.push_back(static_cast<std::uint32_t>(syntax.assertion));
            return;
        case Syntax::Kind::kNever: return;
        case Syntax::Kind::kRepeat:
            key.push_back(syntax.min);
            key.push_back(syntax.max);
            break;
        case Syntax::Kind::kAlternate:
        case Syntax::Kind::kSequence: break;
    }
    key.push_back(static_cast<std::uint32_t>(syntax.children.size()));
    for (const Syntax& child : syntax.children) append_key(child, key);
}

}  // namespace shardrules::automata
