// The options of a dialect that matter for a walk and for the decision of a leaf. Read-only. What
// they mean to users is in python/shardrules/_rules/dialects.py.
#pragma once

#include "pytree/tree_path.hpp"

namespace shardrules::resolution {

struct DialectOptions {
    pytree::PathStyle path_style;
    bool unique = false;  // whether several matching rules are an error; if not, the first wins
    bool scalars_need_rules = false;
    bool size_one_is_scalar = false;
    bool min_size_first = false;  // leaves that are too small need no rule
};

}  // namespace shardrules::resolution
