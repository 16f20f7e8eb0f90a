/* Replays (xsimulator/replay/native_replay.py) of requests that arrive, on replicas: of a single
 * pool, by a rule with rooms or of static batches; or of two pools, of which one encodes by WAA's
 * rule and hands over to the other. */
#include "handed_replay.h"
#include "paged_replay.h"
#include "reserved_replay.h"
#include "static_replay.h"

namespace {

/* Takes `size` bytes, which it copies. */
using Tell = void (*)(const void *place, int64_t size);

/* Result of a replay: records of the pools of all replicas, over so many stages, and by replica
 * handovers[3] step, begin, end. */
struct Found {
    std::vector<xgpt_replay::Told> pools;
    std::vector<int64_t> stages;
    std::vector<std::vector<double>> sent;
};

/* Kinds of rules, see below. */
enum Kind : int64_t { PAGED, RESERVED, BATCHED, HANDED };

void tell_times(const std::vector<xgpt_replay::Query> &queries, double *times) {
    const size_t count = queries.size();
    for (size_t q = 0; q < count; ++q) {
        times[q] = queries[q].start_s;
        times[count + q] = queries[q].first_s;
        times[2 * count + q] = queries[q].last_s;
    }
}

/* Input of a replica, as xgpt_replayed gets it. */
struct Arguments {
    const void *const *given;
    xgpt_replay::Job &job;
    std::vector<xgpt_room::Request> &rooms;  // what rooms note of the requests

    const int64_t *ints(int place) const { return static_cast<const int64_t *>(given[place]); }
    const double *reals(int place) const { return static_cast<const double *>(given[place]); }
    xgpt_times::Clock &clock(int place) const {
        return *static_cast<xgpt_times::Clock *>(const_cast<void *>(given[place]));
    }
    xgpt_replay::Given alone() const {
        const int64_t *facts = ints(1);
        return {clock(0), reals(3), facts[0] != 0, facts[2] != 0, facts[1] != 0};
    }
};

using Made = std::unique_ptr<xgpt_replay::Replica>;

xgpt_rooms::Asked asked(const Arguments &args) {
    const int64_t *facts = args.ints(1), *sizes = args.ints(10);
    args.rooms.resize(args.job.queries.size());
    xgpt_rooms::Asked asked = {
        {facts[4], facts[5], facts[6], facts[7], facts[8], facts[9]},
        {args.ints(4), args.ints(5), args.ints(7), args.ints(8), args.ints(9), facts[10],
         args.rooms.data()},
        {}, sizes[3], args.ints(6), args.ints(4)};
    if (!sizes[0]) return asked;
    asked.forest = {sizes[0], sizes[1], sizes[2], args.ints(12), args.ints(13), args.ints(14),
                    args.ints(15)};
    asked.requests.inputs = args.ints(11);
    return asked;
}

Made paged(const Arguments &args) {
    const int64_t *facts = args.ints(1);
    return std::make_unique<xgpt_paging::Replay>(
        args.alone(), args.job,
        xgpt_paging::Facts{facts[3], facts[11], facts[12], facts[13]}, asked(args));
}

Made reserved(const Arguments &args) {
    const int64_t *facts = args.ints(1);
    const double *figures = args.reals(2);
    return std::make_unique<xgpt_reserving::Replay>(
        args.alone(), args.job,
        xgpt_reserving::Facts{facts[3], facts[11], facts[12], facts[13], figures[2]},
        xgpt_reserving::Sizer{figures[0], figures[1]}, asked(args));
}

Made batched(const Arguments &args) {
    const int64_t *facts = args.ints(1);
    return std::make_unique<xgpt_batching::Replay>(
        args.alone(), args.job, xgpt_batching::Facts{facts[3], facts[4], facts[5]}, args.ints(4),
        args.ints(5), args.ints(6));
}

Made handed(const Arguments &args) {
    const int64_t *facts = args.ints(1);
    const double *figures = args.reals(2);
    const auto fetch = reinterpret_cast<xgpt_times::Fetch>(const_cast<void *>(args.given[7]));
    return std::make_unique<xgpt_handing::Replay>(
        xgpt_handing::Given{facts[0], facts[1], facts[2], args.reals(3), args.ints(4)}, args.job,
        xgpt_waa::EncodeFacts{facts[5], facts[3], facts[6], facts[8], facts[9], facts[10],
                              figures[2]},
        xgpt_reserving::Sizer{figures[0], figures[1]},
        xgpt_waa::DecodeFacts{facts[4], facts[11], facts[12], facts[13]},
        xgpt_waa::Asked{static_cast<int64_t>(args.job.queries.size()), args.ints(5), args.ints(4),
                        {facts[7], facts[15], facts[16], 0, 1, 1}},
        args.clock(0), args.clock(6), xgpt_times::Blocks(fetch, 0, facts[14], 1));
}

Found *replayed(int64_t kind, int64_t replicas, const void *const *const *given,
                const xgpt_replay::Coming &coming, xgpt_replay::Job &job, int64_t *preemptions) {
    Made (*const kinds[])(const Arguments &) = {paged, reserved, batched, handed};
    std::vector<xgpt_room::Request> rooms;
    std::vector<Made> made;
    for (int64_t r = 0; r < replicas; ++r) made.push_back(kinds[kind]({given[r], job, rooms}));
    xgpt_replay::Routing routing(coming, job, made);
    job.kernel.are_apart = kind != HANDED && !job.listener;
    job.kernel.run();
    auto *found = new Found;
    for (const Made &replica : made) {
        for (xgpt_replay::Line *line : replica->lines()) {
            found->pools.push_back(std::move(line->told));
            found->stages.push_back(line->stages);
        }
        found->sent.push_back(replica->handovers());
        *preemptions++ = replica->preemptions;
    }
    return found;
}

template <class Number>
void tell_all(Tell tell, const std::vector<Number> &all) {
    tell(all.data(), static_cast<int64_t>(all.size() * sizeof(Number)));
}

}  // namespace

