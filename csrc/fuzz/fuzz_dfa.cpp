// A cursor that goes up and down a tree of paths, in DFAs of every memory budget at once: all know
// at each place what the reference finds in the whole path.
#include <list>

#include "generate.hpp"

namespace {

using namespace shardrules::automata;
using namespace shardrules::automata::fuzz;

constexpr std::size_t kLongestPath = 30;

class Cursors {
  public:
    Cursors(const std::vector<Words>& rules, std::size_t budget) : rules_(rules) {
        for (const std::size_t bytes : {std::size_t{0}, budget, std::size_t{1} << 20}) {
            RuleMatcher& matcher = matchers_.emplace_back(encoded(rules), class_accepts, bytes);
            firsts_.push_back(matcher.lend(Search::kFirst));
            alls_.push_back(matcher.lend(Search::kAll));
        }
    }

    void move(Bytes& bytes) {
        const std::uint32_t what = bytes.next(8);
        if (what == 0) {
            lengths_ = {0};
            path_.clear();
            each([](LazyDfa& dfa) { dfa.begin(); });
        } else if (what < 3) {
            if (lengths_.size() == 1) return;
            lengths_.pop_back();
            path_.resize(lengths_.back());
            each([](LazyDfa& dfa) { dfa.leave(); });
        } else {
            const std::u32string text = text_from(bytes, kLongestPath - path_.size());
            path_ += text;
            const bool extends = what == 3 && lengths_.size() > 1;
            if (!extends) lengths_.push_back(0);
            lengths_.back() = path_.size();
            each([&](LazyDfa& dfa) {
                if (extends)
                    dfa.extend(view(text));
                else if (what == 4)
                    dfa.enter_like_last(view(text));
                else
                    dfa.enter(view(text));
            });
        }
        check();
    }

  private:
    template <class Call>
    void each(Call call) {
        for (const auto& dfa : firsts_) call(*dfa);
        for (const auto& dfa : alls_) call(*dfa);
    }

    void check() {
        each([&](LazyDfa& dfa) {
            if (dfa.forgotten()) dfa.replay(view(path_));
        });
        const std::vector<RuleId> expected = expected_matches(rules_, path_);
        for (const auto& dfa : firsts_)
            MUST(dfa->winner() == (expected.empty() ? kNoRule : expected.front()));
        for (const auto& dfa : alls_) {
            std::vector<RuleId> found;
            dfa->matches(found);
            MUST(found == expected);
        }
    }

    const std::vector<Words>& rules_;
    std::list<RuleMatcher> matchers_;  // outlive their cursors
    std::vector<RuleMatcher::Cursor> firsts_, alls_;
    std::u32string path_;
    std::vector<std::size_t> lengths_{0};  // of the path at each position
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes({data, size});
    const std::size_t budget = std::size_t{64} * bytes.next(256);
    std::vector<Words> rules;
    for (std::uint32_t left = 1 + bytes.next(3); left > 0; --left)
        item_from(bytes, 3, rules.emplace_back());
    Cursors cursors(rules, budget);
    for (int moves = 0; moves < 200 && !bytes.empty(); ++moves) cursors.move(bytes);
    return 0;
}
