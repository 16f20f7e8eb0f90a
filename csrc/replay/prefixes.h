/* Shared prefixes in the KV cache of one replica: as xrunner/rules/prefixes.py, which explains it.
 * All requests are in line from the beginning on, in the order of their numbers. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace xgpt_prefixes {

/* As xgpt.core.prefixes.Prefixes; `size`: number of nodes. own[nodes]: a node's own tokens. */
struct Forest {
    int64_t size, block_tokens, is_whole;
    const int64_t *parents, *ends, *own, *nodes;
};

/* A node. `line`: requests that wait, the first one last; some of them have begun since.
 * `writer`: the request that encodes it, -1 once it is encoded. `end`: up to which token requests
 * that begin now can share it. */
struct Node {
    int64_t at_work = 0, writer = -1, seen = 0, end = 0;
    bool lives = false;
    std::vector<int64_t> line;
};

/* `tokens`: of all that live. `first`: of the latest admitted request, the first token that it
 * encodes. `told`: what the step that is being decided does, in threes: a request, the node that
 * holds its first tokens, and `first`; behind it itself, each node that it encodes, and its end;
 * -1, a node that goes, 0. */
class Living {
public:
    int64_t tokens = 0, first = 0;
    std::vector<int64_t> told;

    Living(const Forest &forest, int64_t num_queries)
        : forest_(forest), nodes_(forest.size), places_(num_queries) {
        for (int64_t q = num_queries - 1; q >= 0; --q) {
            places_[q] = q;
            each(q, [&](int64_t, Node &node) { node.line.push_back(q); });
        }
    }
    template <class Queries = std::initializer_list<int64_t>>
    int64_t to_encode(const Queries &queries) {
        int64_t all = 0;
        stamp_ += 1;
        for (int64_t q : queries) {
            int64_t there = 0, shared = 0;
            each(q, [&](int64_t n, Node &node) {
                if (node.lives) {
                    there = std::max(there, forest_.ends[n]);
                    shared = std::max(shared, node.end);
                } else if (node.seen != stamp_) {
                    all += forest_.own[n];
                }
                node.seen = stamp_;
            });
            all += there - shared;
        }
        return all;
    }
    template <class Fits>
    bool make_room(int64_t q, const Fits &fits) {
        bool waits = false;
        each(q, [&](int64_t, Node &node) { waits |= node.lives && node.writer >= 0; });
        if (waits) return false;
        int64_t wanted = tokens;
        stamp_ += 1;
        each(q, [&](int64_t n, Node &node) {
            wanted += node.lives ? 0 : forest_.own[n];
            node.seen = stamp_;
        });
        std::vector<Idle> going;
        for (auto idle = idle_.rbegin(); !fits(wanted); ++idle) {
            while (idle != idle_.rend() && nodes_[idle->second].seen == stamp_) ++idle;
            if (idle == idle_.rend()) return false;
            wanted -= forest_.own[idle->second];
            going.push_back(*idle);
        }
        for (const Idle &idle : going) release(idle);
        return true;
    }
    bool let_go() {
        if (idle_.empty()) return false;
        release(*idle_.rbegin());
        return true;
    }
    void admit(int64_t q) {
        first = 0;
        if (forest_.nodes[q] < 0) return;
        int64_t source = -1;
        const auto begin = static_cast<int64_t>(told.size());
        each(q, [&](int64_t n, Node &node) {
            if (!node.lives) {
                node.lives = true;
                node.writer = q;
                node.end = end_of(n, forest_.is_whole);
                tokens += forest_.own[n];
                told.insert(told.begin() + begin, {q, n, forest_.ends[n]});
            } else if (node.end && node.end >= first) {
                first = node.end;
                source = n;
            }
            if (!node.at_work++) idle_.erase({next_use(node), n});
        });
        told.insert(told.begin() + begin, {q, source, first});
        places_[q] = AT_WORK;
    }
    void encode(int64_t q, int64_t end) {
        each(q, [&](int64_t n, Node &node) {
            if (node.writer != q || forest_.ends[n] > end) return;
            node.writer = -1;
            node.end = end_of(n, true);
            new_.push_back(n);
        });
    }
    void finish(int64_t q) {
        each(q, [&](int64_t n, Node &node) { leave(n, node, false); });
    }
    void evict(int64_t q) {
        places_[q] = --before_;
        each(q, [&](int64_t n, Node &node) {
            node.line.push_back(q);
            leave(n, node, node.writer == q);
        });
    }
    void end_step() {
        for (int64_t n : new_) nodes_[n].end = end_of(n, forest_.is_whole);
        new_.clear();
        told.clear();
    }

private:
    using Idle = std::pair<int64_t, int64_t>;  // place of its next request, node
    static constexpr int64_t AT_WORK = std::numeric_limits<int64_t>::max();
    Forest forest_;
    std::vector<Node> nodes_;
    std::vector<int64_t> places_, new_;  // places in line by request
    std::set<Idle> idle_;                // no place changes while its node is idle
    int64_t before_ = 0, stamp_ = 0;

    /* Calls act(number, node) with each node of the request, the deepest first. */
    template <class Act>
    void each(int64_t q, const Act &act) {
        for (int64_t n = forest_.nodes[q]; n >= 0; n = forest_.parents[n]) act(n, nodes_[n]);
    }
    int64_t end_of(int64_t n, bool is_whole) const {
        const int64_t unit = is_whole ? forest_.block_tokens : 1;
        return forest_.ends[n] / unit * unit;
    }
    int64_t next_use(Node &node) {
        while (!node.line.empty() && places_[node.line.back()] == AT_WORK) node.line.pop_back();
        return node.line.empty() ? AT_WORK : places_[node.line.back()];
    }
    void leave(int64_t n, Node &node, bool goes) {
        if (--node.at_work) return;
        if (goes) release({AT_WORK, n});
        else idle_.insert({next_use(node), n});
    }
    void release(const Idle idle) {
        idle_.erase(idle);
        nodes_[idle.second].lives = false;
        tokens -= forest_.own[idle.second];
        told.insert(told.end(), {-1, idle.second, 0});
    }
};

}  // namespace xgpt_prefixes
