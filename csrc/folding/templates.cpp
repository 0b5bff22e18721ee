#include "templates.hpp"

namespace shardrules::folding {
namespace {

constexpr std::size_t kMostDigits = 18;  // fit an int64
// Folding sorts all paths for each of them; names of models have a handful.
constexpr std::size_t kMostNumbers = 16;
// What follows each NUL of a template.
constexpr char kHole = '#', kOfThePath = '0';

bool is_digit(char c) { return '0' <= c && c <= '9'; }
bool is_plain(char c) { return !is_digit(c) && c != '\0'; }

}  // namespace

void Templates::add(std::string_view path) {
    text_.clear();
    take_numbers(path);
    const auto [found, is_new] =
        known_.try_emplace(text_, static_cast<std::int32_t>(texts_.size()));
    if (is_new) texts_.push_back(found->first);
    of_path_.push_back(found->second);
}

void Templates::take_numbers(std::string_view path) {
    const std::size_t most = numbers_.size() + kMostNumbers;
    for (std::size_t i = 0; i < path.size();) {
        std::size_t end = i;
        while (end < path.size() && is_plain(path[end])) ++end;
        text_.append(path, i, end - i);
        i = end;
        if (i == path.size()) break;
        if (path[i] == '\0') {
            text_.append({'\0', kOfThePath});
            ++i;
            continue;
        }
        while (end < path.size() && is_digit(path[end])) ++end;
        const std::string_view digits = path.substr(i, end - i);
        const bool is_text = digits.size() > kMostDigits || (digits[0] == '0' && digits.size() > 1);
        if (is_text || numbers_.size() == most) {
            text_.append(digits);
        } else {
            std::int64_t number = 0;
            for (const char digit : digits) number = number * 10 + (digit - '0');
            numbers_.push_back(number);
            text_.append({'\0', kHole});
        }
        i = end;
    }
}

}  // namespace shardrules::folding
