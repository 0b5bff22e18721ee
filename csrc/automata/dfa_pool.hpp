// The lazy DFAs of one program. Each search borrows one, so searches may nest, and overlap between
// threads, without a lock while they run. The states of a DFA stay for the next search. Borrowing
// costs one lock. Safe to use from any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lazy_dfa.hpp"

namespace shardrules::automata {

class DfaPool {
  public:
    // memory_budget: that of each DFA.
    DfaPool(std::shared_ptr<const Program> program, Oracle oracle, Search search,
            std::size_t memory_budget, Poll poll = {});

    class Lease {
      public:
        explicit Lease(DfaPool& owner);
        Lease(Lease&&) = default;
        Lease& operator=(Lease&&) = delete;
        ~Lease();
        LazyDfa& operator*() const { return *dfa_; }
        LazyDfa* operator->() const { return dfa_.get(); }

      private:
        DfaPool& owner_;
        int exceptions_before_;
        std::unique_ptr<LazyDfa> dfa_;
        DfaStats before_;
    };

    // Of all searches that have ended.
    DfaStats stats() const;

  private:
    std::shared_ptr<const Program> program_;
    Oracle oracle_;
    Search search_;
    std::size_t memory_budget_;
    Poll poll_;
    mutable std::mutex mutex_;  // guards what follows
    std::vector<std::unique_ptr<LazyDfa>> idle_;
    DfaStats total_;
};

}  // namespace shardrules::automata
