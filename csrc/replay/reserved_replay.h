/* A replay of a single pool whose rule reserves a request's tokens at admission: RRA's
 * (xrunner/rules/rra.py, chunks.py, batch_sizer.py) or ORCA's (iteration.py). The decisions of
 * the rule, turn by turn, and the requests and tokens of each step (xsimulator/replay/pool.py,
 * queries.py). The same decisions in the same order, from the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "pool_replay.h"

#include "batch_sizer.h"

namespace xgpt_reserving {

/* `iterations` 0: ORCA's rule. `kv_tokens` and `most_active` are a group's (ORCA's groups have
 * slots of their own); `chunk` 0: inputs are encoded whole. */
struct Facts {
    int64_t queries, groups, kv_tokens, iterations, encode_batch, most_active, chunk;
    double target_active;  // target of decode batches; 0: none
};

struct Query : xgpt_replay::Query {
    int64_t tokens, reserve, left;
};

struct Group : xgpt_replay::Rows<Query> {
    int64_t active = 0, reserved = 0, slots = 0, steps = 0;
    // chunks of a phase: requests assigned from `begin` on, and the partly encoded one
    std::vector<int64_t> dealt;
    size_t begin = 0;
    int64_t part = -1, part_done = 0, tokens = 0, size = 0;

    int64_t waiting() const { return static_cast<int64_t>(dealt.size() - begin); }
};

class Replay : public xgpt_replay::PoolReplay<Query, Group> {
public:
    Replay(const xgpt_replay::Given &given, const Facts &facts, const Sizer &sizer,
           const int64_t *slots, const int64_t *tokens, const int64_t *reserves, const int64_t *left)
        : PoolReplay(given, facts.groups, facts.queries), facts_(facts), sizer_(sizer) {
        for (int64_t g = 0; g < facts.groups; ++g) groups_[g].slots = slots[g];
        for (int64_t q = 0; q < facts.queries; ++q)
            queries[q] = {{}, tokens[q], reserves[q], left[q]};
        iteration_ = first_iteration();
    }
    void run() {
        for (int64_t g; (g = facts_.iterations ? next_of_phase() : next_in_turn()) >= 0;) {
            Group &group = groups_[g];
            begin_turn(group, [&](Query &query) { give_back(group, query); });
            if (!facts_.iterations) decide_in_turn(group, g);
            else if (facts_.chunk) decide_mixed(group, g);
            else decide_phase(group, g);
            line.note_memory(held_, now_);
        }
    }

private:
    Facts facts_;
    Sizer sizer_;
    int64_t next_ = 0;  // the first waiting request: they are taken in their order
    int64_t phase_ = 0, iteration_ = 0, turn_ = 0, every_ = 1, num_active_ = 0;

    int64_t num_waiting() const { return facts_.queries - next_; }
    int64_t first_iteration() const { return facts_.chunk > 0; }

    int64_t next_in_turn() {
        for (int64_t ahead = 0; ahead < facts_.groups; ++ahead) {
            int64_t g = (turn_ + ahead) % facts_.groups;
            if (groups_[g].active || num_waiting()) return turn_ = g;
        }
        return -1;
    }
    int64_t next_of_phase() {
        bool is_at_work = num_active_ > 0;
        for (size_t g = 0; facts_.chunk && !is_at_work && g < groups_.size(); ++g)
            is_at_work = groups_[g].waiting() > 0;
        if (!is_at_work && !num_waiting()) return -1;
        if (iteration_ > first_iteration() && !is_at_work) start_next_phase();
        return turn_;
    }
    void start_next_phase() {
        phase_ += 1;
        iteration_ = first_iteration();
        turn_ = 0;
    }
    void advance() {
        if (++turn_ < facts_.groups) return;
        turn_ = 0;
        if (++iteration_ > facts_.iterations) start_next_phase();
    }

    bool admit(Group &group, int64_t q, int64_t slots) {
        int64_t reserve = queries[q].reserve;
        if (group.active >= slots || group.reserved + reserve > facts_.kv_tokens) return false;
        group.active += 1;
        group.reserved += reserve;
        num_active_ += 1;
        held_ += reserve;
        return true;
    }
    void give_back(Group &group, const Query &query) {
        group.active -= 1;
        group.reserved -= query.reserve;
        num_active_ -= 1;
        held_ -= query.reserve;
    }

