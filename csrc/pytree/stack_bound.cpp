#include "stack_bound.hpp"

#include <algorithm>
#include <cstddef>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace shardrules::pytree {
namespace {

constexpr std::size_t kKiB = 1024;
// Kept free: half of a small stack; of a large one, the most that Python code of a level was seen
// to need.
constexpr std::size_t kMostKept = 256 * kKiB;
// If a thread's stack is not known: every thread that runs Python has this much.
constexpr std::size_t kAssumed = 128 * kKiB;

struct Stack {
    std::uintptr_t lowest = 0, end = 0;  // zeros: not known
};

Stack stack_of_this_thread() {
#if defined(__linux__)
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {};
    void* lowest = nullptr;
    std::size_t size = 0;
    const bool is_known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
    pthread_attr_destroy(&attributes);
    if (!is_known) return {};
    const auto start = reinterpret_cast<std::uintptr_t>(lowest);
    return {start, start + size};
#elif defined(__APPLE__)
    const auto end = reinterpret_cast<std::uintptr_t>(pthread_get_stackaddr_np(pthread_self()));
    return {end - pthread_get_stacksize_np(pthread_self()), end};
#else
    return {};
#endif
}

}  // namespace

StackBound::StackBound() {
    // On Linux the first thread's stack is read from /proc, which takes as long as a small tree.
    thread_local const Stack stack = stack_of_this_thread();
    const std::uintptr_t now = here();
    // A coroutine may run on a stack of its own.
    if (now < stack.lowest || now >= stack.end) {
        lowest_ = now - std::min<std::uintptr_t>(now, kAssumed);
    } else {
        lowest_ = stack.lowest + std::min((stack.end - stack.lowest) / 2, kMostKept);
    }
}

}  // namespace shardrules::pytree
