// Correction against a plain restatement of the policies, over all small cases.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <vector>

#include "sharding/correction.hpp"
#include "sharding/logical.hpp"

namespace {

using namespace shardrules::sharding;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// One dimension, by the words of the header.
Kept restated(const std::vector<std::int64_t>& axes, std::int64_t unit, const Correction& policy,
              std::int64_t size) {
    const auto fits = [&](Kept chosen) {
        std::int64_t parts = 1;
        for (std::size_t i = 0; i < axes.size(); ++i)
            if ((chosen >> i) & 1 && axes[i] > 0) parts *= axes[i];
        return size % (parts == 1 ? 1 : parts * unit) == 0;
    };
    Kept all = 0;
    bool seen_absent = false;
    for (std::size_t i = 0; i < axes.size(); ++i) {
        seen_absent |= axes[i] == kAbsentAxis;
        const bool goes =
            policy.absent == AxisPolicy::kPrefix ? seen_absent : axes[i] == kAbsentAxis;
        if (policy.absent == AxisPolicy::kKeep || !goes) all |= Kept{1} << i;
    }
    if (seen_absent && policy.absent == AxisPolicy::kDrop) all = 0;
    if (policy.indivisible == AxisPolicy::kKeep || fits(all)) return all;
    if (policy.indivisible == AxisPolicy::kDrop) return 0;
    Kept prefix = 0, greedy = 0;
    for (std::size_t i = 0; i < axes.size(); ++i) {
        const Kept bit = Kept{1} << i;
        if ((all & bit) == 0) continue;
        const Kept up_to_here = all & ((bit << 1) - 1);
        if (fits(up_to_here)) prefix = up_to_here;
        if (fits(greedy | bit)) greedy |= bit;
    }
    return policy.indivisible == AxisPolicy::kPrefix ? prefix : greedy;
}

void all_small_cases() {
    constexpr AxisPolicy kAll[] = {AxisPolicy::kDrop, AxisPolicy::kDropAxis, AxisPolicy::kPrefix,
                                   AxisPolicy::kKeep};
    const std::vector<std::int64_t> sizes = {0, 1, 2, 3, 4};
    for (const std::int64_t a : sizes)
        for (const std::int64_t b : sizes)
            for (const std::int64_t c : sizes)
                for (const std::int64_t unit : {1, 2, 3})
                    for (const AxisPolicy absent : kAll)
                        for (const AxisPolicy indivisible : kAll) {
                            const std::vector<std::int64_t> axes = {a, b, c};
                            const SpecDim dim{axes, unit};
                            const Corrector corrector({&dim, 1}, {absent, indivisible});
                            for (std::int64_t size = 0; size <= 48; ++size)
                                expect(corrector.kept(1, [&](std::size_t) { return size; }) ==
                                           restated(axes, unit, {absent, indivisible}, size),
                                       "a small case");
                        }
}

void bits_run_over_all_dimensions() {
    const std::vector<SpecDim> dims = {{{2, 3}, 1}, {{}, 1}, {{4}, 1}};
    const Corrector corrector(dims, {AxisPolicy::kDrop, AxisPolicy::kDrop});
    const auto kept = [&](std::vector<std::int64_t> shape) {
        return corrector.kept(shape.size(), [&](std::size_t d) { return shape[d]; });
    };
    expect(kept({6, 1, 4}) == 0b111, "all fit");
    expect(kept({6, 1, 5}) == 0b011, "the last does not");
    expect(kept({5, 1, 4}) == 0b100, "the first do not");
    expect(kept({6, 1}) == 0b011, "a dimension that is not there keeps nothing");
    expect(kept({}) == 0, "nor does a scalar");
}

void refuses() {
    const auto refused = [](std::vector<SpecDim> dims) {
        try {
            const Corrector corrector(dims, {AxisPolicy::kDrop, AxisPolicy::kDrop});
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    expect(refused({{std::vector<std::int64_t>(65, 2), 1}}), "65 axes");
    expect(!refused({{std::vector<std::int64_t>(64, 2), 1}}), "64 axes");
    expect(refused({{{-1}, 1}}), "a negative axis size");
    expect(refused({{{2}, 0}}), "a unit of zero");
}

void sizes_that_overflow() {
    const std::int64_t huge = std::int64_t{1} << 62;
    const SpecDim dim{{huge, huge}, huge};
    const Corrector corrector({&dim, 1}, {AxisPolicy::kDrop, AxisPolicy::kPrefix});
    expect(corrector.kept(1, [](std::size_t) { return INT64_MAX; }) == 0, "the largest size");
    expect(corrector.kept(1, [](std::size_t) { return std::int64_t{0}; }) == 3, "an empty one");
}

// Rules by priority, restated: walk all of them, whatever name they are on.
std::vector<std::uint32_t> restated(const std::vector<LogicalRule>& rules,
                                    const std::vector<std::int64_t>& sizes,
                                    const std::vector<NamedDim>& dims,
                                    const std::vector<std::int64_t>& dim_sizes,  // -1: none
                                    AxisPolicy indivisible) {
    std::vector<std::uint32_t> winners(dims.size(), kNone);
    std::vector<bool> used(sizes.size());
    for (std::uint32_t index = 0; index < rules.size(); ++index)
        for (std::size_t dim = 0; dim < dims.size(); ++dim) {
            if (dims[dim].name != rules[index].name || winners[dim] != kNone) continue;
            std::vector<std::int64_t> axes;
            bool free = true;
            for (const AxisId axis : rules[index].axes) {
                free = free && !used[axis];
                axes.push_back(sizes[axis]);
            }
            const Kept kept =
                dim_sizes[dim] >= 0
                    ? restated(axes, 1, {AxisPolicy::kKeep, indivisible}, dim_sizes[dim])
                    : ~Kept{0};
            if (!free || (!axes.empty() && kept == 0)) continue;
            winners[dim] = index;
            for (std::size_t i = 0; i < axes.size(); ++i)
                if ((kept >> i) & 1) used[rules[index].axes[i]] = true;
        }
    return winners;
}

void logical_rules_by_priority() {
    const std::vector<std::int64_t> sizes = {2, 3, 4};
    std::uint32_t seed = 7;
    const auto random = [&](std::uint32_t below) {
        seed = seed * 1664525 + 1013904223;
        return (seed >> 16) % below;
    };
    for (int run = 0; run < 20000; ++run) {
        std::vector<LogicalRule> rules(random(10));
        for (LogicalRule& rule : rules) {
            rule.name = random(4);
            for (AxisId axis = 0; axis < sizes.size(); ++axis)
                if (random(3) == 0) rule.axes.push_back(axis);
        }
        std::vector<NamedDim> dims;
        for (NameId name = 0; name < 5; ++name)
            if (random(2) == 0) dims.push_back({name, {}, {}});
        std::vector<std::int64_t> dim_sizes(dims.size(), -1);
        for (std::size_t dim = 0; dim < dims.size(); ++dim) {
            if (random(2) != 0) continue;
            const std::int64_t size = dim_sizes[dim] = random(25);
            dims[dim].divides = [size](std::uint64_t divisor) {
                return is_multiple(size, divisor);
            };
        }
        constexpr AxisPolicy kPolicies[] = {AxisPolicy::kDrop, AxisPolicy::kDropAxis,
                                            AxisPolicy::kPrefix, AxisPolicy::kKeep};
        const AxisPolicy indivisible = kPolicies[run % 4];
        const LogicalRuleSet compiled(rules, sizes, Precedence::kPriority, indivisible);
        const Resolution result = compiled.resolve(dims);
        expect(result.rules == restated(rules, sizes, dims, dim_sizes, indivisible),
               "rules by priority");
        std::size_t on_dims = 0;
        for (const LogicalRule& rule : rules)
            for (const NamedDim& dim : dims) on_dims += rule.name == dim.name;
        std::size_t won = 0;
        for (const std::uint32_t rule : result.rules) won += rule != kNone;
        expect(won + result.lost.size() == on_dims, "each rule on a name wins or loses");
    }
    const LogicalRuleSet one({{0, {0}}}, {2}, Precedence::kPriority, AxisPolicy::kDrop);
    expect(one.resolve(std::vector<NamedDim>{{0, {}, {}}, {kNone, {0}, {}}}).rules[0] == kNone,
           "an axis that another dimension has already");
    const LogicalRuleSet last({{0, {0}}, {1, {0}}, {0, {}}}, {2}, Precedence::kLast,
                              AxisPolicy::kDrop);
    const Resolution result = last.resolve(std::vector<NamedDim>{
        {0, {}, {}}, {1, {}, [](std::uint64_t) { return false; }}, {2, {}, {}}, {0, {}, {}}});
    expect(result.rules == std::vector<std::uint32_t>{2, 1, kNone, 2}, "the last rule wins");
}

}  // namespace

int main() {
    all_small_cases();
    bits_run_over_all_dimensions();
    refuses();
    sizes_that_overflow();
    logical_rules_by_priority();
    std::puts("sharding: ok");
    return 0;
}
