// What a dialect chooses, as far as a walk and the decision for a leaf are concerned: plain values,
// read-only. Python's shardrules._rules.dialects says what each of them means to a user.
#pragma once

#include "pytree/tree_path.hpp"

namespace shardrules::resolution {

struct Choices {
    pytree::PathStyle path_style;
    bool unique = false;  // several matching rules are an error, instead of the first one's win
    bool scalars_need_rules = false;
    bool size_one_is_scalar = false;
    bool min_size_first = false;  // leaves that are too small need no rule
};

}  // namespace shardrules::resolution
