// Bounds the C stack that a recursion may use; that of a thread may be small (threading.stack_size,
// a native pool). A check costs one comparison, a new bound a look-up of the thread's stack, which
// each thread does once.
#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace shardrules::pytree {

class StackBound {
  public:
    StackBound();
    // Whether the recursion has used its share of the stack. The rest is for what a level calls
    // (Python code, such as a leaf's `.shape`), and for unwinding all levels.
    bool is_reached() const { return here() < lowest_; }

  private:
    // Of the frame, since AddressSanitizer may put local variables elsewhere.
    static std::uintptr_t here() {
#if defined(_MSC_VER)
        return reinterpret_cast<std::uintptr_t>(_AddressOfReturnAddress());
#else
        return reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
#endif
    }

    std::uintptr_t lowest_ = 0;  // stacks grow down
};

}  // namespace shardrules::pytree
