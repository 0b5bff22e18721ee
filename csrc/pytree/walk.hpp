// One walk over a pytree: feeds each leaf's path to the automaton key by key, asks the visitor for
// what stands in the leaf's place, and builds the output tree on the way. A leaf costs its own last
// key; depth is bounded (RecursionError). Knows nothing of specs or of what a rule means.
#pragma once

#include "automata/lazy_dfa.hpp"
#include "tree_path.hpp"

namespace shardrules::pytree {

inline constexpr std::size_t kMaxTreeDepth = 5000;

// Where the walk stands when it shows a leaf.
struct LeafPlace {
    const automata::LazyDfa& dfa;
    const TreePath& path;
};

class LeafVisitor {
  public:
    virtual Ref visit(PyObject* leaf, const LeafPlace& place) = 0;
    // What the last visit's answer depends on beside the automaton's state, if the visit did nothing
    // but answer; else empty.
    virtual Ref last_kind() const { return {}; }
    // Whether a visit would find a leaf to be of this kind. Runs no Python code; no need to be sure.
    virtual bool is_of_kind(PyObject*, PyObject*) const { return false; }

  protected:
    ~LeafVisitor() = default;
};

// The tree with each leaf replaced by the visitor's answer; dict keys keep the input's order (of
// siblings with equal keys, one may get the other's key objects), and otherwise the structure is what
// jax.tree_util.tree_map_with_path gives. An error that arises on the way carries a note that names the
// path.
Ref map_tree(PyObject* tree, const PathStyle& path_style, automata::LazyDfa& dfa,
             LeafVisitor& visitor);

}  // namespace shardrules::pytree