/* A clock that lives until it is freed; see step_times.h. */
extern "C" void *xgpt_clock(xgpt_times::Fetch fetch, const int64_t *numbers, const double *figures) {
    return new xgpt_times::Clock(fetch, numbers, figures);
}

extern "C" void xgpt_forget_clock(void *clock) { delete static_cast<xgpt_times::Clock *>(clock); }

/* A replay of numbers[0] requests on numbers[1] replicas with paged KV (kind 0), by RRA's rule or
 * ORCA's (1), of static batches (2), or of two pools (3). `given`: of each replica the addresses of:
 * the clock; facts (whether encoding yields a token, whether rows are compacted, whether steps are
 * recorded, then the rule's own); figures of the rule; factors[stages of all pools] of the clock's
 * seconds; inputs[requests] tokens; reserves[requests] (for static batches the most output, or
 * forecast); slots[groups].
 *
 * The rule's own, with rooms (kinds 0 and 1): number of groups; budget of a group in KV tokens,
 * rule of admission, and the other terms of room.h; tokens in the table of new forecasts. Then
 * paged KV: tokens of a step; encoding and steps of paged_replay.h. Else decode iterations of a
 * phase (0: ORCA's rule), requests of an encode batch, tokens of a chunk (0: none). Behind slots:
 * forecasts[requests], range[requests] of inputs, and the table of room.h. Then the three
 * sizes of the forest of prefixes.h, and the tokens of all groups; if it has nodes, inputs[requests]
 * without shared tokens (as reserves are), and its arrays. Figures of RRA: mean input, adjustment,
 * target of decode batches.
 *
 * Static batches: numbers of groups, of KV tokens of a group, of steps that encode a group's; in
 * place of slots ends[requests] of static_replay.h.
 *
 * Two pools: groups of the encode and of the decode pool; requests of an encode batch; most
 * requests in the system; KV tokens of the decode and of the encode pool; planned active
 * requests of the decode pool; tokens of its stock of inputs; most requests of its groups;
 * tokens of a chunk (0: none); active requests from which on it begins no input (0: no limit);
 * tokens of handovers in a block; rule of admission to the decode pool, and `after_free` of
 * room.h. Figures are as above. In place of slots: the clock of the decode pool, and the function
 * that finds blocks of the handover's seconds.
 *
 * `coming`: left[requests] iterations, then the rule numbers[2] of routing with order, arrival_s,
 * owners and windows of replica.h, and tokens[requests] if it counts these.
 *
 * Writes start, first token and last token of each request into times[3][requests] (nan: never),
 * and evictions into preemptions[replicas]. Returns the argument of the calls below, or nullptr if
 * Python must replay. */
extern "C" void *xgpt_replayed(int64_t kind, const int64_t *numbers,
                               const void *const *const *given, void *const *coming, double *times,
                               int64_t *preemptions) {
    xgpt_replay::Job job;
    job.queries.resize(static_cast<size_t>(numbers[0]));
    const int64_t *left = static_cast<int64_t *>(coming[0]);
    for (xgpt_replay::Query &query : job.queries) query.left = *left++;
    job.tokens = static_cast<int64_t *>(coming[5]);
    try {
        Found *found = replayed(
            kind, numbers[1], given,
            {numbers[2], static_cast<int64_t *>(coming[1]), static_cast<double *>(coming[2]),
             static_cast<int64_t *>(coming[3]), static_cast<xgpt_replay::Window *>(coming[4])},
            job, preemptions);
        tell_times(job.queries, times);
        return found;
    } catch (const xgpt_times::Stopped &) {
        return nullptr;
    }
}

/* Writes into busy[stages of all pools] the seconds that each is busy within the window. */
extern "C" void xgpt_busy(const void *given, double begin_s, double end_s, double *busy) {
    const auto &found = *static_cast<const Found *>(given);
    for (size_t pool = 0; pool < found.pools.size(); ++pool) {
        const auto &durations_s = found.pools[pool].durations_s, &ends_s = found.pools[pool].ends_s;
        const size_t stages = static_cast<size_t>(found.stages[pool]);
        std::fill(busy, busy + stages, 0.0);
        for (size_t step = 0; step < ends_s.size(); step += stages) {
            for (size_t s = 0; s < stages; ++s) {
                const double end = ends_s[step + s], start = end - durations_s[step + s];
                const double inside = std::min(end, end_s) - std::max(start, begin_s);
                busy[s] += inside > 0.0 ? inside : 0.0;
            }
        }
        busy += stages;
    }
}

/* Sends the record of each pool (pool_replay.h), then handovers[3] of each replica. */
extern "C" void xgpt_tell(const void *given, Tell tell) {
    const auto &found = *static_cast<const Found *>(given);
    for (const xgpt_replay::Told &told : found.pools) {
        for (const auto *one : {&told.labels, &told.chunks, &told.ended, &told.moved,
                                &told.memory_tokens, &told.shared}) tell_all(tell, *one);
        for (const auto *one : {&told.memory_s, &told.sizes, &told.durations_s, &told.ends_s})
            tell_all(tell, *one);
    }
    for (const auto &sent : found.sent) tell_all(tell, sent);
}

extern "C" void xgpt_forget(void *found) { delete static_cast<Found *>(found); }
