// The texts of keys as jax.tree_util.keystr writes them: ['a'], [0], .attribute. The texts of short
// dict keys are kept: "kernel" comes back thousands of times, and the step memo compares one and
// the same object by its address.
#pragma once

#include "tree_path.hpp"

namespace shardrules::pytree {

class KeystrTexts {
  public:
    KeystrTexts() : texts_(Ref::checked(PyDict_New())) {}
    Ref of(const Key& key);

  private:
    static constexpr Py_ssize_t kLongest = 32, kMostTexts = 4096;
    Ref texts_;  // {dict key: text}
};

}  // namespace shardrules::pytree
