/* A replay of a single pool whose groups have rooms (xrunner/rules/room.py): the waiting line,
 * admission and eviction, and the requests and tokens of each step (xsimulator/replay/pool.py,
 * queries.py), whatever the rule. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "pool_replay.h"
#include "prefixes.h"
#include "room.h"

namespace xgpt_rooms {

using xgpt_replay::Query;

/* A group's rows and room, and its partly encoded request. RRA's chunks of a phase: requests
 * assigned, and tokens of a chunk. */
struct Group : xgpt_replay::Rows {
    xgpt_room::Room room;
    int64_t slots = 0, steps = 0, part = -1, part_done = 0;
    std::deque<int64_t> dealt;
    int64_t size = 0;
};

/* What rooms decide by, without shared tokens; tokens of all rooms, those of shared prefixes
 * included; slots[groups]: most requests of each; inputs[requests]: all tokens. */
struct Asked {
    xgpt_room::Terms terms;
    xgpt_room::Requests requests;
    xgpt_prefixes::Forest forest;
    int64_t tokens;
    const int64_t *slots, *inputs;
};

class Replay : public xgpt_replay::PoolReplay<Group> {
protected:
    Replay(const xgpt_replay::Given &given, xgpt_replay::Job &job, int64_t num_groups,
           const Asked &asked)
        : PoolReplay(given, job, num_groups), num_groups_(num_groups), requests_(asked.requests),
          tokens_(asked.tokens), unit_(asked.terms.unit), inputs_(asked.inputs) {
        for (int64_t g = 0; g < num_groups; ++g) {
            groups_[g].slots = asked.slots[g];
            groups_[g].room.open(asked.terms, requests_);
        }
        if (asked.forest.size)
            shared_ = std::make_unique<xgpt_prefixes::Living>(
                asked.forest, static_cast<int64_t>(job.queries.size()));
    }

    int64_t num_groups_, turn_ = 0;
    xgpt_room::Requests requests_;
    std::unique_ptr<xgpt_prefixes::Living> shared_;  // empty if nothing is shared

    int64_t tokens(int64_t q) const { return requests_.tokens(q); }
    /* As `tokens`, but one less of an evicted one if encoding gives no token. */
    int64_t context(int64_t q) const { return inputs_[q] + queries[q].made; }

    /* A step of the group by the rule. */
    virtual void decide(Group &group, int64_t g) = 0;

