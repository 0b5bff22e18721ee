#include "register.hpp"

#ifdef _WIN32

namespace shardrules::bind {

// Python reads there.
void register_read_ranges(pybind11::module_&) {}

}  // namespace shardrules::bind

#else

#include "files/read_ranges.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

std::span<const std::int64_t> numbers(const py::buffer_info& column) {
    if (column.itemsize != 8 || column.ndim != 1 || (column.size > 1 && column.strides[0] != 8))
        throw py::type_error("a column of ranges is no row of 64-bit integers");
    return {static_cast<const std::int64_t*>(column.ptr), static_cast<std::size_t>(column.size)};
}

constexpr std::int64_t kLastByte = std::int64_t{1} << 62;  // of any file

std::int64_t room_of(const py::buffer_info& memory) {
    if (memory.ndim != 1 || (memory.size > 1 && memory.strides[0] != memory.itemsize))
        throw py::type_error("the memory has gaps");
    return static_cast<std::int64_t>(memory.size * memory.itemsize);
}

auto reading(int file) {
    return [file](const iovec* spans, int count, std::int64_t at) {
        return static_cast<std::int64_t>(::preadv(file, spans, count, at));
    };
}

py::tuple read_ranges(int file, const py::buffer& begins, const py::buffer& sizes,
                      const py::buffer& places, const py::buffer& memory, std::size_t gap) {
    const py::buffer_info of_begins = begins.request(), of_sizes = sizes.request(),
                          of_places = places.request(), target = memory.request(true);
    const files::Ranges ranges{numbers(of_begins), numbers(of_sizes), numbers(of_places)};
    const std::int64_t room = room_of(target);
    if (ranges.sizes.size() != ranges.begins.size() || ranges.places.size() != ranges.begins.size())
        throw py::value_error("the columns of ranges have different lengths");
    for (std::size_t i = 0; i < ranges.begins.size(); ++i)
        if (ranges.begins[i] < 0 || ranges.sizes[i] < 0 || ranges.places[i] < 0 ||
            ranges.sizes[i] > room || ranges.places[i] > room - ranges.sizes[i] ||
            ranges.begins[i] > kLastByte - ranges.sizes[i])
            throw py::value_error("a range lies outside of any file, or of the memory");
    files::Stop stop{};
    {
        const py::gil_scoped_release released;
        stop = files::read_ranges(ranges, static_cast<char*>(target.ptr), gap, reading(file));
    }
    return py::make_tuple(stop.at, stop.code);
}

}  // namespace

void register_read_ranges(py::module_& module) { module.def("read_ranges", &read_ranges); }

}  // namespace shardrules::bind

#endif
