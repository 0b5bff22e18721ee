#include "program.hpp"

#include <algorithm>
#include <stdexcept>

namespace shardrules::automata {

ProgramBuilder::ProgramBuilder() {
    new_node();  // kRoot
}

void ProgramBuilder::add_literal(std::u32string_view text) {
    NodeId node = kRoot;
    for (const char32_t c : text) node = insert_char(node, program_.tests_.literal(c));
    accept(node);
}

void ProgramBuilder::add_pattern(Syntax pattern) {
    trim_for_search(pattern);
    const NodeId end = insert(kRoot, pattern);
    if (end == kNowhere)
        skip();
    else
        accept(end);
}

void ProgramBuilder::skip() {
    program_.also_accepts_.push_back(kNoRule);
    ++rule_;
}

void ProgramBuilder::accept(NodeId node) {
    RuleId& last = drafts_[node].last_accepted;
    (last == kNoRule ? program_.nodes_[node].accepts : program_.also_accepts_[last]) = rule_;
    last = rule_;
    skip();
}

NodeId ProgramBuilder::new_node() {
    if (program_.nodes_.size() >= kMaxNodes)
        throw std::length_error("the rules unroll to too many states");
    // Rules come in order, so the first rule through a node is the one that makes it.
    program_.nodes_.push_back({.first_rule = rule_});
    drafts_.emplace_back();
    return static_cast<NodeId>(program_.nodes_.size() - 1);
}

NodeId ProgramBuilder::insert(NodeId from, const Syntax& syntax) {
    using Kind = Syntax::Kind;
    switch (syntax.kind) {
        case Kind::kChar: return insert_char(from, syntax.test);
        case Kind::kNever: return kNowhere;
        case Kind::kAssert: {
            const auto [to, is_new] = element(from, syntax);
            if (is_new) add_epsilon_edge(from, to, syntax.assertion);
            return to;
        }
        case Kind::kAlternate: return insert_alternate(from, syntax);
        case Kind::kRepeat: return insert_repeat(from, syntax);
        case Kind::kSequence: {
            NodeId at = from;
            for (const Syntax& child : syntax.children) {
                at = insert(at, child);
                if (at == kNowhere) break;
            }
            return at;
        }
    }
    return kNowhere;
}

NodeId ProgramBuilder::insert_char(NodeId from, TestId test) {
    for (std::uint32_t e = drafts_[from].edges; e != kNone; e = edges_[e].next)
        if (edges_[e].value.test == test) return edges_[e].value.target;
    const NodeId to = new_node();
    edges_.push_back({{test, to}, drafts_[from].edges});
    drafts_[from].edges = static_cast<std::uint32_t>(edges_.size() - 1);
    return to;
}

NodeId ProgramBuilder::insert_alternate(NodeId from, const Syntax& syntax) {
    const auto [to, is_new] = element(from, syntax);
    if (!is_new) return to;
    for (const Syntax& branch : syntax.children) {
        const NodeId end = insert(from, branch);
        if (end != kNowhere) add_epsilon_edge(end, to);
    }
    return to;
}

NodeId ProgramBuilder::insert_repeat(NodeId from, const Syntax& syntax) {
    const Syntax& body = syntax.children.front();
    NodeId at = from;
    for (std::uint32_t i = 0; i < syntax.min && at != kNowhere; ++i) {
        const NodeId end = insert(at, body);
        if (end == at) break;  // an empty body, which may be repeated billions of times
        at = end;
    }
    if (at == kNowhere || syntax.min == syntax.max) return at;

    Syntax rest = syntax;
    rest.min = 0;
    rest.max = syntax.max == kUnbounded ? kUnbounded : syntax.max - syntax.min;
    const auto [to, is_new] = element(at, rest);
    if (!is_new) return to;
    add_epsilon_edge(at, to);
    if (rest.max == kUnbounded && is_class(body)) {  // without nodes of its own
        drafts_[to].loop = body.test;
    } else if (rest.max == kUnbounded) {
        const NodeId loop = new_node();
        add_epsilon_edge(at, loop);
        const NodeId end = insert(loop, body);
        if (end != kNowhere && end != loop) add_epsilon_edge(end, loop);
        add_epsilon_edge(loop, to);
    } else {
        for (std::uint32_t i = 0; i < rest.max; ++i) {
            const NodeId end = insert(at, body);
            if (end == kNowhere || end == at) break;
            at = end;
            add_epsilon_edge(at, to);
        }
    }
    return to;
}

std::pair<NodeId, bool> ProgramBuilder::element(NodeId from, const Syntax& syntax) {
    std::vector<std::uint32_t> key;
    append_key(syntax, key);
    const auto [found, added] = elements_.try_emplace({from, std::move(key)}, kNowhere);
    if (added) found->second = new_node();
    return {found->second, added};
}

void ProgramBuilder::add_epsilon_edge(NodeId from, NodeId to, Assertion assertion) {
    epsilon_edges_.push_back({{assertion, to}, drafts_[from].epsilon_edges});
    drafts_[from].epsilon_edges = static_cast<std::uint32_t>(epsilon_edges_.size() - 1);
}

Program ProgramBuilder::build() && {
    lay_out_edges();
    link_literal_trie();
    cut_short_edges();
    const auto& nodes = program_.nodes_;
    // Nothing is left to find from the root once the first of all rules has matched.
    RuleId first = kNoRule;
    for (const Program::Node& node : nodes) first = std::min(first, node.accepts);
    program_.nodes_[kRoot].first_rule = first;
    return std::move(program_);
}

void ProgramBuilder::lay_out_edges() {
    std::vector<Program::Node>& nodes = program_.nodes_;
    std::vector<CharEdge>& edges = program_.edges_;
    edges.reserve(edges_.size());
    const auto by_test = [](const CharEdge& a, const CharEdge& b) { return a.test < b.test; };
    program_.epsilon_edges_.reserve(epsilon_edges_.size());
    for (NodeId n = 0; n < drafts_.size(); ++n) {
        nodes[n].edges = static_cast<std::uint32_t>(edges.size());
        nodes[n].epsilon_edges = static_cast<std::uint32_t>(program_.epsilon_edges_.size());
        for (std::uint32_t e = drafts_[n].edges; e != kNone; e = edges_[e].next)
            edges.push_back(edges_[e].value);
        if (drafts_[n].loop != kNoTest) edges.push_back({drafts_[n].loop, n});
        for (std::uint32_t j = drafts_[n].epsilon_edges; j != kNone; j = epsilon_edges_[j].next)
            program_.epsilon_edges_.push_back(epsilon_edges_[j].value);
        const auto begin = edges.begin() + nodes[n].edges;
        const auto classes = std::partition(begin, edges.end(), [&](const CharEdge& edge) {
            return program_.tests_.is_literal(edge.test);
        });
        std::sort(begin, classes, by_test);
        std::sort(classes, edges.end(), by_test);
        nodes[n].classes = static_cast<std::uint32_t>(classes - edges.begin());
    }
    const auto end = static_cast<std::uint32_t>(edges.size());
    nodes.push_back({.edges = end,
                     .classes = end,
                     .epsilon_edges = static_cast<std::uint32_t>(program_.epsilon_edges_.size())});
}

// Aho and Corasick's suffix links, breadth first.
void ProgramBuilder::link_literal_trie() {
    std::vector<Program::Node>& nodes = program_.nodes_;
    nodes[kRoot].suffix = nodes[kRoot].output_link = kRoot;
    std::vector<NodeId> found{kRoot};
    for (std::size_t next = 0; next < found.size(); ++next) {
        const NodeId parent = found[next];
        for (std::uint32_t e = nodes[parent].edges; e != nodes[parent].classes; ++e) {
            const auto [test, node] = program_.edges_[e];
            NodeId suffix = parent;
            NodeId target = kNoNode;
            while (suffix != kRoot && target == kNoNode) {
                suffix = nodes[suffix].suffix;
                target = program_.literal_child(suffix, test);
            }
            nodes[node].suffix = target == kNoNode ? kRoot : target;
            nodes[node].output_link =
                program_.has_output(node) ? node : nodes[nodes[node].suffix].output_link;
            found.push_back(node);
        }
    }
}

bool ProgramBuilder::is_class(const Syntax& syntax) const {
    return syntax.kind == Syntax::Kind::kChar && !program_.tests_.is_literal(syntax.test);
}

// An edge to a node that has only one epsilon edge leads to the end of that edge instead. This
// ends: of the nodes of a circle of epsilon edges, one has another edge. Nodes of the literal trie
// are not skipped.
void ProgramBuilder::cut_short_edges() {
    for (NodeId n = 0; n < program_.node_count(); ++n) {
        const Program::Node& node = program_.nodes_[n];
        std::uint32_t e = program_.in_literal_trie(n) ? node.classes : node.edges;
        for (; e != program_.nodes_[n + 1].edges; ++e) {
            NodeId& target = program_.edges_[e].target;
            while (only_leads_on(target)) target = program_.epsilon_edges(target).front().target;
        }
    }
}

bool ProgramBuilder::only_leads_on(NodeId n) const {
    const std::span<const EpsilonEdge> edges = program_.epsilon_edges(n);
    return edges.size() == 1 && edges.front().assertion == Assertion::kNone &&
           !program_.has_edges(n) && program_.accepts(n) == kNoRule;
}

}  // namespace shardrules::automata
