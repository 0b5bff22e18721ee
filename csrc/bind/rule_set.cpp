#include "rule_set.hpp"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "collectable.hpp"
#include "columns.hpp"
#include "errors.hpp"
#include "pytree/count_matches.hpp"
#include "pytree/survey_leaves.hpp"
#include "register.hpp"

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

py::tuple to_python(const pytree::Listing& listing) {
    return py::make_tuple(listing.count, to_python(listing.shown));
}

pytree::Choices choices_of(const py::str& separator, const py::str& shown_separator, bool keystr,
                           bool unique, bool scalars_need_rules, bool size_one_is_scalar,
                           bool min_size_first) {
    return {.separator = Ref::borrow(separator.ptr()),
            .shown_separator = Ref::borrow(shown_separator.ptr()),
            .keystr = keystr,
            .unique = unique,
            .scalars_need_rules = scalars_need_rules,
            .size_one_is_scalar = size_one_is_scalar,
            .min_size_first = min_size_first};
}

// A pattern in C++'s hands: a literal, the words of a code, or a rule to skip.
using Pattern = std::variant<std::u32string, std::vector<std::uint32_t>, std::monostate>;

Pattern taken_over(py::handle pattern) {
    if (pattern.is_none()) return std::monostate{};
    if (PyUnicode_Check(pattern.ptr())) return code_points(pattern);
    return pattern.cast<std::vector<std::uint32_t>>();
}

automata::Program compile(const py::sequence& patterns, const py::sequence& classes,
                          int word_class, int ascii_word_class,
                          bool empty_text_has_no_non_boundary) {
    automata::ProgramBuilder builder;
    builder.set_empty_text_has_no_non_boundary(empty_text_has_no_non_boundary);
    for (const py::handle members : classes) builder.tests().add_class(ascii_set(members));
    if (word_class >= 0) builder.tests().use_word(static_cast<std::uint32_t>(word_class));
    if (ascii_word_class >= 0)
        builder.tests().use_ascii_word(static_cast<std::uint32_t>(ascii_word_class));
    std::vector<Pattern> taken;
    taken.reserve(patterns.size());
    for (const py::handle pattern : patterns) taken.push_back(taken_over(pattern));
    // Long with many rules, and nobody's object is touched any more.
    const py::gil_scoped_release released;
    for (const Pattern& pattern : taken) {
        if (const auto* literal = std::get_if<std::u32string>(&pattern))
            builder.add_literal(*literal);
        else if (const auto* code = std::get_if<std::vector<std::uint32_t>>(&pattern))
            builder.add_pattern(automata::decode(*code, builder.tests()));
        else
            builder.skip();
    }
    return std::move(builder).build();
}

// Lets other threads and Ctrl-C through, where one key of a path takes long.
void let_others() {
    { const py::gil_scoped_release released; }
    pytree::check(PyErr_CheckSignals());
}

automata::RuleId rules_in_a_pass(std::size_t patterns, std::size_t passes) {
    if (passes == 0 || patterns % passes != 0)
        throw std::invalid_argument("the patterns are not the same rules in each pass");
    return static_cast<automata::RuleId>(patterns / passes);
}

}  // namespace

RuleSet::RuleSet(const py::sequence& patterns, const py::sequence& classes,
                 const py::object& accepts, int word_class, int ascii_word_class,
                 bool empty_text_has_no_non_boundary, const py::sequence& searched,
                 Given<std::size_t> memory_budget, std::size_t passes,
                 const pytree::Choices& choices)
    : accepts_(Ref::borrow(accepts.ptr())),
      program_(std::make_shared<const automata::Program>(compile(
          patterns, classes, word_class, ascii_word_class, empty_text_has_no_non_boundary))),
      first_(program_, oracle(), automata::Search::kFirst, memory_budget.as("memory_budget"),
             let_others),
      all_(program_, oracle(), automata::Search::kAll, memory_budget.as("memory_budget"), let_others),
      passes_(rules_in_a_pass(patterns.size(), passes)),
      choices_(choices) {
    for (const py::handle entry : searched) {
        const auto [rule, search] = entry.cast<std::pair<automata::RuleId, py::object>>();
        if (rule >= patterns.size()) throw std::invalid_argument("a search for no pattern");
        searched_.push_back({rule, Ref::borrow(search.ptr())});
    }
}

// Owns nothing, so that the one reference to `accepts` is the collector's to see; the DFAs that ask it
// live no longer than this object.
automata::Oracle RuleSet::oracle() const {
    return [this](std::uint32_t number, char32_t c) {
        const Ref answer = Ref::checked(
            PyObject_CallFunction(accepts_.get(), "IN", number,
                                  PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, &c, 1)));
        const int accepted = PyObject_IsTrue(answer.get());
        pytree::check(accepted);
        return accepted == 1;
    };
}

int RuleSet::traverse(visitproc visit, void* arg) const {
    Py_VISIT(accepts_.get());
    for (const pytree::SearchedRule& searched : searched_) Py_VISIT(searched.search.get());
    return 0;
}

void RuleSet::clear() {
    accepts_ = Ref::borrow(Py_None);  // not null: should it be called after all, that is a TypeError
    const auto dropped = std::exchange(searched_, {});  // its objects may come here when they go
}

py::object RuleSet::first_match(Given<py::str> given) {
    const py::str path = given.as("path");
    const automata::RuleId rule = translated([&] {
        const automata::DfaPool::Lease dfa(first_);
        dfa->enter(pytree::text_of(path.ptr()));
        return pytree::first_match(dfa->winner(), searched_,
                                   [&] { return Ref::borrow(path.ptr()); });
    });
    if (rule == automata::kNoRule) return py::none();
    return py::int_(passes_.rule_of(rule));
}

