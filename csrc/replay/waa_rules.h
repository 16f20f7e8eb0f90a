/* Decisions of WAA's two rules (xrunner/rules/waa.py, chunks.py), from the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "batch_sizer.h"
#include "room.h"

namespace xgpt_waa {

/* What rules know of requests, by number: tokens that each reserves, and of its input. `terms`: of
 * the decode pool's rooms. */
struct Asked {
    int64_t queries;
    const int64_t *reserves, *inputs;
    xgpt_room::Terms terms;
};

/* Requests, each forecast at its cap, which counts `ahead` tokens more; and `more` other ones. */
struct Capped : xgpt_room::Requests {
    Capped(const Asked &asked, int64_t ahead, int64_t more)
        : Requests{}, own_inputs(asked.inputs, asked.inputs + asked.queries),
          own_reserves(asked.reserves, asked.reserves + asked.queries) {
        for (int64_t &one : own_reserves) one += ahead;
        for (auto *own : {&own_inputs, &own_reserves}) own->resize(asked.queries + more);
        own_all.resize(own_inputs.size());
        all = own_all.data();
        inputs = own_inputs.data();
        first = reserves = own_reserves.data();
    }
    Capped(const Capped &) = delete;

    std::vector<int64_t> own_inputs, own_reserves;
    std::vector<xgpt_room::Request> own_all;
};

/* WaaEncodeRule; `groups` is the number of steps that may be under way. */
struct EncodeFacts {
    int64_t batch, groups, max_in_system, encode_kv_tokens, planned_active, stock_tokens;
    double target_active;
};

class EncodeRule {
public:
    EncodeRule(const EncodeFacts &facts, const xgpt_reserving::Sizer &sizer, const Asked &asked)
        : facts_(facts), sizer_(sizer), asked_(asked), ahead_(asked.terms.is_planned()),
          requests_(asked, ahead_, 1) {
        system_.open(asked.terms, requests_);
    }