    /* OrcaRule.decide */
    void decide_in_turn(Group &group, int64_t g) {
        bool is_decode = group.active > 0;
        if (num_waiting() && admit(group, next_, group.slots)) {
            joined_.push_back(next_++);
            whole();
        }
        int64_t number = group.steps++;
        turn_ = (g + 1) % facts_.groups;
        execute(group, g, is_decode, number, is_decode);
    }
    /* RraRule.decide */
    void decide_phase(Group &group, int64_t g) {
        bool is_decode = iteration_ > 0;
        if (!is_decode) {
            for (int64_t wanted = this->wanted(group, g); wanted > 0; --wanted) {
                if (!admit(group, next_, facts_.most_active)) break;
                joined_.push_back(next_++);
            }
            whole();
        }
        execute(group, g, is_decode && group.active > 0, phase_, iteration_);
        advance();
    }
    /* RraRule._decide_mixed */
    void decide_mixed(Group &group, int64_t g) {
        if (iteration_ == first_iteration() && g == 0) {
            for (int64_t each = 0; each < facts_.groups; ++each) deal(groups_[each], each);
            begin_phase();
        }
        bool is_decode = group.active > (group.part >= 0);
        take(group);
        execute(group, g, is_decode, phase_, iteration_);
        advance();
    }
    void deal(Group &group, int64_t g) {
        if (group.waiting() >= quota(g)) return;
        for (int64_t wanted = this->wanted(group, g); wanted > 0; --wanted) {
            group.tokens += queries[next_].tokens;
            group.dealt.push_back(next_++);
        }
    }
    /* PhaseChunks.begin_phase */
    void begin_phase() {
        int64_t most = 0, iterations = facts_.iterations;
        for (const Group &own : groups_) most = std::max(most, own.tokens);
        every_ = std::min(std::max(facts_.chunk * iterations / std::max<int64_t>(most, 1),
                                   int64_t{1}), iterations);
        int64_t times = (iterations + every_ - 1) / every_;
        for (Group &own : groups_) own.size = std::min((own.tokens + times - 1) / times,
                                                       facts_.chunk);
    }
    /* PhaseChunks.take */
    void take(Group &group) {
        int64_t left = (iteration_ - 1) % every_ == 0 ? group.size : 0;
        while (left > 0) {
            if (group.part < 0) {
                if (!group.waiting() || !admit(group, group.dealt[group.begin],
                                               facts_.most_active)) break;
                group.part = group.dealt[group.begin++];
                group.part_done = 0;
            }
            int64_t tokens = queries[group.part].tokens;
            int64_t size = std::min(left, tokens - group.part_done);
            chunk(group.part, group.part_done, size);
            group.part_done += size;
            group.tokens -= size;
            left -= size;
            if (group.part_done == tokens) {
                joined_.push_back(group.part);
                group.part = -1;
            }
        }
    }

    int64_t quota(int64_t g) const {
        int64_t base = facts_.encode_batch / facts_.groups, odd = facts_.encode_batch % facts_.groups;
        return base + ((g + phase_ * odd) % facts_.groups < odd);
    }
    /* RraRule._wanted */
    int64_t wanted(const Group &group, int64_t g) const {
        int64_t quota = this->quota(g), lean = 0;
        if (!quota) return 0;
        if (facts_.target_active != 0.0 && num_waiting() >= facts_.encode_batch) {
            double groups = static_cast<double>(facts_.groups);
            double carried = facts_.target_active / groups;
            double away = static_cast<double>(group.active) - carried;
            double mean = carried + static_cast<double>(facts_.encode_batch) / groups;
            lean = sizer_.lean(away, mean);
        }
        auto tokens = [this](int64_t place) { return queries[next_ + place].tokens; };
        return sizer_.count(tokens, num_waiting(), quota, lean);
    }

    void whole() {
        for (int64_t q : joined_) chunk(q, 0, queries[q].tokens);
    }
    /* PoolHead._execute, if there is a step */
    void execute(Group &group, int64_t g, bool decodes, int64_t phase, int64_t iteration) {
        const bool encodes = !line.sizes.spans.empty();
        if (!decodes && !encodes) return;
        if (decodes) decode(group, g);
        for (int64_t q : joined_) enter(group, g, q, queries[q].tokens, queries[q].left);
        work(group, !encodes ? xgpt_replay::DECODE
                    : decodes ? xgpt_replay::MIXED
                              : xgpt_replay::ENCODE, g, phase, iteration);
    }
};

}  // namespace xgpt_reserving
