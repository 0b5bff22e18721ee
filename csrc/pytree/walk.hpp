// One walk over a pytree: feeds each leaf's path to the automaton key by key, asks the visitor for
// what stands in the leaf's place, and builds the output tree on the way. A leaf costs its own last
// key; depth is bounded, in levels and in bytes of the thread's stack (RecursionError). Knows
// nothing of specs or of what a rule means.
#pragma once

#include "leaf_visitor.hpp"

namespace shardrules::pytree {

inline constexpr std::size_t kMaxTreeDepth = 5000;

// The tree with each leaf replaced by the visitor's answer; dict keys keep the input's order (of
// siblings with equal keys, one may get the other's key objects), and otherwise the structure is
// what jax.tree_util.tree_map_with_path gives. An error that arises on the way carries a note that
// names the path.
Ref map_tree(PyObject* tree, const PathStyle& path_style, automata::LazyDfa& dfa,
             LeafVisitor& visitor);

}  // namespace shardrules::pytree
