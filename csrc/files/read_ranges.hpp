// Ranges of bytes of a file, read into memory by as few calls of the system as they need.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace shardrules::files {

struct Ranges {
    std::span<const std::int64_t> begins;  // in the file, in order
    std::span<const std::int64_t> sizes;
    std::span<const std::int64_t> places;  // in memory
};

// Where reading ended: with code 0 at the end of the last range; else with the system's error, or
// with kEndOfFile.
struct Stop {
    std::int64_t at;
    int code;
};
constexpr int kEndOfFile = -1;

// Fills the spans in turn, from an offset on. ReadAt: (iovec*, int count, int64 offset) -> bytes
// read, 0 at the end of the file, or less with errno set.
template <class ReadAt>
Stop read_span(std::vector<iovec>& spans, std::int64_t at, ReadAt& read_at) {
    std::size_t first = 0;
    while (first < spans.size()) {
        const std::int64_t count =
            read_at(spans.data() + first, static_cast<int>(spans.size() - first), at);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return {at, errno};
        if (count == 0) return {at, kEndOfFile};
        at += count;
        auto left = static_cast<std::size_t>(count);
        while (first < spans.size() && left >= spans[first].iov_len) left -= spans[first++].iov_len;
        if (left != 0) {
            spans[first].iov_base = static_cast<char*>(spans[first].iov_base) + left;
            spans[first].iov_len -= left;
        }
    }
    return {at, 0};
}

// Reads the ranges, and along with them what is between two if that is at most `gap` bytes.
template <class ReadAt>
Stop read_ranges(const Ranges& ranges, char* memory, std::size_t gap, ReadAt read_at) {
    constexpr std::size_t kMostSpans = 1000;  // Linux has 1,024
    std::vector<char> between(gap);
    std::vector<iovec> spans;
    spans.reserve(kMostSpans);
    std::int64_t begin = 0, end = 0;
    for (std::size_t i = 0; i < ranges.begins.size(); ++i) {
        if (ranges.sizes[i] == 0) continue;
        const std::int64_t skipped = ranges.begins[i] - end;
        if (spans.empty() || skipped < 0 || std::cmp_greater(skipped, gap) ||
            spans.size() + 2 > kMostSpans) {
            const Stop stop = read_span(spans, begin, read_at);
            if (stop.code != 0) return stop;
            spans.clear();
            begin = ranges.begins[i];
        } else if (skipped > 0) {
            spans.push_back({between.data(), static_cast<std::size_t>(skipped)});
        }
        char* place = memory + ranges.places[i];
        const auto size = static_cast<std::size_t>(ranges.sizes[i]);
        const bool goes_on =
            !spans.empty() && skipped == 0 &&
            static_cast<char*>(spans.back().iov_base) + spans.back().iov_len == place;
        if (goes_on)
            spans.back().iov_len += size;
        else
            spans.push_back({place, size});
        end = ranges.begins[i] + ranges.sizes[i];
    }
    return read_span(spans, begin, read_at);
}

}  // namespace shardrules::files
