#include "sharding_table.hpp"

#include <stdexcept>
#include <utility>

#include "dimension.hpp"

namespace shardrules::resolution {

sharding::Kept kept_axes(const sharding::Corrector& corrector, PyObject* shape, Py_ssize_t rank) {
    return corrector.kept(static_cast<std::size_t>(rank),
                          [&](std::size_t index) { return dimension_of(shape, index); });
}

ShardingTable::ShardingTable(std::vector<CorrectorPtr> correctors,
                             std::vector<std::uint32_t> spec_of, Ref make)
    : spec_of_(std::move(spec_of)), make_(std::move(make)) {
    for (CorrectorPtr& corrector : correctors) {
        if (!corrector) throw std::invalid_argument("a corrector is missing");
        specs_.emplace_back().corrector = std::move(corrector);
    }
    for (const std::uint32_t spec : spec_of_)
        if (spec >= specs_.size()) throw std::invalid_argument("a rule has no such spec");
}

Answers::Answer ShardingTable::get(automata::RuleId rule, PyObject* shape, Py_ssize_t rank) {
    Spec& spec = specs_[spec_of_[rule]];
    const Key key{rank, kept_axes(*spec.corrector, shape, rank)};
    PyObject* made = key == spec.last ? spec.last_made : make(spec_of_[rule], key);
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

int ShardingTable::traverse(visitproc visit, void* arg) const {
    Py_VISIT(make_.get());
    for (const Spec& spec : specs_)
        for (const auto& entry : spec.made) Py_VISIT(entry.second.get());
    return 0;
}

void ShardingTable::clear() {
    make_ = Ref::borrow(Py_None);  // not null: should it be called after all, that is a TypeError
    for (Spec& spec : specs_) {
        spec.last = Key{-1, 0};
        spec.last_made = nullptr;
        const auto dropped = std::exchange(spec.made, {});  // its objects may come here when they go
    }
}

}  // namespace shardrules::resolution
