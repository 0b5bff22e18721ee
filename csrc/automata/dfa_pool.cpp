#include "dfa_pool.hpp"

#include <exception>
#include <utility>

namespace shardrules::automata {
namespace {

// DFAs kept for the next search; more than one is idle only after searches overlapped.
constexpr std::size_t kIdleKept = 4;

}  // namespace

DfaPool::DfaPool(std::shared_ptr<const Program> program, Oracle oracle, Search search,
                 std::size_t memory_budget, Poll poll)
    : program_(std::move(program)),
      oracle_(std::move(oracle)),
      search_(search),
      memory_budget_(memory_budget),
      poll_(std::move(poll)) {
    idle_.reserve(kIdleKept);  // so that giving one back cannot fail
}

DfaStats DfaPool::stats() const {
    const std::scoped_lock lock(mutex_);
    return total_;
}

DfaPool::Lease::Lease(DfaPool& owner)
    : owner_(owner), exceptions_before_(std::uncaught_exceptions()) {
    {
        const std::scoped_lock lock(owner.mutex_);
        if (!owner.idle_.empty()) {
            dfa_ = std::move(owner.idle_.back());
            owner.idle_.pop_back();
        }
    }
    if (!dfa_)
        dfa_ = std::make_unique<LazyDfa>(owner.program_, owner.oracle_, owner.search_,
                                         owner.memory_budget_, owner.poll_);
    else
        before_ = dfa_->stats();
    dfa_->begin();
}

DfaPool::Lease::~Lease() {
    if (!dfa_) return;  // moved on
    // A search that failed may have stopped in the middle of a change to its DFA.
    const bool failed = std::uncaught_exceptions() > exceptions_before_;
    const DfaStats& after = dfa_->stats();
    const std::scoped_lock lock(owner_.mutex_);
    owner_.total_.states_built += after.states_built - before_.states_built;
    owner_.total_.cache_clears += after.cache_clears - before_.cache_clears;
    owner_.total_.simulated_steps += after.simulated_steps - before_.simulated_steps;
    if (!failed && owner_.idle_.size() < kIdleKept) owner_.idle_.push_back(std::move(dfa_));
}

}  // namespace shardrules::automata
