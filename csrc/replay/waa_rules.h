/* Decisions of WAA's two rules (xrunner/rules/waa.py, chunks.py), from the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "batch_sizer.h"

namespace xgpt_waa {

/* What rules know of requests, by number: tokens that each reserves, and of its input. */
struct Asked {
    const int64_t *reserves, *inputs;
};

/* WaaEncodeRule; `groups` is the number of steps that may be under way. */
struct EncodeFacts {
    int64_t batch, groups, max_in_system, kv_tokens, encode_kv_tokens, planned_active, stock_tokens;
    double target_active;
};

class EncodeRule {
public:
    EncodeRule(const EncodeFacts &facts, const xgpt_reserving::Sizer &sizer, const Asked &asked)
        : facts_(facts), sizer_(sizer), asked_(asked) {}

    int64_t held() const { return held_; }
    void submit(int64_t query) {
        waiting_.push_back(query);
        next_.waiting = -1;
    }
    /* WaaEncodeRule.share_inputs: the next request for the decode pool to encode; -1: none. */
    int64_t give() {
        if (waiting_.empty() || given_tokens_ >= facts_.stock_tokens ||
            in_system_ - encoding_ - given_ >= facts_.planned_active || !has_room())
            return -1;
        const int64_t query = take();
        given_ += 1;
        given_tokens_ += asked_.inputs[query];
        return query;
    }
    /* WaaEncodeRule.note_begun: the decode pool has begun to encode one of these. */
    void begun(int64_t query) {
        given_ -= 1;
        given_tokens_ -= asked_.inputs[query];
    }
    int64_t next_group() { return batch() ? steps_ % facts_.groups : -1; }
    /* Fills in the requests of the next step; returns the number of steps before it, -1 for
     * none. */
    int64_t decide(std::vector<int64_t> &joined) {
        const int64_t count = batch();
        joined.clear();
        if (!count) return -1;
        while (static_cast<int64_t>(joined.size()) < count) {
            joined.push_back(take());
            encoding_ += 1;
            held_ += asked_.inputs[joined.back()];
        }
        return steps_++;
    }
    /* Records that the request has left this pool. */
    void finish(int64_t query) {
        encoding_ -= 1;
        held_ -= asked_.inputs[query];
    }
    /* Records that the request is done. */
    void release(int64_t query) {
        in_system_ -= 1;
        reserved_ -= asked_.reserves[query];
    }

private:
    /* The next batch, and the state it was computed for. */
    struct Next {
        int64_t lean = 0, waiting = -1, count = 0, wanted = 0, tokens = 0;
    };
    EncodeFacts facts_;
    xgpt_reserving::Sizer sizer_;
    Asked asked_;
    std::deque<int64_t> waiting_;
    Next next_;
    int64_t in_system_ = 0, encoding_ = 0, given_ = 0, given_tokens_ = 0, held_ = 0, reserved_ = 0;
    int64_t steps_ = 0;

    int64_t take() {
        const int64_t query = waiting_.front();
        waiting_.pop_front();
        in_system_ += 1;
        reserved_ += asked_.reserves[query];
        return query;
    }
    bool has_room() {
        const Next &next = next_batch();
        return in_system_ + next.count < facts_.max_in_system &&
               reserved_ + next.wanted + asked_.reserves[waiting_.front()] <= facts_.kv_tokens;
    }
    int64_t batch() {
        const Next &next = next_batch();
        if (held_ + next.tokens > facts_.encode_kv_tokens) return 0;
        const bool is_full = next.count > facts_.max_in_system - in_system_ ||
                             reserved_ + next.wanted > facts_.kv_tokens;
        return in_system_ && is_full ? 0 : next.count;
    }
    const Next &next_batch() {
        const int64_t waiting = static_cast<int64_t>(waiting_.size());
        int64_t lean = 0;
        if (facts_.target_active != 0.0)
            lean = sizer_.lean(static_cast<double>(in_system_ - encoding_) - facts_.target_active,
                               facts_.target_active);
        if (next_.waiting == waiting && next_.lean == lean) return next_;
        auto tokens = [this](int64_t place) { return asked_.inputs[waiting_[place]]; };
        next_ = {lean, waiting, sizer_.count(tokens, waiting, facts_.batch, lean), 0, 0};
        for (int64_t place = 0; place < next_.count; ++place) add(place, 1);
        while (next_.wanted > facts_.kv_tokens || next_.tokens > facts_.encode_kv_tokens)
            add(--next_.count, -1);
        return next_;
    }
    void add(int64_t place, int64_t times) {
        next_.wanted += times * asked_.reserves[waiting_[place]];
        next_.tokens += times * asked_.inputs[waiting_[place]];
    }
};

