#include "register.hpp"

#ifdef _WIN32

namespace shardrules::bind {

// Python reads there.
void register_read_ranges(pybind11::module_&) {}

}  // namespace shardrules::bind

#else

#include "files/read_bands.hpp"
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

// The rows of a table of `kColumns` columns in turn.
template <std::size_t kColumns>
class Rows {
  public:
    explicit Rows(std::span<const std::int64_t> numbers) : numbers_(numbers) {
        if (numbers.size() % kColumns != 0) throw py::value_error("a table has no whole rows");
    }

    bool empty() const { return numbers_.empty(); }

    std::span<const std::int64_t, kColumns> next() {
        if (empty()) throw py::value_error("a table has too few rows");
        const auto row = numbers_.template first<kColumns>();
        numbers_ = numbers_.subspan(kColumns);
        return row;
    }

  private:
    std::span<const std::int64_t> numbers_;
};

std::vector<files::Band> bands_of(std::span<const std::int64_t> bands,
                                  std::span<const std::int64_t> pieces,
                                  std::span<const std::int64_t> dims, std::int64_t item,
                                  std::int64_t room) {
    Rows<5> of_bands(bands);
    Rows<3> of_pieces(pieces), of_dims(dims);
    std::vector<files::Band> result;
    while (!of_bands.empty()) {
        const auto row = of_bands.next();
        files::Band band{row[0], row[1], row[2], row[3], {}};
        std::int64_t end = band.begin;
        if (band.begin < 0 || band.size < 1 || band.stride < band.size ||
            !files::reaches(end, band.rows, band.stride, kLastByte))
            throw py::value_error("a band has no rows");
        for (std::int64_t i = 0; i < row[4]; ++i) {
            const auto of_piece = of_pieces.next();
            files::BandPiece piece{of_piece[0], of_piece[1], {}};
            for (std::int64_t j = 0; j < of_piece[2]; ++j) {
                const auto dim = of_dims.next();
                piece.dims.push_back({dim[0], dim[1], dim[2]});
            }
            if (!files::is_inside(band, piece, item, room))
                throw py::value_error("a piece lies outside of its band or of the memory");
            band.pieces.push_back(std::move(piece));
        }
        result.push_back(std::move(band));
    }
    return result;
}

py::tuple read_bands(int file, const py::buffer& bands, const py::buffer& pieces,
                     const py::buffer& dims, std::int64_t item, const py::buffer& memory,
                     std::int64_t gap) {
    const py::buffer_info of_bands = bands.request(), of_pieces = pieces.request(),
                          of_dims = dims.request(), target = memory.request(true);
    if (item != 1 && item != 2 && item != 4 && item != 8)
        throw py::value_error("items have 1, 2, 4 or 8 bytes");
    const std::vector<files::Band> all =
        bands_of(numbers(of_bands), numbers(of_pieces), numbers(of_dims), item, room_of(target));
    files::Stop stop{};
    {
        const py::gil_scoped_release released;
        std::vector<char> staging;
        auto read_at = reading(file);
        for (const files::Band& band : all) {
            stop =
                files::read_band(band, item, static_cast<char*>(target.ptr), gap, staging, read_at);
            if (stop.code != 0) break;
        }
    }
    return py::make_tuple(stop.at, stop.code);
}

}  // namespace

void register_read_ranges(py::module_& module) {
    module.def("read_ranges", &read_ranges);
    module.def("read_bands", &read_bands);
}

}  // namespace shardrules::bind

#endif
