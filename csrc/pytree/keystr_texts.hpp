// The texts of keys as jax.tree_util.keystr has them: ['a'], [0], .attribute. Those of short dict
// keys are remembered, for "kernel" comes back thousands of times, and as the same object costs the
// step memo nothing to recognise.
#pragma once

#include "tree_path.hpp"

namespace shardrules::pytree {

class KeystrTexts {
  public:
    KeystrTexts() : known_(Ref::checked(PyDict_New())) {}
    Ref of(const Key& key);

  private:
    static constexpr Py_ssize_t kLongest = 32, kMostKnown = 4096;
    Ref known_;  // dict of dict keys
};

}  // namespace shardrules::pytree
