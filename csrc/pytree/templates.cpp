#include "templates.hpp"

#include <string>
#include <string_view>
#include <unordered_map>

namespace shardrules::pytree {
namespace {

constexpr std::size_t kMostDigits = 18;  // fit an int64
// Folding sorts all paths for each of them; names of models have a handful.
constexpr std::size_t kMostNumbers = 16;
// What follows each NUL of a template.
constexpr char kHole = '#', kOfThePath = '0';

bool is_digit(char c) { return '0' <= c && c <= '9'; }

// Appends the path with its numbers taken out.
void take_numbers(std::string_view path, std::string& text, std::vector<std::int64_t>& numbers) {
    const std::size_t most = numbers.size() + kMostNumbers;
    for (std::size_t i = 0; i < path.size();) {
        if (!is_digit(path[i])) {
            text.push_back(path[i]);
            if (path[i] == '\0') text.push_back(kOfThePath);
            ++i;
            continue;
        }
        std::size_t end = i;
        while (end < path.size() && is_digit(path[end])) ++end;
        const std::string_view digits = path.substr(i, end - i);
        const bool is_text = digits.size() > kMostDigits || (digits[0] == '0' && digits.size() > 1);
        if (is_text || numbers.size() == most) {
            text.append(digits);
        } else {
            std::int64_t number = 0;
            for (const char digit : digits) number = number * 10 + (digit - '0');
            numbers.push_back(number);
            text.append({'\0', kHole});
        }
        i = end;
    }
}

// The path in UTF-8, lone surrogates included; `kept` holds it where the str itself does not.
std::string_view utf8(PyObject* path, Ref& kept) {
    if (!PyUnicode_Check(path)) {
        PyErr_Format(PyExc_TypeError, "a path is a %.200s, not a str", Py_TYPE(path)->tp_name);
        throw PythonError{};
    }
    if (PyUnicode_IS_COMPACT_ASCII(path))
        return {static_cast<const char*>(PyUnicode_DATA(path)),
                static_cast<std::size_t>(PyUnicode_GET_LENGTH(path))};
    kept = Ref::checked(PyUnicode_AsEncodedString(path, "utf-8", "surrogatepass"));
    return {PyBytes_AS_STRING(kept.get()), static_cast<std::size_t>(PyBytes_GET_SIZE(kept.get()))};
}

}  // namespace

Templates templates_of(PyObject* paths) {
    Templates out;
    std::unordered_map<std::string, std::int32_t> known;
    std::string text;
    SignalChecks signals;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(paths); ++i) {
        signals.tick();
        Ref kept;
        const Ref path = Ref::borrow(PyList_GetItem(paths, i));  // a signal may have changed the list
        if (!path) throw PythonError{};
        text.clear();
        take_numbers(utf8(path.get(), kept), text, out.numbers);
        const auto [found, is_new] = known.try_emplace(text, static_cast<std::int32_t>(known.size()));
        out.of_path.push_back(found->second);
        if (!is_new) continue;
        const Ref made = Ref::checked(PyUnicode_DecodeUTF8(
            text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
        check(PyList_Append(out.texts.get(), made.get()));
    }
    return out;
}

}  // namespace shardrules::pytree
