// Ranges of a file by example: which calls of the system they take, and what comes back.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "files/read_ranges.hpp"

namespace {

using namespace shardrules::files;

constexpr std::string_view kFile = "0123456789abcdefghij";

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// A file of which a call reads at most so many bytes, and which fails in its first calls.
struct Disk {
    std::size_t most;
    int interrupted = 0;
    int error = 0;
    std::vector<std::int64_t>* calls = nullptr;

    std::int64_t operator()(const iovec* spans, int count, std::int64_t at) {
        if (interrupted-- > 0 || error != 0) {
            errno = error != 0 ? error : EINTR;
            return -1;
        }
        calls->push_back(at);
        const auto begin = static_cast<std::size_t>(at);
        std::size_t done = 0;
        for (int i = 0; i < count; ++i) {
            const std::size_t left = begin + done < kFile.size() ? kFile.size() - begin - done : 0;
            const std::size_t size = std::min({spans[i].iov_len, most - done, left});
            std::memcpy(spans[i].iov_base, kFile.data() + begin + done, size);
            done += size;
        }
        return static_cast<std::int64_t>(done);
    }
};

struct Result {
    std::string memory;
    std::vector<std::int64_t> calls;
    Stop stop;
};

Result read(const std::vector<std::int64_t>& begins, const std::vector<std::int64_t>& sizes,
            const std::vector<std::int64_t>& places, std::size_t gap, Disk disk) {
    Result result{std::string(12, '.'), {}, {}};
    disk.calls = &result.calls;
    result.stop = read_ranges({begins, sizes, places}, result.memory.data(), gap, disk);
    return result;
}

void near_ranges_are_one_call() {
    const auto near = read({1, 5, 8}, {2, 3, 1}, {6, 0, 4}, 2, {100});
    expect(near.memory == "567.8.12....", "the bytes of near ranges");
    expect(near.calls == std::vector<std::int64_t>{1}, "one call");
    expect(near.stop.at == 9 && near.stop.code == 0, "the end");
    const auto apart = read({1, 5, 8}, {2, 3, 1}, {6, 0, 4}, 1, {100});
    expect(apart.memory == near.memory, "the bytes of ranges apart");
    expect(apart.calls == std::vector<std::int64_t>{1, 5}, "two calls");
}

void overlaps_are_read_again() {
    const auto both = read({2, 3, 3}, {4, 2, 0}, {0, 6, 0}, 8, {100});
    expect(both.memory == "2345..34....", "the bytes of overlaps");
    expect(both.calls == std::vector<std::int64_t>{2, 3}, "a call for each");
}

void short_and_interrupted_calls_go_on() {
    for (std::size_t most = 1; most < 8; ++most) {
        const auto result = read({1, 5}, {2, 3}, {6, 0}, 2, {most, 3});
        expect(result.memory == "567...12....", "the bytes of short calls");
        expect(result.stop.code == 0, "no error");
    }
}

void errors_and_the_end_are_told() {
    const auto failed = read({4}, {2}, {0}, 0, {100, 0, EIO});
    expect(failed.stop.at == 4 && failed.stop.code == EIO, "an error");
    const auto cut = read({0, 18}, {2, 4}, {0, 2}, 0, {100});
    expect(cut.stop.at == 20 && cut.stop.code == kEndOfFile, "the end of the file");
}

void many_ranges_take_several_calls() {
    std::vector<std::int64_t> begins, sizes, places;
    for (std::int64_t i = 0; i < 3000; ++i) {
        begins.push_back(i / 300);
        sizes.push_back(i % 300 == 0 ? 1 : 0);
        places.push_back(i / 300);
    }
    const auto result = read(begins, sizes, places, 0, {100});
    expect(result.memory == "0123456789..", "the bytes of many ranges");
}

}  // namespace

int main() {
    near_ranges_are_one_call();
    overlaps_are_read_again();
    short_and_interrupted_calls_go_on();
    errors_and_the_end_are_told();
    many_ranges_take_several_calls();
}
