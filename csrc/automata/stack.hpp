// A stack of plain values for inner loops. A push is a comparison and a store; std::vector's is a
// call, which costs a walk 50 instructions per node and leaf.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace shardrules::automata {

template <class T>
class Stack {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    void push_back(T value) {
        if (size_ == capacity_) [[unlikely]]
            grow();
        values_[size_++] = value;
    }
    void pop_back() { --size_; }
    void shrink_to(std::size_t size) { size_ = size; }
    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    T& operator[](std::size_t i) { return values_[i]; }
    const T& operator[](std::size_t i) const { return values_[i]; }
    T& back() { return values_[size_ - 1]; }
    const T& back() const { return values_[size_ - 1]; }

  private:
    void grow() {
        const std::size_t more = 2 * capacity_ + 8;
        auto larger = std::make_unique<T[]>(more);
        std::copy_n(values_.get(), size_, larger.get());
        values_ = std::move(larger);
        capacity_ = more;
    }

    std::unique_ptr<T[]> values_;
    std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace shardrules::automata
