// Takes the numbers out of paths: `layers/7/w` is the template `layers/#/w` and the number 7, so
// sibling layers share a template. A path costs one pass over its text and a look-up. Knows nothing
// of trees or Python.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace shardrules::folding {

class Templates {
  public:
    // The path is in UTF-8. A number is written as str(int) writes it. Digits with leading zeros,
    // more than 18 digits, and all digits after the 16th number belong to the name.
    void add(std::string_view path);

    // The distinct templates. A hole is a NUL and #; a NUL of the path itself is a NUL and 0.
    const std::vector<std::string_view>& texts() const { return texts_; }
    // For each path the index of its template.
    const std::vector<std::int32_t>& of_path() const { return of_path_; }
    // The numbers of all paths in a row, as many for each as its template has holes.
    const std::vector<std::int64_t>& numbers() const { return numbers_; }

  private:
    void take_numbers(std::string_view path);

    std::unordered_map<std::string, std::int32_t> known_;
    std::vector<std::string_view> texts_;  // of the keys of known_, which do not move
    std::vector<std::int32_t> of_path_;
    std::vector<std::int64_t> numbers_;
    std::string text_;  // the template of the current path
};

}  // namespace shardrules::folding
