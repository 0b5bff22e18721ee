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

py::tuple read_ranges(int file, const py::buffer& begins, const py::buffer& sizes,
                      const py::buffer& places, const py::buffer& memory, std::size_t gap) {
    const py::buffer_info of_begins = begins.request(), of_sizes = sizes.request(),
                          of_places = places.request(), target = memory.request(true);
    const files::Ranges ranges{numbers(of_begins), numbers(of_sizes), numbers(of_places)};
    const auto room = static_cast<std::int64_t>(target.size * target.itemsize);
    if (target.ndim != 1 || (target.size > 1 && target.strides[0] != target.itemsize))
        throw py::type_error("the memory has gaps");
    if (ranges.sizes.size() != ranges.begins.size() || ranges.places.size() != ranges.begins.size())
        throw py::value_error("the columns of ranges have different lengths");
    for (std::size_t i = 0; i < ranges.begins.size(); ++i)
        if (ranges.begins[i] < 0 || ranges.sizes[i] < 0 || ranges.places[i] < 0 ||
            ranges.sizes[i] > room || ranges.places[i] > room - ranges.sizes[i])
            throw py::value_error("a range lies outside of the memory");
    files::Stop stop{};
    {
        const py::gil_scoped_release released;
        const auto read_at = [file](const iovec* spans, int count, std::int64_t at) {
            return static_cast<std::int64_t>(::preadv(file, spans, count, at));
        };
        stop = files::read_ranges(ranges, static_cast<char*>(target.ptr), gap, read_at);
    }
    return py::make_tuple(stop.at, stop.code);
}

}  // namespace

void register_read_ranges(py::module_& module) { module.def("read_ranges", &read_ranges); }

}  // namespace shardrules::bind

#endif
