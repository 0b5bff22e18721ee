// Items of one array copied to another of its shape, whatever the strides of both. Where the items
// that are neighbours in one are rows apart in the other, they go by tiles of whole cache lines.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace shardrules::files {

struct CopiedDim {
    std::int64_t size;
    std::int64_t from;  // bytes between neighbours in the source
    std::int64_t to;    // and in the target
};

// Transposes as many rows of 8 bytes as they have items.
template <std::size_t kItem>
void transpose_words(const char* from, std::int64_t from_stride, char* to, std::int64_t to_stride) {
    constexpr std::size_t kCount = sizeof(std::uint64_t) / kItem;
    std::uint64_t rows[kCount];
    for (std::size_t i = 0; i < kCount; ++i)
        std::memcpy(&rows[i], from + static_cast<std::int64_t>(i) * from_stride, 8);
    // Squares beside the diagonal change places, then those in each square.
    for (std::size_t half = kCount / 2; half != 0; half /= 2) {
        const std::size_t bits = half * kItem * 8;
        const std::uint64_t low = ~std::uint64_t{0} / ((std::uint64_t{1} << bits) + 1);
        for (std::size_t i = 0; i < kCount; ++i) {
            if ((i & half) != 0) continue;
            const std::uint64_t changed = ((rows[i] >> bits) ^ rows[i + half]) & low;
            rows[i + half] ^= changed;
            rows[i] ^= changed << bits;
        }
    }
    for (std::size_t i = 0; i < kCount; ++i)
        std::memcpy(to + static_cast<std::int64_t>(i) * to_stride, &rows[i], 8);
}

template <std::size_t kItem>
void copy_items(const CopiedDim& outer, const CopiedDim& inner, const char* from, char* to) {
    for (std::int64_t i = 0; i < outer.size; ++i)
        for (std::int64_t j = 0; j < inner.size; ++j)
            std::memcpy(to + i * outer.to + j * inner.to, from + i * outer.from + j * inner.from,
                        kItem);
}

// `across`: neighbours in the source; `along`: neighbours in the target. A tile is transposed in
// memory of its own, as rows that are a power of two apart would displace each other in the cache.
template <std::size_t kItem>
void copy_tiles(const CopiedDim& across, const CopiedDim& along, const char* from, char* to) {
    constexpr std::int64_t kLine = 64, kWord = 8, kSide = kLine / static_cast<std::int64_t>(kItem),
                           kStep = kWord / static_cast<std::int64_t>(kItem);
    constexpr auto kBytes = static_cast<std::int64_t>(kItem);
    alignas(64) char tile[std::size_t{64} * 64 / kItem];
    const std::int64_t rows = across.size / kSide * kSide, columns = along.size / kSide * kSide;
    for (std::int64_t i = 0; i < rows; i += kSide) {
        for (std::int64_t j = 0; j < columns; j += kSide) {
            const char* source = from + i * kBytes + j * along.from;
            for (std::int64_t k = 0; k < kSide; k += kStep)
                for (std::int64_t n = 0; n < kSide; n += kStep)
                    transpose_words<kItem>(source + k * along.from + n * kBytes, along.from,
                                           tile + n * kLine + k * kBytes, kLine);
            for (std::int64_t n = 0; n < kSide; ++n)
                std::memcpy(to + (i + n) * across.to + j * kBytes, tile + n * kLine, kLine);
        }
    }
    // The edges that do not fill a tile.
    const CopiedDim below{across.size - rows, across.from, across.to};
    copy_items<kItem>(below, along, from + rows * kBytes, to + rows * across.to);
    const CopiedDim whole{rows, across.from, across.to};
    const CopiedDim right{along.size - columns, along.from, along.to};
    copy_items<kItem>(whole, right, from + columns * along.from, to + columns * kBytes);
}

// Copies arrays of items of 1, 2, 4 or 8 bytes, which do not overlap.
class StridedCopy {
  public:
    StridedCopy(std::vector<CopiedDim> dims, std::int64_t item)
        : dims_(std::move(dims)), item_(item) {
        std::erase_if(dims_, [](const CopiedDim& dim) { return dim.size == 1; });
        // In the target's order, neighbours last; then dims that go on in both are one.
        std::ranges::sort(dims_, std::ranges::greater{}, &CopiedDim::to);
        for (std::size_t i = dims_.size(); i-- > 1;) {
            const CopiedDim inner = dims_[i];
            CopiedDim& outer = dims_[i - 1];
            if (outer.from != inner.from * inner.size || outer.to != inner.to * inner.size)
                continue;
            outer = {outer.size * inner.size, inner.from, inner.to};
            dims_.erase(dims_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        while (dims_.size() < 2) dims_.insert(dims_.begin(), {1, 0, 0});
        // Before the last, what has neighbours in the source.
        if (dims_.back().from != item_ && dims_.back().to == item_) {
            const auto across =
                std::find_if(dims_.begin(), dims_.end(),
                             [this](const CopiedDim& dim) { return dim.from == item_; });
            if (across != dims_.end()) std::rotate(across, across + 1, dims_.end() - 1);
        }
    }

    void run(const char* from, char* to) const {
        for (const CopiedDim& dim : dims_)
            if (dim.size == 0) return;
        run(0, from, to);
    }

  private:
    void run(std::size_t at, const char* from, char* to) const {
        const CopiedDim& dim = dims_[at];
        if (at + 2 < dims_.size()) {
            for (std::int64_t i = 0; i < dim.size; ++i)
                run(at + 1, from + i * dim.from, to + i * dim.to);
            return;
        }
        const CopiedDim& last = dims_[at + 1];
        if (last.from == item_ && last.to == item_) {
            for (std::int64_t i = 0; i < dim.size; ++i)
                std::memcpy(to + i * dim.to, from + i * dim.from,
                            static_cast<std::size_t>(last.size * item_));
        } else if (item_ == 1) {
            copy_two<1>(dim, last, from, to);
        } else if (item_ == 2) {
            copy_two<2>(dim, last, from, to);
        } else if (item_ == 4) {
            copy_two<4>(dim, last, from, to);
        } else {
            copy_two<8>(dim, last, from, to);
        }
    }

    template <std::size_t kItem>
    void copy_two(const CopiedDim& dim, const CopiedDim& last, const char* from, char* to) const {
        if (std::endian::native == std::endian::little && dim.from == item_ && last.to == item_)
            copy_tiles<kItem>(dim, last, from, to);
        else
            copy_items<kItem>(dim, last, from, to);
    }

    std::vector<CopiedDim> dims_;
    std::int64_t item_;
};

}  // namespace shardrules::files
