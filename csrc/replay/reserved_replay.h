/* A replay of a single pool by RRA's rule (xrunner/rules/rra.py, chunks.py, batch_sizer.py) or
 * ORCA's (iteration.py): the decisions of the rule, turn by turn. The same decisions in the same
 * order, from the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>

#include "batch_sizer.h"
#include "rooms_replay.h"

namespace xgpt_reserving {

/* `iterations` 0: ORCA's rule. `chunk` 0: inputs are encoded whole. */
struct Facts {
    int64_t groups, iterations, encode_batch, chunk;
    double target_active;  // target of decode batches; 0: none
};

using xgpt_rooms::Group;

class Replay : public xgpt_rooms::Replay {
public:
    Replay(const xgpt_replay::Given &given, xgpt_replay::Job &job, const Facts &facts,
           const Sizer &sizer, const xgpt_rooms::Asked &asked)
        : xgpt_rooms::Replay(given, job, facts.groups, asked), facts_(facts), sizer_(sizer),
          iteration_(first_iteration()) {}

private:
    Facts facts_;
    Sizer sizer_;
    int64_t phase_ = 0, iteration_, every_ = 1;

    int64_t first_iteration() const { return facts_.chunk > 0; }

    int64_t next_group() override { return facts_.iterations ? next_of_phase() : next_in_turn(); }
    void decide(Group &group, int64_t g) override {
        if (!facts_.iterations) decide_in_turn(group, g);
        else if (facts_.chunk) decide_mixed(group, g);
        else decide_phase(group, g);
    }
    int64_t next_of_phase() {
        const bool is_at_work = std::any_of(groups_.begin(), groups_.end(), [](const Group &own) {
            return own.room.active || !own.dealt.empty();
        });
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

    /* OrcaRule.decide */
    void decide_in_turn(Group &group, int64_t g) {
        make_room(group);
        const bool is_decode = group.room.decoding > 0;
        if (is_decode) group.room.advance();
        const int64_t q = moved_.empty() ? admitted(group, group.slots, true) : -1;
        if (q >= 0) encode_whole(q);
        turn_ = (g + 1) % facts_.groups;
        execute(group, g, is_decode, group.steps++, is_decode);
    }
    /* RraRule.decide */
    void decide_phase(Group &group, int64_t g) {
        const bool is_decode = iteration_ > 0 && group.room.decoding > 0;
        if (iteration_ == 0) {
            for (int64_t wanted = this->wanted(group, g); wanted > 0; --wanted) {
                const int64_t q = admitted(group, group.slots, true);
                if (q < 0) break;
                encode_whole(q);
            }
        } else if (is_decode) {
            make_room(group);
            group.room.advance();
        }
        execute(group, g, is_decode, phase_, iteration_);
        advance();
    }
    /* RraRule._decide_mixed */
    void decide_mixed(Group &group, int64_t g) {
        if (iteration_ == first_iteration() && g == 0) {
            for (int64_t each = 0; each < facts_.groups; ++each) deal(groups_[each], each);
            begin_phase();
        }
        if (group.room.decoding) make_room(group);
        const bool is_decode = group.room.decoding > 0;
        if (is_decode) group.room.advance();
        take(group);
        for (int64_t q : joined_) group.room.begin(q);
        execute(group, g, is_decode, phase_, iteration_);
        advance();
    }
    void deal(Group &group, int64_t g) {
        if (static_cast<int64_t>(group.dealt.size()) >= quota(g)) return;
        for (int64_t wanted = this->wanted(group, g); wanted > 0; --wanted)
            group.dealt.push_back(line_[next_++]);
    }
    /* Tokens that the requests assigned to it and its partly encoded one have left to encode. */
    int64_t left_to_encode(const Group &group) {
        int64_t left = group.part < 0 ? 0 : left_of(group);
        for (int64_t q : group.dealt) left += tokens(q);
        return shared_ ? left + shared_->to_encode(group.dealt) : left;
    }
    /* PhaseChunks.begin_phase */
    void begin_phase() {
        int64_t most = 0, iterations = facts_.iterations;
        for (Group &own : groups_) most = std::max(most, own.size = left_to_encode(own));
        every_ = std::min(std::max(facts_.chunk * iterations / std::max<int64_t>(most, 1),
                                   int64_t{1}), iterations);
        int64_t times = (iterations + every_ - 1) / every_;
        for (Group &own : groups_) own.size = std::min((own.size + times - 1) / times, facts_.chunk);
    }
    /* PhaseChunks.take */
    void take(Group &group) {
        if ((iteration_ - 1) % every_) return;
        encode(group, group.size, [&] { return assigned(group); }, [](int64_t) {});
    }
    /* The first assigned request, if the group has admitted it; else -1. */
    int64_t assigned(Group &group) {
        if (!moved_.empty() || group.dealt.empty()) return -1;
        const int64_t q = group.dealt.front();
        if (!admit(group, q, group.slots, false)) return -1;
        group.dealt.pop_front();
        return q;
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
            double away = static_cast<double>(group.room.active) - carried;
            double mean = carried + static_cast<double>(facts_.encode_batch) / groups;
            lean = sizer_.lean(away, mean);
        }
        auto tokens = [this](int64_t place) { return this->tokens(line_[next_ + place]); };
        return sizer_.count(tokens, num_waiting(), quota, lean);
    }
};

}  // namespace xgpt_reserving