    int64_t held() const { return held_; }
    void submit(int64_t query) {
        waiting_.push_back(query);
        next_.waiting = -1;
    }
    /* WaaEncodeRule.share_inputs: the next request for the decode pool to encode; -1: none. */
    int64_t give() {
        if (waiting_.empty() || given_tokens_ >= facts_.stock_tokens ||
            system_.active - encoding_ - given_ >= facts_.planned_active || !has_room())
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
    /* SystemRoom.note_joined */
    void joined(const std::vector<int64_t> &queries, int64_t phase) {
        system_.advance_to(phase);
        for (int64_t query : queries) system_.begin(query);
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
    void release(int64_t query) { system_.finish(query); }

private:
    /* The next batch, and the state it was computed for. */
    struct Next {
        int64_t lean = 0, waiting = -1, count = 0, wanted = 0, tokens = 0;
    };
    EncodeFacts facts_;
    xgpt_reserving::Sizer sizer_;
    Asked asked_;
    int64_t ahead_;
    Capped requests_;  // behind them a batch, as one request
    xgpt_room::Room system_;
    std::deque<int64_t> waiting_;
    Next next_;
    int64_t encoding_ = 0, given_ = 0, given_tokens_ = 0, held_ = 0, steps_ = 0;

    int64_t take() {
        const int64_t query = waiting_.front();
        waiting_.pop_front();
        system_.admit(query, false);
        return query;
    }
    bool is_free(int64_t wanted, int64_t tokens) {
        requests_.own_inputs.back() = tokens;
        requests_.own_reserves.back() = wanted;
        return system_.has_room(asked_.queries, false);
    }
    bool has_room() {
        const Next &next = next_batch();
        const int64_t first = waiting_.front();
        const int64_t wanted = next.wanted + asked_.reserves[first] + ahead_;
        return system_.active + next.count < facts_.max_in_system &&
               wanted <= asked_.terms.tokens && is_free(wanted, next.tokens + asked_.inputs[first]);
    }
    int64_t batch() {
        const Next &next = next_batch();
        if (!next.count || held_ + next.tokens > facts_.encode_kv_tokens) return 0;
        if (system_.active && system_.active + next.count > facts_.max_in_system) return 0;
        return is_free(next.wanted, next.tokens) ? next.count : 0;
    }
    const Next &next_batch() {
        const int64_t waiting = static_cast<int64_t>(waiting_.size());
        int64_t lean = 0;
        if (facts_.target_active != 0.0)
            lean = sizer_.lean(
                static_cast<double>(system_.active - encoding_) - facts_.target_active,
                facts_.target_active);
        if (next_.waiting == waiting && next_.lean == lean) return next_;
        auto tokens = [this](int64_t place) { return asked_.inputs[waiting_[place]]; };
        next_ = {lean, waiting, sizer_.count(tokens, waiting, facts_.batch, lean), 0, 0};
        for (int64_t place = 0; place < next_.count; ++place) add(place, 1);
        while (next_.count > 1 && (next_.wanted > asked_.terms.tokens ||
                                   next_.tokens > facts_.encode_kv_tokens))
            add(--next_.count, -1);
        return next_;
    }
    void add(int64_t place, int64_t times) {
        next_.wanted += times * (asked_.reserves[waiting_[place]] + ahead_);
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
    DecodeRule(const DecodeFacts &facts, const Asked &asked)
        : tells_joined(asked.terms.is_planned()), facts_(facts), asked_(asked),
          requests_(asked, 0, 0), rooms_(facts.groups), parts_(facts.groups),
          group_of_(asked.queries, -1) {
        for (xgpt_room::Room &room : rooms_) room.open(asked.terms, requests_);
    }

    const bool tells_joined;

    int64_t held() const {
        int64_t held = coming_;
        for (const xgpt_room::Room &room : rooms_) held += room.held;
        return held;
    }
    void submit(int64_t query) {
        arrived_.push_back(query);
        coming_ += asked_.reserves[query];
    }
    void take(int64_t query) {
        inputs_.push_back(query);
        coming_ += asked_.reserves[query];
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
        for (; !arrived_.empty() && admit(arrived_.front(), group, most, true);
             arrived_.pop_front())
            step.handed.push_back(arrived_.front());
        step.decodes = rooms_[group].decoding > 0;
        if (step.decodes) rooms_[group].advance();
        if (facts_.chunk) encode(step, group);
        return step.decodes || !step.chunks.empty();
    }
    void finish(int64_t query) {
        rooms_[group_of_[query]].finish(query);
        num_active_ -= 1;
    }

private:
    /* A partly encoded request. */
    struct Part {
        int64_t query = -1, done = 0;
    };
    DecodeFacts facts_;
    Asked asked_;
    Capped requests_;
    std::vector<xgpt_room::Room> rooms_;
    std::deque<int64_t> arrived_, inputs_;
    std::vector<Part> parts_;
    std::vector<int64_t> group_of_;
    int64_t num_active_ = 0, coming_ = 0, turn_ = 0;

    int64_t num_arrived() const { return static_cast<int64_t>(arrived_.size()); }
    int64_t most(int64_t present) const {
        return std::min((present + facts_.groups - 1) / facts_.groups, facts_.group_most);
    }
    bool admit(int64_t query, int64_t group, int64_t most, bool decodes) {
        xgpt_room::Room &room = rooms_[group];
        if (room.active >= most || !room.has_room(query, decodes)) return false;
        room.admit(query, decodes);
        coming_ -= asked_.reserves[query];
        num_active_ += 1;
        group_of_[query] = group;
        return true;
    }
    /* DecodePoolInputs.take */
    void encode(Decided &step, int64_t group) {
        const int64_t waiting = static_cast<int64_t>(inputs_.size());
        const int64_t most = this->most(num_active_ + num_arrived() + waiting);
        Part &part = parts_[group];
        for (int64_t left = facts_.chunk; left > 0;) {
            if (part.query < 0) {
                if (facts_.planned_active && num_active_ >= facts_.planned_active) break;
                if (inputs_.empty() || !admit(inputs_.front(), group, most, false)) break;
                part = {inputs_.front(), 0};
                inputs_.pop_front();
            }
            const int64_t tokens = asked_.inputs[part.query];
            const int64_t size = std::min(left, tokens - part.done);
            step.chunks.push_back({part.query, part.done, size});
            part.done += size;
            left -= size;
            if (part.done < tokens) continue;
            step.joined.push_back(part.query);
            rooms_[group].begin(part.query);
            part = {};
        }
    }
};

}  // namespace xgpt_waa
