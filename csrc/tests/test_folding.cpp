// Templates of paths by example: what is a number and what is a name.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "folding/templates.hpp"

namespace {

using namespace std::string_view_literals;
using shardrules::folding::Templates;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

void siblings_share_a_template() {
    Templates found;
    for (const std::string_view path :
         {"layers/1/w7"sv, "layers/22/w8"sv, "head"sv, "layers/1/w7"sv})
        found.add(path);
    expect(found.texts() == std::vector{"layers/\0#/w\0#"sv, "head"sv}, "the templates");
    expect(found.of_path() == std::vector<std::int32_t>{0, 0, 1, 0}, "of each path");
    expect(found.numbers() == std::vector<std::int64_t>{1, 7, 22, 8, 1, 7}, "the numbers in a row");
}

void texts_stay_where_they_are() {
    Templates found;
    found.add("first");
    for (char c = 'a'; c <= 'z'; ++c)
        for (int times = 1; times < 100; ++times)
            found.add(std::string(static_cast<std::size_t>(times), c));
    expect(found.texts().front() == "first", "the first text after many others");
}

void digits_that_are_names() {
    Templates found;
    for (const std::string_view path :
         {"0"sv, "00"sv, "007"sv, "999999999999999999"sv, "9999999999999999999"sv})
        found.add(path);
    expect(found.texts() == std::vector{"\0#"sv, "00"sv, "007"sv, "9999999999999999999"sv},
           "leading zeros, and more digits than fit");
    expect(found.numbers() == std::vector<std::int64_t>{0, 999999999999999999}, "what fits");

    Templates many;
    many.add("1.2.3.4.5.6.7.8.9.10.11.12.13.14.15.16.17");
    expect(many.numbers().size() == 16, "of many numbers the first 16");
    expect(many.texts().front().ends_with("\0#.17"sv), "the others stay in the name");
}

void a_nul_of_the_path_is_no_hole() {
    Templates found;
    found.add("a\0#"sv);
    found.add("a1"sv);
    const std::string_view with_nul = "a\0\060#"sv;  // \060 is the digit 0
    expect(found.texts() == std::vector{with_nul, "a\0#"sv}, "a NUL of the path, and a hole");
}

}  // namespace

int main() {
    siblings_share_a_template();
    texts_stay_where_they_are();
    digits_that_are_names();
    a_nul_of_the_path_is_no_hole();
    std::puts("folding: ok");
    return 0;
}
