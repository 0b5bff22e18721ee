#include <pybind11/native_enum.h>

#include "pytree/record_type.hpp"
#include "register.hpp"

namespace shardrules::bind {

void register_record_layout(pybind11::module_& module) {
    using pytree::RecordLayout;
    pybind11::native_enum<RecordLayout>(module, "RecordLayout", "enum.IntEnum")
        .value("CALL", RecordLayout::kCall)
        .value("FIELDS", RecordLayout::kFields)
        .value("ATTRIBUTES", RecordLayout::kAttributes)
        .value("VARIABLE", RecordLayout::kVariable)
        .finalize();
}

}  // namespace shardrules::bind
