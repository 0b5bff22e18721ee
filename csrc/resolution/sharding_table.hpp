// The NamedShardings of a rule list on a mesh: one object per (spec, rank, kept axes), made by
// Python when first needed and shared by all leaves. A look-up costs one division per sharded
// dimension. A spec that is made from shapes has one object per (shape, dtype); a look-up costs the
// hash of a shape. Guarded by the GIL. Knows nothing of what a sharding is.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "answers.hpp"
#include "sharding/correction.hpp"

namespace shardrules::resolution {

using pytree::Ref;

class ShardingTable final : public Answers {
  public:
    using CorrectorPtr = std::shared_ptr<const sharding::Corrector>;

    // correctors[spec]: null for a spec that is made from shapes.
    // spec_of[rule]: the index of its corrector.
    // make(spec, rank, kept): the object, or None if the spec cannot be applied.
    // make_for_shape(spec, shape, dtype): the same for a spec without a corrector.
    ShardingTable(std::vector<CorrectorPtr> correctors, std::vector<std::uint32_t> spec_of,
                  Ref make, Ref make_for_shape);

    std::size_t rule_count() const override { return spec_of_.size(); }
    Answer get(automata::RuleId rule, pytree::Leaf& leaf, Py_ssize_t rank) override;

    // For the garbage collector.
    int traverse(visitproc visit, void* arg) const;
    void clear();

  private:
    // Per (spec, dtype), and per spec; then the memo is cleared. The largest models have some
    // hundred shapes.
    static constexpr Py_ssize_t kMostShapes = 1 << 16, kMostDtypes = 64;

    struct Key {
        Py_ssize_t rank;
        sharding::Kept kept;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const {
            return std::hash<sharding::Kept>{}(key.kept ^
                                               (static_cast<sharding::Kept>(key.rank) << 48));
        }
    };
    struct Shapes {       // of a spec without a corrector
        Ref of_dtypes;    // {dtype: {shape: object}}
        Ref dtype, made;  // the last entry, because hashing a dtype takes longer than all else
    };
    struct Spec {
        CorrectorPtr corrector;
        Key last{-1, 0};
        PyObject* last_made = nullptr;  // owned by `made`
        std::unordered_map<Key, Ref, KeyHash> made;
        Shapes shapes;
    };
    PyObject* make(std::uint32_t index, const Key& key);
    Ref for_shape(std::uint32_t index, pytree::Leaf& leaf);
    static Ref made_for(Shapes& shapes, const Ref& dtype);

    std::vector<Spec> specs_;
    std::vector<std::uint32_t> spec_of_;
    Ref make_, make_for_shape_;
};

// The axes that an array of this shape keeps. TypeError or ValueError if it is not a sequence of
// sizes.
sharding::Kept kept_axes(const sharding::Corrector& corrector, PyObject* shape, Py_ssize_t rank);

}  // namespace shardrules::resolution
