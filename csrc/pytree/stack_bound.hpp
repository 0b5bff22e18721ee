// How far a recursion may go down the C stack of its thread, which may be a small one
// (threading.stack_size, a native pool's). Asking costs a comparison; making a bound, an address
// that is kept per thread.
#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace shardrules::pytree {

class StackBound {
  public:
    StackBound();
    // Whether as much of the stack is used as a recursion may use. The rest is for what a level
    // calls: Python code, as a leaf's `.shape`, and the unwinding of all levels.
    bool is_reached() const { return here() < lowest_; }

  private:
    // Of the frame itself: AddressSanitizer may keep local variables elsewhere.
    static std::uintptr_t here() {
#if defined(_MSC_VER)
        return reinterpret_cast<std::uintptr_t>(_AddressOfReturnAddress());
#else
        return reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
#endif
    }

    std::uintptr_t lowest_;  // stacks grow down
};

}  // namespace shardrules::pytree
