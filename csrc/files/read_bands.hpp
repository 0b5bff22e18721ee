// Rows of a file whose items do not lie in memory as in the file: read some at a time, and copied
// from there while they are in the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "files/copy_strided.hpp"
#include "files/read_ranges.hpp"

namespace shardrules::files {

// Items of a band's rows, and where in memory they go.
struct BandPiece {
    std::int64_t offset;          // of its first item, in a row
    std::int64_t place;           // and in memory
    std::vector<CopiedDim> dims;  // the first numbers the rows
};

struct Band {
    std::int64_t begin;  // in the file, of the bytes that are needed of the first row
    std::int64_t rows;
    std::int64_t stride;  // from row to row
    std::int64_t size;    // bytes that are needed of each row, at most its stride
    std::vector<BandPiece> pieces;
};

constexpr std::int64_t kCached = 512 << 10;  // what a core's own cache has
constexpr std::int64_t kLeastRows = 32;      // a cache line of 2-byte items in memory
constexpr std::int64_t kMostStaged = 2 << 20;

inline std::int64_t rows_at_once(const Band& band) {
    const std::int64_t most = std::max(kCached / band.stride, std::int64_t{1});
    const std::int64_t more = std::min(kLeastRows, kMostStaged / band.stride);
    return std::min(std::max(most, more), band.rows);
}

// Reads a band; what is between two rows is read along if that is at most `gap` bytes.
template <class ReadAt>
Stop read_band(const Band& band, std::int64_t item, char* memory, std::int64_t gap,
               std::vector<char>& staging, ReadAt& read_at) {
    const std::int64_t most = rows_at_once(band);
    const bool is_one = band.stride - band.size <= gap;
    const std::int64_t pitch = is_one ? band.stride : band.size;
    staging.resize(std::max(staging.size(), static_cast<std::size_t>(most * pitch)));
    std::vector<iovec> spans;
    for (std::int64_t row = 0; row < band.rows; row += most) {
        const std::int64_t rows = std::min(most, band.rows - row);
        for (std::int64_t i = 0; i < (is_one ? 1 : rows); ++i) {
            const std::int64_t size = is_one ? (rows - 1) * pitch + band.size : band.size;
            spans.assign(1, {staging.data() + i * pitch, static_cast<std::size_t>(size)});
            const Stop stop = read_span(spans, band.begin + (row + i) * band.stride, read_at);
            if (stop.code != 0) return stop;
        }
        for (const BandPiece& piece : band.pieces) {
            std::vector<CopiedDim> dims = piece.dims;
            dims[0] = {rows, pitch, piece.dims[0].to};
            StridedCopy(std::move(dims), item)
                .run(staging.data() + piece.offset, memory + piece.place + row * piece.dims[0].to);
        }
    }
    return {band.begin, 0};
}

// Says whether `count` steps from an end still end within a limit; moves the end.
inline bool reaches(std::int64_t& end, std::int64_t count, std::int64_t step, std::int64_t limit) {
    if (count < 1 || step < 0 || end > limit) return false;
    if (count > 1 && step > (limit - end) / (count - 1)) return false;
    end += (count - 1) * step;
    return true;
}

// Says whether a piece lies within its rows, and within so many bytes of memory.
inline bool is_inside(const Band& band, const BandPiece& piece, std::int64_t item,
                      std::int64_t room) {
    if (piece.dims.empty() || piece.dims[0].size != band.rows) return false;
    if (piece.offset < 0 || piece.place < 0 || piece.offset > band.size || piece.place > room)
        return false;
    std::int64_t from = piece.offset + item, to = piece.place + item;
    for (std::size_t i = 0; i < piece.dims.size(); ++i) {
        const CopiedDim& dim = piece.dims[i];
        if (i != 0 && !reaches(from, dim.size, dim.from, band.size)) return false;
        if (!reaches(to, dim.size, dim.to, room)) return false;
    }
    return from <= band.size && to <= room;
}

}  // namespace shardrules::files