py::list RuleSet::all_matches(Given<py::str> given) {
    const py::str path = given.as("path");
    std::vector<automata::RuleId> rules;
    translated([&] {
        const automata::DfaPool::Lease dfa(all_);
        dfa->enter(pytree::text_of(path.ptr()));
        dfa->matches(rules);
        pytree::add_matches(searched_, [&] { return Ref::borrow(path.ptr()); }, rules);
    });
    passes_.fold(rules);
    return py::cast(rules);
}

py::tuple RuleSet::match(const py::object& tree, pytree::Answers& answers, Given<bool> strict,
                         const py::object& min_size, const py::object& replicated,
                         const py::object& unmatched, const py::object& ambiguous,
                         bool record_events) {
    check_answers(answers);
    return translated([&] {
        const automata::DfaPool::Lease dfa(choices_.unique ? all_ : first_);
        pytree::MatchLeaves leaves(answers, searched_, passes_, choices_,
                                   {strict.as("strict"), min_size.ptr(), replicated.ptr(), unmatched.ptr(),
                                    ambiguous.ptr(), record_events});
        const Ref matched = pytree::map_tree(tree.ptr(), choices_, *dfa, leaves);
        return py::make_tuple(to_python(matched), to_python(leaves.unmatched()),
                              to_python(leaves.ambiguous()), to_python(leaves.problems()),
                              to_python(leaves.events()));
    });
}

py::tuple RuleSet::survey(const py::object& tree, pytree::Answers& answers,
                          const py::object& min_size, const py::object& replicated,
                          const py::object& unmatched, const py::object& ambiguous) {
    check_answers(answers);
    return translated([&] {
        const automata::DfaPool::Lease dfa(choices_.unique ? all_ : first_);
        pytree::MatchLeaves decisions(answers, searched_, passes_, choices_,
                                      {.strict = true,
                                       .min_size = min_size.ptr(),
                                       .replicated = replicated.ptr(),
                                       .unmatched = unmatched.ptr(),
                                       .ambiguous = ambiguous.ptr(),
                                       .record_events = false});
        pytree::SurveyLeaves leaves(decisions);
        const Ref numbered = pytree::map_tree(tree.ptr(), choices_, *dfa, leaves);
        return py::make_tuple(to_python(numbered), to_python(leaves.paths()),
                              to_python(leaves.kinds()), column(leaves.numbers()));
    });
}

void RuleSet::check_answers(const pytree::Answers& answers) const {
    if (answers.rule_count() != passes_.rule_count())
        throw std::invalid_argument("the answers are of another rule list");
}

py::tuple RuleSet::count_matches(const py::object& tree, Given<bool> strict) {
    pytree::CountMatches counts(passes_, searched_, choices_, strict.as("strict"));
    translated([&] {
        const automata::DfaPool::Lease dfa(all_);
        pytree::map_tree(tree.ptr(), choices_, *dfa, counts);
    });
    py::list lost;
    for (const auto& [rules, leaves] : counts.lost())
        lost.append(py::make_tuple(rules.first, rules.second, leaves));
    return py::make_tuple(counts.matched(), counts.won(), counts.unmatched(), lost);
}

py::tuple RuleSet::counters() const {
    const automata::DfaStats first = first_.stats(), all = all_.stats();
    return py::make_tuple(first.states_built + all.states_built,
                          first.cache_clears + all.cache_clears,
                          first.simulated_steps + all.simulated_steps, program_->node_count());
}

void register_rule_set(py::module_& module) {
    py::class_<pytree::Choices>(module, "Choices", whole())
        .def(py::init(&choices_of), py::kw_only(), py::arg("separator"),
             py::arg("shown_separator"), py::arg("keystr"), py::arg("unique"),
             py::arg("scalars_need_rules"), py::arg("size_one_is_scalar"),
             py::arg("min_size_first"));
    py::class_<RuleSet>(module, "RuleSet", collectable<RuleSet>())
        .def(py::init<const py::sequence&, const py::sequence&, const py::object&, int, int, bool,
                      const py::sequence&, Given<std::size_t>, std::size_t, const pytree::Choices&>(),
             py::kw_only(), py::arg("patterns"), py::arg("classes"), py::arg("accepts"),
             py::arg("word_class"), py::arg("ascii_word_class"),
             py::arg("empty_text_has_no_non_boundary"), py::arg("searched"),
             py::arg("memory_budget"), py::arg("passes"), py::arg("choices"))
        .def("first_match", &RuleSet::first_match, py::arg("path"))
        .def("all_matches", &RuleSet::all_matches, py::arg("path"))
        .def("match", &RuleSet::match, py::arg("tree"), py::kw_only(), py::arg("answers"),
             py::arg("strict"), py::arg("min_size"), py::arg("replicated"), py::arg("unmatched"),
             py::arg("ambiguous"), py::arg("record_events"))
        .def("survey", &RuleSet::survey, py::arg("tree"), py::kw_only(), py::arg("answers"),
             py::arg("min_size"), py::arg("replicated"), py::arg("unmatched"),
             py::arg("ambiguous"))
        .def("count_matches", &RuleSet::count_matches, py::arg("tree"), py::kw_only(),
             py::arg("strict"))
        .def("counters", &RuleSet::counters);
}

}  // namespace shardrules::bind
