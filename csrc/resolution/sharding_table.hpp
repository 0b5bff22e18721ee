// One object per distinct (spec, rank, axes kept), made by Python on first sight and shared by all
// leaves afterwards: the NamedShardings of a rule list on a mesh. A look-up costs a division for
// each sharded dimension. A spec that is made from shapes has one object per distinct (shape,
// dtype); there a look-up costs the hash of a shape. Guarded by the GIL. Knows nothing of what a
// sharding is.
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
    // make(spec, rank, kept): what such a leaf gets, or None if it cannot have that.
    // make_for_shape(spec, shape, dtype): the same without a corrector.
    ShardingTable(std::vector<CorrectorPtr> correctors, std::vector<std::uint32_t> spec_of,
                  Ref make, Ref make_for_shape);

    std::size_t rule_count() const override { return spec_of_.size(); }
    Answer get(automata::RuleId rule, pytree::Leaf& leaf, Py_ssize_t rank) override;

    // For the garbage collector.
    int traverse(visitproc visit, void* arg) const;
    void clear();

  private:
    // Of one spec and dtype, and of one spec; then they are forgotten. The largest models have some
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
    struct Shapes {       // where there is no corrector
        Ref of_dtypes;    // {dtype: {shape: object}}
        Ref dtype, made;  // the last of these; hashing a dtype takes longer than all else
    };
    struct Spec {
        CorrectorPtr corrector;
        Key last{-1, 0};
        PyObject* last_made = nullptr;  // owned by `made`
        std::unordered_map<Key, Ref, KeyHash> made;
        Shapes shapes;
    };
    PyObject* make(std::uint32_t spec, const Key& key);
    Ref for_shape(std::uint32_t spec, pytree::Leaf& leaf);
    static Ref made_for(Shapes& shapes, const Ref& dtype);

    std::vector<Spec> specs_;
    std::vector<std::uint32_t> spec_of_;
    Ref make_, make_for_shape_;
};

// The axes kept by an array of this shape, a sequence of sizes; TypeError or ValueError if it is
// not one.
sharding::Kept kept_axes(const sharding::Corrector& corrector, PyObject* shape, Py_ssize_t rank);

}  // namespace shardrules::resolution
