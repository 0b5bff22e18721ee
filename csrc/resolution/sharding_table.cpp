#include "sharding_table.hpp"

#include <stdexcept>
#include <utility>

#include "dimension.hpp"
#include "dtype.hpp"

namespace shardrules::resolution {

using pytree::PythonError;

sharding::Kept kept_axes(const sharding::Corrector& corrector, PyObject* shape, Py_ssize_t rank) {
    return corrector.kept(static_cast<std::size_t>(rank),
                          [&](std::size_t index) { return dimension_of(shape, index); });
}

ShardingTable::ShardingTable(std::vector<CorrectorPtr> correctors,
                             std::vector<std::uint32_t> spec_of, Ref make, Ref make_for_shape)
    : spec_of_(std::move(spec_of)),
      make_(std::move(make)),
      make_for_shape_(std::move(make_for_shape)) {
    for (CorrectorPtr& corrector : correctors) {
        Spec& spec = specs_.emplace_back();
        if (!corrector) spec.made_for_shapes = Ref::checked(PyDict_New());
        spec.corrector = std::move(corrector);
    }
    for (const std::uint32_t spec : spec_of_)
        if (spec >= specs_.size()) throw std::invalid_argument("a rule has no such spec");
}

Answers::Answer ShardingTable::get(automata::RuleId rule, PyObject* leaf, PyObject* shape,
                                   Py_ssize_t rank) {
    const std::uint32_t index = spec_of_[rule];
    Spec& spec = specs_[index];
    PyObject* made;
    if (spec.corrector) [[likely]] {
        const Key key{rank, kept_axes(*spec.corrector, shape, rank)};
        made = key == spec.last ? spec.last_made : make(index, key);
    } else {
        made = for_shape(index, leaf, shape);
    }
    return {made == Py_None ? nullptr : made, false};
}

PyObject* ShardingTable::make(std::uint32_t index, const Key& key) {
    Spec& spec = specs_[index];
    auto found = spec.made.find(key);
    if (found == spec.made.end()) {
        Ref made = Ref::checked(PyObject_CallFunction(make_.get(), "InK", index, key.rank,
                                                      static_cast<unsigned long long>(key.kept)));
        // Making it ran Python code, which may have come here first.
        found = spec.made.try_emplace(key, std::move(made)).first;
    }
    spec.last = key;
    return spec.last_made = found->second.get();
}

// A leaf without a shape, which only a dialect that wants a rule for it brings here, is a scalar.
PyObject* ShardingTable::for_shape(std::uint32_t index, PyObject* leaf, PyObject* shape) {
    const Ref sizes = Ref::checked(shape == nullptr ? PyTuple_New(0) : PySequence_Tuple(shape));
    const Ref key = Ref::checked(PyTuple_Pack(2, sizes.get(), dtype_of(leaf).get()));
    const Ref known = specs_[index].made_for_shapes;
    if (PyObject* found = PyDict_GetItemWithError(known.get(), key.get())) return found;
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    if (PyDict_GET_SIZE(known.get()) >= kMostShapes) PyDict_Clear(known.get());
    const Ref made = Ref::checked(PyObject_CallFunction(make_for_shape_.get(), "IOO", index,
                                                        PyTuple_GET_ITEM(key.get(), 0),
                                                        PyTuple_GET_ITEM(key.get(), 1)));
    // Making it ran Python code, which may have come here first.
    PyObject* kept = PyDict_SetDefault(known.get(), key.get(), made.get());
    if (kept == nullptr) throw PythonError{};
    return kept;
}

int ShardingTable::traverse(visitproc visit, void* arg) const {
    Py_VISIT(make_.get());
    Py_VISIT(make_for_shape_.get());
    for (const Spec& spec : specs_) {
        Py_VISIT(spec.made_for_shapes.get());
        for (const auto& entry : spec.made) Py_VISIT(entry.second.get());
    }
    return 0;
}

void ShardingTable::clear() {
    // Not null: should they be called after all, that is a TypeError.
    make_ = make_for_shape_ = Ref::borrow(Py_None);
    for (Spec& spec : specs_) {
        if (spec.made_for_shapes) PyDict_Clear(spec.made_for_shapes.get());
        spec.last = Key{-1, 0};
        spec.last_made = nullptr;
        const auto dropped = std::exchange(spec.made, {});  // its objects may come here when they go
    }
}

}  // namespace shardrules::resolution
