#include "sharding_table.hpp"

#include <stdexcept>
#include <utility>

#include "dimension.hpp"
#include "dtype.hpp"

namespace shardrules::resolution {

using pytree::check;
using pytree::PythonError;

sharding::Kept kept_axes(const sharding::Corrector& corrector, PyObject* shape, Py_ssize_t rank) {
    return corrector.kept(static_cast<std::size_t>(rank),
                          [&](std::size_t index) { return dimension_of(shape, index); });
}

namespace {

Ref none_as_null(Ref object) { return object.get() == Py_None ? Ref{} : std::move(object); }

}  // namespace

ShardingTable::ShardingTable(std::vector<CorrectorPtr> correctors,
                             std::vector<std::uint32_t> spec_of, Ref make, Ref make_for_shape)
    : spec_of_(std::move(spec_of)),
      make_(std::move(make)),
      make_for_shape_(std::move(make_for_shape)) {
    for (CorrectorPtr& corrector : correctors) {
        Spec& spec = specs_.emplace_back();
        if (!corrector) spec.shapes.of_dtypes = Ref::checked(PyDict_New());
        spec.corrector = std::move(corrector);
    }
    for (const std::uint32_t spec : spec_of_)
        if (spec >= specs_.size()) throw std::invalid_argument("a rule has no such spec");
}

Answers::Answer ShardingTable::get(automata::RuleId rule, pytree::Leaf& leaf, Py_ssize_t rank) {
    const std::uint32_t index = spec_of_[rule];
    Spec& spec = specs_[index];
    if (!spec.corrector) [[unlikely]]
        return {none_as_null(for_shape(index, leaf)), false};
    const Key key{rank, kept_axes(*spec.corrector, leaf.shape().get(), rank)};
    return {none_as_null(Ref::borrow(key == spec.last ? spec.last_made : make(index, key))), false};
}

PyObject* ShardingTable::make(std::uint32_t index, const Key& key) {
    Spec& spec = specs_[index];
    auto found = spec.made.find(key);
    if (found == spec.made.end()) {
        Ref made = Ref::checked(PyObject_CallFunction(make_.get(), "InK", index, key.rank,
                                                      static_cast<unsigned long long>(key.kept)));
        // Python code may have added an entry meanwhile.
        found = spec.made.try_emplace(key, std::move(made)).first;
    }
    spec.last = key;
    return spec.last_made = found->second.get();
}

// A leaf without a shape counts as a scalar; only a dialect that wants a rule for it comes here.
Ref ShardingTable::for_shape(std::uint32_t index, pytree::Leaf& leaf) {
    const Ref& shape = leaf.shape();
    // PySequence_Tuple gives a tuple itself.
    const Ref sizes = Ref::checked(shape ? PySequence_Tuple(shape.get()) : PyTuple_New(0));
    const Ref dtype = dtype_of(leaf.object());
    const Ref known = made_for(specs_[index].shapes, dtype);
    if (PyObject* found = PyDict_GetItemWithError(known.get(), sizes.get()))
        return Ref::borrow(found);
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    const Ref made = Ref::checked(
        PyObject_CallFunction(make_for_shape_.get(), "IOO", index, sizes.get(), dtype.get()));
    if (PyDict_GET_SIZE(known.get()) >= kMostShapes) PyDict_Clear(known.get());
    // Python code may have added an entry meanwhile.
    PyObject* kept = PyDict_SetDefault(known.get(), sizes.get(), made.get());
    return Ref::checked(Py_XNewRef(kept));
}

// {shape: object} of a dtype.
Ref ShardingTable::made_for(Shapes& shapes, const Ref& dtype) {
    if (shapes.dtype.get() == dtype.get()) return shapes.made;
    const Ref all = shapes.of_dtypes;
    Ref made = Ref::borrow(PyDict_GetItemWithError(all.get(), dtype.get()));
    if (!made) {
        if (PyErr_Occurred() != nullptr) throw PythonError{};
        if (PyDict_GET_SIZE(all.get()) >= kMostDtypes) PyDict_Clear(all.get());
        made = Ref::checked(PyDict_New());
        check(PyDict_SetItem(all.get(), dtype.get(), made.get()));
    }
    const Shapes before =
        std::exchange(shapes, {all, dtype, made});  // its destructors may call this
    return made;
}

int ShardingTable::traverse(visitproc visit, void* arg) const {
    Py_VISIT(make_.get());
    Py_VISIT(make_for_shape_.get());
    for (const Spec& spec : specs_) {
        Py_VISIT(spec.shapes.of_dtypes.get());
        Py_VISIT(spec.shapes.dtype.get());
        Py_VISIT(spec.shapes.made.get());
        for (const auto& entry : spec.made) Py_VISIT(entry.second.get());
    }
    return 0;
}

void ShardingTable::clear() {
    // Not null: a later call is a TypeError.
    make_ = make_for_shape_ = Ref::borrow(Py_None);
    for (Spec& spec : specs_) {
        spec.last = Key{-1, 0};
        spec.last_made = nullptr;
        // Their destructors may call this object.
        const auto dropped = std::exchange(spec.made, {});
        const auto last = std::exchange(spec.shapes, {spec.shapes.of_dtypes, {}, {}});
        if (last.of_dtypes) PyDict_Clear(last.of_dtypes.get());
    }
}

}  // namespace shardrules::resolution
