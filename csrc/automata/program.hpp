// All rules as one nondeterministic automaton: a trie over the elements of the patterns, so that a
// prefix that rules share is in it once, with loops and alternatives as further nodes. The nodes
// that are reached from the root through literals alone, the literal trie, have Aho-Corasick links.
// Building is linear in the unrolled size of the patterns. A Program is immutable and may be shared
// between threads. Knows nothing of how a search steps through it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "syntax.hpp"

namespace shardrules::automata {

using NodeId = std::uint32_t;
using RuleId = std::uint32_t;
inline constexpr RuleId kNoRule = 0xFFFFFFFF;
inline constexpr NodeId kRoot = 0;
inline constexpr NodeId kNoNode = 0xFFFFFFFF;
inline constexpr std::size_t kMaxNodes = std::size_t{1} << 23;

struct CharEdge {
    TestId test;
    NodeId target;
};

// Crossed without consuming a character, if the assertion holds.
struct EpsilonEdge {
    Assertion assertion;
    NodeId target;
};

class Program {
  public:
    // The lowest rule that can be reached from the node.
    RuleId first_rule(NodeId n) const { return nodes_[n].first_rule; }
    // The first rule that matches on arrival at the node, or kNoRule.
    RuleId accepts(NodeId n) const { return nodes_[n].accepts; }
    // The next rule that matches wherever this one does.
    RuleId also_accepts(RuleId r) const { return also_accepts_[r]; }
    // Where a literal leads from the node, or kNoNode.
    NodeId literal_child(NodeId n, TestId literal) const {
        constexpr std::uint32_t kFew = 8;
        const CharEdge* begin = edges_.data() + nodes_[n].edges;
        const CharEdge* const end = edges_.data() + nodes_[n].classes;
        if (end - begin > kFew)
            begin = std::lower_bound(begin, end, literal, [](const CharEdge& edge, TestId wanted) {
                return edge.test < wanted;
            });
        for (; begin != end && begin->test <= literal; ++begin)
            if (begin->test == literal) return begin->target;
        return kNoNode;
    }
    // The other edges, ascending by test. Two may have the same test.
    std::span<const CharEdge> class_edges(NodeId n) const {
        return {edges_.data() + nodes_[n].classes, edges_.data() + nodes_[n + 1].edges};
    }
    bool has_edges(NodeId n) const { return nodes_[n].edges != nodes_[n + 1].edges; }
    // Whether the node does more than read a literal.
    bool has_output(NodeId n) const {
        return accepts(n) != kNoRule || !class_edges(n).empty() || !epsilon_edges(n).empty();
    }
    // Whether the node is outside the literal trie and only reads a character.
    bool only_reads(NodeId n) const {
        return !in_literal_trie(n) && accepts(n) == kNoRule && epsilon_edges(n).empty();
    }
    bool in_literal_trie(NodeId n) const { return nodes_[n].suffix != kNoNode; }
    // In the literal trie, Aho-Corasick's suffix link: the node of the longest proper suffix of
    // this node's text. The root's is the root.
    NodeId suffix(NodeId n) const { return nodes_[n].suffix; }
    // In the literal trie, Aho-Corasick's output link: the first of the node, its suffix, the
    // suffix of that, ... that has_output(); else the root.
    NodeId output_link(NodeId n) const { return nodes_[n].output_link; }
    std::span<const EpsilonEdge> epsilon_edges(NodeId n) const {
        return {epsilon_edges_.data() + nodes_[n].epsilon_edges,
                epsilon_edges_.data() + nodes_[n + 1].epsilon_edges};
    }
    std::size_t node_count() const { return nodes_.size() - 1; }
    const CharTests& tests() const { return tests_; }
    // Python before 3.14: \B does not match the empty text.
    bool empty_text_has_no_non_boundary() const { return empty_text_has_no_non_boundary_; }

  private:
    friend class ProgramBuilder;
    struct Node {
        RuleId first_rule = kNoRule;
        RuleId accepts = kNoRule;
        std::uint32_t edges = 0;    // start in edges_, literals first; the next node's ends it
        std::uint32_t classes = 0;  // start of the others in edges_
        std::uint32_t epsilon_edges = 0;
        NodeId suffix = kNoNode;
        NodeId output_link = kNoNode;
    };
    std::vector<Node> nodes_;
    std::vector<CharEdge> edges_;
    std::vector<EpsilonEdge> epsilon_edges_;
    std::vector<RuleId> also_accepts_;
    CharTests tests_;
    bool empty_text_has_no_non_boundary_ = false;
};

// Rules are numbered by the order of the add_* calls. A call that throws std::length_error
// (over kMaxNodes) leaves the builder unusable.
class ProgramBuilder {
  public:
    ProgramBuilder();
    CharTests& tests() { return program_.tests_; }
    void set_empty_text_has_no_non_boundary(bool b) {
        program_.empty_text_has_no_non_boundary_ = b;
    }

    void add_literal(std::u32string_view text);
    void add_pattern(Syntax pattern);
    void skip();  // a rule that is not searched here
    Program build() &&;

  private:
    static constexpr NodeId kNowhere = kNoNode;  // after an element that matches nothing
    template <class T>
    struct Link {
        T value;
        std::uint32_t next;
    };
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;
    struct Draft {
        std::uint32_t edges = kNone, epsilon_edges = kNone;  // heads of lists, newest first
        RuleId last_accepted = kNoRule;
        TestId loop = kNoTest;  // a class that leads from the node back to it
    };

    NodeId new_node();
    void accept(NodeId node);
    NodeId insert(NodeId from, const Syntax& syntax);
    NodeId insert_char(NodeId from, TestId test);
    NodeId insert_alternate(NodeId from, const Syntax& syntax);
    NodeId insert_repeat(NodeId from, const Syntax& syntax);
    // The node after an element of `from` that rules share, and whether it is new.
    std::pair<NodeId, bool> element(NodeId from, const Syntax& syntax);
    void add_epsilon_edge(NodeId from, NodeId to, Assertion assertion = Assertion::kNone);
    void lay_out_edges();
    void link_literal_trie();
    void cut_short_edges();
    bool only_leads_on(NodeId node) const;
    bool is_class(const Syntax& syntax) const;

    Program program_;
    RuleId rule_ = 0;
    std::vector<Draft> drafts_;
    std::vector<Link<CharEdge>> edges_;
    std::vector<Link<EpsilonEdge>> epsilon_edges_;
    std::map<std::pair<NodeId, std::vector<std::uint32_t>>, NodeId> elements_;
};

}  // namespace shardrules::automata
