/* A replay of a single pool with static batches (xrunner/rules/static.py): the decisions of the
 * rule, turn by turn, and the requests and tokens of each step (xsimulator/replay/pool.py,
 * queries.py). The same decisions in the same order. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "pool_replay.h"

namespace xgpt_batching {

/* `kv_tokens` are a group's; `parts`: steps that encode a group's requests. */
struct Facts {
    int64_t groups, kv_tokens, parts;
};

/* A group's rows, and its requests of the batch with their input tokens. */
struct Group : xgpt_replay::Rows {
    std::vector<int64_t> members;
    int64_t tokens = 0;

    int64_t reserved(int64_t output) const {
        return tokens + static_cast<int64_t>(members.size()) * output;
    }
};

class Replay : public xgpt_replay::PoolReplay<Group> {
public:
    /* outputs[requests]: most output tokens of each, or forecast. ends[requests]: place in line
     * where a batch ends, by the place where it begins. */
    Replay(const xgpt_replay::Given &given, xgpt_replay::Job &job, const Facts &facts,
           const int64_t *inputs, const int64_t *outputs, const int64_t *ends)
        : PoolReplay(given, job, facts.groups), facts_(facts), inputs_(inputs), outputs_(outputs),
          ends_(ends) {}

private:
    Facts facts_;
    const int64_t *inputs_, *outputs_, *ends_;
    int64_t unfinished_ = 0, phase_ = -1, iteration_ = 0, turn_ = 0, part_ = 0;
    std::vector<int64_t> ended_;

    int64_t next_group() override {
        if (!unfinished_) {
            if (!num_waiting()) return -1;
            fill_batch();
        }
        return turn_;
    }
    bool needs_tokens() const override { return iteration_ > 0; }
    void turn(int64_t g, bool takes) override {
        if (takes) {
            collect(groups_[g], [&](int64_t) { unfinished_ -= 1; });
            groups_[g].done.clear();
        }
        if (unfinished_) decide(groups_[g], g);
        else end_batch();
        line.note_memory(held_, now_);
    }
    void fill_batch() {
        phase_ += 1;
        iteration_ = turn_ = part_ = 0;
        int64_t output = 0;
        const int64_t size = ends_[next_] - next_;
        for (int64_t g = 0; g < facts_.groups; ++g) {
            const int64_t quota = size / facts_.groups + (g < size % facts_.groups);
            for (int64_t i = 0; i < quota && num_waiting() && add(g, output); ++i) ++next_;
        }
        for (const Group &group : groups_) held_ += group.reserved(output);
    }
    /* _Batch.add of the next request */
    bool add(int64_t g, int64_t &output) {
        const int64_t q = line_[next_], most = std::max(output, outputs_[q]);
        if (groups_[g].reserved(most) + inputs_[q] + most > facts_.kv_tokens) return false;
        for (const Group &other : groups_)
            if (most > output && other.reserved(most) > facts_.kv_tokens) return false;
        groups_[g].members.push_back(q);
        groups_[g].tokens += inputs_[q];
        output = most;
        unfinished_ += 1;
        return true;
    }
    void end_batch() {
        held_ = 0;
        for (Group &group : groups_) {
            for (int64_t q : group.members) queries[q].last_s = now_;
            ended_.insert(ended_.end(), group.members.begin(), group.members.end());
            group.members.clear();
            group.tokens = 0;
            group.clear();
        }
        end(ended_, now_);
    }
    void decide(Group &group, int64_t g) {
        const int64_t count = static_cast<int64_t>(group.members.size());
        if (iteration_ == 0) {
            const int64_t until = count * (part_ + 1) / facts_.parts;
            for (int64_t i = count * part_ / facts_.parts; i < until; ++i) {
                joined_.push_back(group.members[i]);
                chunk(joined_.back(), 0, inputs_[joined_.back()]);
            }
            for (int64_t q : joined_) enter(group, g, q, inputs_[q]);
            if (!joined_.empty()) work(group, xgpt_replay::ENCODE, g, phase_, 0);
            if (++part_ < facts_.parts) return;
            part_ = 0;
        } else if (count) {
            decode(group, g);
            work(group, xgpt_replay::DECODE, g, phase_, iteration_);
        }
        if (++turn_ < facts_.groups) return;
        turn_ = 0;
        iteration_ += 1;
    }
};

}  // namespace xgpt_batching
