// Walks a pytree: feeds each path to the automaton key by key, asks the visitor for each leaf's
// answer, and builds the output tree. A leaf costs its own last key. Depth is bounded in levels and
// in bytes of the thread's stack (RecursionError). Knows nothing of specs or of what a rule means.
#pragma once

#include "leaf_visitor.hpp"

namespace shardrules::pytree {

inline constexpr std::size_t kMaxTreeDepth = 5000;

// The tree with each leaf replaced by the visitor's answer, in the structure that
// jax.tree_util.tree_map_with_path returns, except that dict keys stay in the input's order. Of
// siblings with equal keys, one may get the key objects of another. An error on the way gets a note
// with the path.
Ref map_tree(PyObject* tree, const PathStyle& path_style, automata::LazyDfa& dfa,
             LeafVisitor& visitor);

}  // namespace shardrules::pytree