    void turn(int64_t g, bool takes) final {
        Group &group = groups_[g];
        if (takes) {
            collect(group, [&](int64_t q) {
                if (shared_) finish_shared(q);
                group.room.finish(q);
                group.leave(queries[q]);
                queries[q].last_s = now_;
            });
            end(group.done, now_);
        }
        decide(group, g);
        note_memory();
    }
    /* ContinuousRule.next_group */
    int64_t next_in_turn() const {
        for (int64_t ahead = 0; ahead < num_groups_; ++ahead) {
            const int64_t g = (turn_ + ahead) % num_groups_;
            if (num_waiting() || groups_[g].room.active) return g;
        }
        return -1;
    }
    /* Rooms.admit */
    bool admit(Group &group, int64_t q, int64_t most, bool decodes) {
        if (group.room.active >= most) return false;
        if (shared_ ? !admit_shared(group, q, decodes) : !group.room.has_room(q, decodes))
            return false;
        group.room.admit(q, decodes);
        return true;
    }
    /* The first in line, if the group has admitted it; else -1. */
    int64_t admitted(Group &group, int64_t most, bool decodes) {
        if (!num_waiting() || !admit(group, line_[next_], most, decodes)) return -1;
        return line_[next_++];
    }
    /* Rooms.make_room; a partly encoded request starts at its first chunk again. */
    void make_room(Group &group) {
        while (group.room.is_over()) {
            if (!shared_ || !shared_->let_go()) {
                if (!may_evict(group)) return;
                const int64_t q = group.room.evict();
                line_[--next_] = q;
                moved_.push_back(q);
                if (q == group.part) group.part = -1;
                if (shared_) shared_->evict(q);
            }
            if (shared_) set_budgets();
        }
    }
    /* Encodes chunks of at most `left` tokens. next() admits a request, -1: none; whole(request)
     * is called with those whose last chunk is in. */
    template <class Next, class Whole>
    void encode(Group &group, int64_t left, const Next &next, const Whole &whole) {
        while (left > 0) {
            if (group.part < 0) {
                if ((group.part = next()) < 0) break;
                group.part_done = shared_ ? shared_->first : 0;
            }
            const int64_t size = std::min(left, left_of(group));
            chunk(group.part, group.part_done, size);
            group.part_done += size;
            left -= size;
            if (shared_) shared_->encode(group.part, group.part_done);
            if (left_of(group)) continue;
            joined_.push_back(group.part);
            whole(std::exchange(group.part, -1));
        }
    }
    /* Tokens of its partly encoded request that are left to encode. */
    int64_t left_of(const Group &group) const {
        return inputs_[group.part] + requests_.all[group.part].written - group.part_done;
    }
    /* Encodes an admitted request in one step. */
    void encode_whole(int64_t q) {
        const int64_t first = shared_ ? shared_->first : 0;
        joined_.push_back(q);
        chunk(q, first, context(q) - first);
        if (shared_) shared_->encode(q, context(q));
    }
    /* PoolHead._execute, if there is a step */
    void execute(Group &group, int64_t g, bool decodes, int64_t phase, int64_t iteration) {
        const bool encodes = !line.sizes.spans.empty();
        if (!decodes && !encodes) return;
        evict_rows(group, g);
        if (shared_) {
            line.share(shared_->told);
            shared_->end_step();
        }
        if (decodes) decode(group, g);
        for (int64_t q : joined_) {
            Query &query = queries[q];
            if (query.made) query.left -= gives_token_;  // encoded again: one more token
            enter(group, g, q, context(q));
        }
        work(group, !encodes ? xgpt_replay::DECODE
                    : decodes ? xgpt_replay::MIXED
                              : xgpt_replay::ENCODE, g, phase, iteration);
    }

private:
    int64_t tokens_, unit_;  // of all rooms; in whole multiples of this in each
    const int64_t *inputs_;

    void note_memory() {
        if (!line.is_told) return;
        int64_t held = shared_ ? shared_->tokens : 0;
        for (const Group &group : groups_) held += group.room.held;
        line.note_memory(held, now_);
    }
    /* Rooms._budget */
    int64_t budget(int64_t prefix_tokens) const {
        return (tokens_ - prefix_tokens) / num_groups_ / unit_ * unit_;
    }
    void set_budgets() {
        for (Group &group : groups_) group.room.resize(budget(shared_->tokens));
    }
    [[gnu::noinline]] void finish_shared(int64_t q) {
        shared_->finish(q);
        set_budgets();
    }
    [[gnu::noinline]] bool admit_shared(Group &group, int64_t q, bool decodes) {
        const auto fits = [&](int64_t prefix_tokens) {
            const int64_t budget = this->budget(prefix_tokens);
            return group.room.has_room(q, decodes, budget) &&
                   (prefix_tokens <= shared_->tokens ||
                    std::all_of(groups_.begin(), groups_.end(), [&](const Group &own) {
                        return &own == &group || own.room.fits(budget);
                    }));
        };
        if (!shared_->make_room(q, fits)) return false;
        shared_->admit(q);
        set_budgets();
        return true;
    }
    /* Whether others are in a request's memory; alone it has room for all that it writes. */
    bool may_evict(const Group &group) const {
        return group.room.active > 1 ||
               (shared_ && std::any_of(groups_.begin(), groups_.end(), [&](const Group &own) {
                    return &own != &group && own.room.active;
                }));
    }
    void evict_rows(Group &group, int64_t g) {
        for (int64_t q : moved_) {
            Query &query = queries[q];
            if (query.group != g) continue;  // it was encoded in part
            const int64_t left = query.end - group.iterations;
            group.leave(query);
            query.made += gives_token_ + query.left - left;
            query.left = left;
            preemptions += 1;
        }
    }
};

}  // namespace xgpt_rooms
