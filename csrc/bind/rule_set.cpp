#include "rule_set.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "pybind_extras.hpp"
#include "register.hpp"
#include "resolution/count_matches.hpp"
#include "resolution/survey_leaves.hpp"

namespace py = pybind11;

namespace shardrules::bind {
namespace {

using pytree::Ref;

std::u32string code_points(py::handle text) {
    const automata::Text view = pytree::text_of(text.ptr());
    std::u32string out(view.length, U'\0');
    for (std::size_t i = 0; i < view.length; ++i)
        out[i] = PyUnicode_READ(view.width, view.data, static_cast<Py_ssize_t>(i));
    return out;
}

automata::AsciiSet ascii_set(py::handle members) {
    const py::int_ half(64);
    const auto low_bits = [](const py::object& number) {
        return PyLong_AsUnsignedLongLongMask(number.ptr());
    };
    automata::AsciiSet set;
    const auto number = py::reinterpret_borrow<py::object>(members);
    const unsigned long long words[] = {low_bits(number), low_bits(number >> half)};
    for (std::size_t c = 0; c < automata::kAsciiEnd; ++c) set[c] = (words[c / 64] >> (c % 64)) & 1;
    return set;
}

py::object to_python(const Ref& ref) { return py::reinterpret_borrow<py::object>(ref.get()); }

py::tuple to_python(const resolution::Listing& listing) {
    return py::make_tuple(listing.count, to_python(listing.first));
}

resolution::DialectOptions dialect_options(const py::str& separator, const py::str& shown_separator,
                                           bool keystr, const std::optional<py::str>& hidden_key,
                                           bool unique, bool scalars_need_rules,
                                           bool size_one_is_scalar, bool min_size_first) {
    return {.path_style = {.separator = Ref::borrow(separator.ptr()),
                           .shown_separator = Ref::borrow(shown_separator.ptr()),
                           .keystr = keystr,
                           .hidden_key = hidden_key ? Ref::borrow(hidden_key->ptr()) : Ref()},
            .unique = unique,
            .scalars_need_rules = scalars_need_rules,
            .size_one_is_scalar = size_one_is_scalar,
            .min_size_first = min_size_first};
}

automata::EncodedPattern encoded(py::handle pattern) {
    if (pattern.is_none()) return std::monostate{};
    if (PyUnicode_Check(pattern.ptr())) return code_points(pattern);
    const auto list = pattern.cast<py::list>();
    std::vector<std::uint32_t> words(list.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
        const unsigned long word =
            PyLong_AsUnsignedLong(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (word > 0xFFFFFFFF) throw std::invalid_argument("a word of a pattern has over 32 bits");
        words[i] = static_cast<std::uint32_t>(word);
    }
    return words;
}

std::optional<std::uint32_t> class_number(int number) {
    if (number < 0) return std::nullopt;
    return static_cast<std::uint32_t>(number);
}

// This thread's Python state, while WithoutGil is in force.
thread_local PyThreadState* released_state = nullptr;

// Releases the GIL. Safe around a search that asks no oracle: it reads the characters of a str that
// the caller holds, which never change, an immutable program, and a DFA lent to this search alone.
class WithoutGil {
  public:
    WithoutGil() { released_state = PyEval_SaveThread(); }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() { PyEval_RestoreThread(std::exchange(released_state, nullptr)); }
};

// Lets other threads run and Ctrl-C interrupt, while one key of a path takes long.
void let_python_run() {
    // A signal handler may search as well, so it must not see the state.
    PyThreadState* const state = std::exchange(released_state, nullptr);
    PyEval_RestoreThread(state == nullptr ? PyEval_SaveThread() : state);
    const int result = PyErr_CheckSignals();
    if (state != nullptr) released_state = PyEval_SaveThread();
    pytree::check(result);
}

automata::RuleId rules_per_mode(std::size_t patterns, std::size_t modes) {
    if (modes == 0 || patterns % modes != 0)
        throw std::invalid_argument("the patterns are not the same rules in each match mode");
    return static_cast<automata::RuleId>(patterns / modes);
}

}  // namespace

RuleSet::RuleSet(const py::sequence& patterns, const py::sequence& classes,
                 const py::object& oracle, int word_class, int ascii_word_class,
                 bool empty_text_has_no_non_boundary, const py::sequence& fallbacks,
                 Argument<std::size_t> memory_budget, std::size_t modes,
                 resolution::DialectOptions dialect)
    : oracle_(Ref::borrow(oracle.ptr())),
      has_classes_(!classes.empty()),
      matcher_(compile(patterns, classes, word_class, ascii_word_class,
                       empty_text_has_no_non_boundary, memory_budget.as("memory_budget"))),
      modes_(rules_per_mode(patterns.size(), modes)),
      dialect_(std::move(dialect)) {
    for (const auto& entry : fallbacks) {
        const auto [rule, search] = entry.cast<std::pair<automata::RuleId, py::object>>();
        if (rule >= patterns.size()) throw std::invalid_argument("a search for no pattern");
        fallbacks_.push_back({rule, Ref::borrow(search.ptr())});
    }
}

automata::RuleMatcher RuleSet::compile(const py::sequence& patterns, const py::sequence& classes,
                                       int word_class, int ascii_word_class,
                                       bool empty_text_has_no_non_boundary,
                                       std::size_t memory_budget) const {
    automata::EncodedRules rules{.patterns = {},
                                 .word_class = class_number(word_class),
                                 .ascii_word_class = class_number(ascii_word_class),
                                 .empty_text_has_no_non_boundary = empty_text_has_no_non_boundary};
    for (const auto& members : classes) rules.classes.push_back(ascii_set(members.ptr()));
    rules.patterns.reserve(patterns.size());
    for (const auto& pattern : patterns) rules.patterns.push_back(encoded(pattern.ptr()));
    // Takes long for many rules, and touches no Python object.
    const py::gil_scoped_release released;
    return {rules, asking_oracle(), memory_budget, let_python_run};
}

// Borrows `this`, so that the only reference to the oracle is the one that traverse() shows. The
// DFAs that call the oracle do not outlive this object.
automata::Oracle RuleSet::asking_oracle() const {
    return [this](std::uint32_t number, char32_t c) {
        const Ref answer = Ref::checked(PyObject_CallFunction(
            oracle_.get(), "IN", number, PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, &c, 1)));
        const int accepted = PyObject_IsTrue(answer.get());
        pytree::check(accepted);
        return accepted == 1;
    };
}

int RuleSet::traverse(visitproc visit, void* arg) const {
    Py_VISIT(oracle_.get());
    for (const resolution::FallbackRule& fallback : fallbacks_) Py_VISIT(fallback.search.get());
    return 0;
}

void RuleSet::clear() {
    oracle_ = Ref::borrow(Py_None);                      // not null: a later call is a TypeError
    const auto dropped = std::exchange(fallbacks_, {});  // their destructors may call this object
}

// Calls search(text), without the GIL if the text is long. A short search is over before another
// thread wakes up, and would then wait for it: 5 ms, if that thread computes.
template <class Search>
auto RuleSet::search_in(const py::str& text, Search search) {
    constexpr Py_ssize_t kLong = 2048;  // characters; as in Python's hashlib
    const automata::Text view = pytree::text_of(text.ptr());
    const bool asks_oracle = has_classes_ && PyUnicode_IS_ASCII(text.ptr()) == 0;
    std::optional<WithoutGil> without_gil;
    if (!asks_oracle && std::cmp_greater_equal(view.length, kLong)) without_gil.emplace();
    return search(view);
}

py::object RuleSet::first_match(Argument<py::str> path) {
    const py::str text = path.as("path");
    const automata::RuleId rule = with_python_errors([&] {
        const automata::RuleId from_automaton =
            search_in(text, [&](automata::Text view) { return matcher_.first(view); });
        return resolution::first_match(from_automaton, fallbacks_,
                                       [&] { return Ref::borrow(text.ptr()); });
    });
    if (rule == automata::kNoRule) return py::none();
    return py::int_(modes_.rule_of(rule));
}

py::list RuleSet::all_matches(Argument<py::str> path) {
    const py::str text = path.as("path");
    std::vector<automata::RuleId> rules;
    with_python_errors([&] {
        search_in(text, [&](automata::Text view) { matcher_.all(view, rules); });
        resolution::add_matches(fallbacks_, [&] { return Ref::borrow(text.ptr()); }, rules);
    });
    modes_.fold(rules);
    return py::cast(rules);
}

py::tuple RuleSet::match(const py::object& tree, resolution::Answers& answers,
                         Argument<bool> strict, const py::object& min_size,
                         const py::object& replicated, const py::object& unmatched,
                         const py::object& ambiguous, bool record_events) {
    check_answers(answers);
    return with_python_errors([&] {
        const auto dfa = matcher_.lend(search());
        resolution::MatchLeaves leaves(answers, fallbacks_, modes_, dialect_,
                                       {strict.as("strict"), min_size.ptr(), replicated.ptr(),
                                        unmatched.ptr(), ambiguous.ptr(), record_events});
        const Ref matched = pytree::map_tree(tree.ptr(), dialect_.path_style, *dfa, leaves);
        return py::make_tuple(to_python(matched), to_python(leaves.unmatched()),
                              to_python(leaves.ambiguous()), to_python(leaves.misfits()),
                              to_python(leaves.events()), leaves.has_dimensions());
    });
}

py::tuple RuleSet::survey(const py::object& tree, resolution::Answers& answers,
                          const py::object& min_size, const py::object& replicated,
                          const py::object& unmatched, const py::object& ambiguous) {
    check_answers(answers);
    return with_python_errors([&] {
        const auto dfa = matcher_.lend(search());
        resolution::MatchLeaves decisions(answers, fallbacks_, modes_, dialect_,
                                          {.strict = true,
                                           .min_size = min_size.ptr(),
                                           .replicated = replicated.ptr(),
                                           .unmatched = unmatched.ptr(),
                                           .ambiguous = ambiguous.ptr(),
                                           .record_events = false});
        resolution::SurveyLeaves leaves(decisions);
        const Ref numbered = pytree::map_tree(tree.ptr(), dialect_.path_style, *dfa, leaves);
        return py::make_tuple(to_python(numbered), to_python(leaves.paths()),
                              to_python(leaves.kinds()), bytes_of(leaves.numbers()));
    });
}

void RuleSet::check_answers(const resolution::Answers& answers) const {
    if (answers.rule_count() != modes_.rule_count())
        throw std::invalid_argument("the answers are of another rule list");
}

static py::tuple counted(const resolution::CountMatches& counts) {
    py::list lost;
    for (const auto& [rules, leaves] : counts.lost())
        lost.append(py::make_tuple(rules.first, rules.second, leaves));
    return py::make_tuple(counts.matched(), counts.won(), counts.unmatched(), lost);
}

py::tuple RuleSet::count_matches(const py::object& tree, Argument<bool> strict) {
    resolution::CountMatches counts(modes_, fallbacks_, dialect_, strict.as("strict"));
    with_python_errors([&] {
        const auto dfa = matcher_.lend(automata::Search::kAll);
        pytree::map_tree(tree.ptr(), dialect_.path_style, *dfa, counts);
    });
    return counted(counts);
}

py::tuple RuleSet::count_paths(Argument<py::list> paths) {
    resolution::CountMatches counts(modes_, fallbacks_, dialect_, false);
    const py::list texts = paths.as("paths");
    with_python_errors([&] {
        const auto dfa = matcher_.lend(automata::Search::kAll);
        // A fallback rule calls into Python, which may change the list.
        for (py::ssize_t row = 0; row < PyList_GET_SIZE(texts.ptr()); ++row) {
            const Ref path = Ref::borrow(PyList_GET_ITEM(texts.ptr(), row));
            if (!PyUnicode_Check(path.get()))
                throw py::type_error("a path is of a type that the core does not take");
            counts.count(*dfa, path);
        }
    });
    return counted(counts);
}

py::tuple RuleSet::counters() const {
    const automata::DfaStats stats = matcher_.stats();
    return py::make_tuple(stats.states_built, stats.cache_clears, stats.simulated_steps,
                          matcher_.node_count());
}

void register_rule_set(py::module_& module) {
    py::class_<resolution::DialectOptions>(module, "DialectOptions", initialized())
        .def(py::init(&dialect_options));
    py::class_<RuleSet>(module, "RuleSet", initialized_and_collected<RuleSet>())
        .def(py::init<const py::sequence&, const py::sequence&, const py::object&, int, int, bool,
                      const py::sequence&, Argument<std::size_t>, std::size_t,
                      const resolution::DialectOptions&>())
        .def("first_match", &RuleSet::first_match)
        .def("all_matches", &RuleSet::all_matches)
        .def("match", &RuleSet::match)
        .def("survey", &RuleSet::survey)
        .def("count_matches", &RuleSet::count_matches)
        .def("count_paths", &RuleSet::count_paths)
        .def("counters", &RuleSet::counters);
}

}  // namespace shardrules::bind
