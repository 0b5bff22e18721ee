// What a dialect chooses, as far as a walk and the decision for a leaf are concerned: plain values,
// read-only. Python's shardrules._matching.dialects says what each of them means to a user.
#pragma once

#include "ref.hpp"

namespace shardrules::pytree {

struct Choices {
    Ref separator;        // joins the texts of keys, for the rules
    Ref shown_separator;  // joins them for people
    bool keystr = false;  // keys as jax.tree_util.keystr has them, instead of their str()
    bool unique = false;  // several matching rules are an error, instead of the first one's win
    bool scalars_need_rules = false;
    bool size_one_is_scalar = false;
    bool min_size_first = false;  // leaves that are too small need no rule
};

}  // namespace shardrules::pytree