struct Chunk {
    int64_t query, first, tokens;
};

/* A step of the decode pool. */
struct Decided {
    int64_t group, phase;
    bool decodes;
    std::vector<int64_t> handed, joined;
    std::vector<Chunk> chunks;
};

/* WaaDecodeRule; chunk 0: it encodes nothing, planned_active 0: without limit. */
struct DecodeFacts {
    int64_t groups, group_most, chunk, planned_active;
};

class DecodeRule {
public:
    DecodeRule(const DecodeFacts &facts, const Asked &asked, int64_t queries)
        : facts_(facts), asked_(asked), active_(facts.groups), parts_(facts.groups),
          group_of_(queries, -1) {}

    int64_t held() const { return held_; }
    void submit(int64_t query) {
        arrived_.push_back(query);
        held_ += asked_.reserves[query];
    }
    void take(int64_t query) {
        inputs_.push_back(query);
        held_ += asked_.reserves[query];
    }
    int64_t next_group() const {
        const bool is_idle = !num_active_ && arrived_.empty() && inputs_.empty();
        return is_idle ? -1 : turn_ % facts_.groups;
    }
    /* Returns whether there is a step. */
    bool decide(Decided &step) {
        const int64_t group = step.group = turn_ % facts_.groups;
        step.phase = turn_++ / facts_.groups;
        step.handed.clear();
        step.joined.clear();
        step.chunks.clear();
        const int64_t most = this->most(num_active_ + num_arrived());
        for (; !arrived_.empty() && active_[group] < most; arrived_.pop_front()) {
            seat(arrived_.front(), group);
            step.handed.push_back(arrived_.front());
        }
        step.decodes = active_[group] > (parts_[group].query >= 0);
        if (facts_.chunk) encode(step, group);
        return step.decodes || !step.chunks.empty();
    }
    void finish(int64_t query) {
        active_[group_of_[query]] -= 1;
        num_active_ -= 1;
        held_ -= asked_.reserves[query];
    }

private:
    /* A partly encoded request. */
    struct Part {
        int64_t query = -1, done = 0;
    };
    DecodeFacts facts_;
    Asked asked_;
    std::deque<int64_t> arrived_, inputs_;
    std::vector<int64_t> active_;
    std::vector<Part> parts_;
    std::vector<int64_t> group_of_;
    int64_t num_active_ = 0, held_ = 0, turn_ = 0;

    int64_t num_arrived() const { return static_cast<int64_t>(arrived_.size()); }
    int64_t most(int64_t present) const {
        return std::min((present + facts_.groups - 1) / facts_.groups, facts_.group_most);
    }
    void seat(int64_t query, int64_t group) {
        active_[group] += 1;
        num_active_ += 1;
        group_of_[query] = group;
    }
    /* DecodePoolInputs.take */
    void encode(Decided &step, int64_t group) {
        const int64_t waiting = static_cast<int64_t>(inputs_.size());
        const int64_t most = this->most(num_active_ + num_arrived() + waiting);
        Part &part = parts_[group];
        for (int64_t left = facts_.chunk; left > 0;) {
            if (part.query < 0) {
                const bool is_full = active_[group] >= most ||
                    (facts_.planned_active && num_active_ >= facts_.planned_active);
                if (inputs_.empty() || is_full) break;
                part = {inputs_.front(), 0};
                inputs_.pop_front();
                seat(part.query, group);
            }
            const int64_t tokens = asked_.inputs[part.query];
            const int64_t size = std::min(left, tokens - part.done);
            step.chunks.push_back({part.query, part.done, size});
            part.done += size;
            left -= size;
            if (part.done < tokens) continue;
            step.joined.push_back(part.query);
            part = {};
        }
    }
};

}  // namespace xgpt_waa
