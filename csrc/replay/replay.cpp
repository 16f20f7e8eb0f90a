/* Replays (xsimulator/replay/native_replay.py) of a single pool, by a rule with rooms or of static
 * batches; and of two pools, of which one encodes by WAA's rule and hands over to the other. */
#include "handed_replay.h"
#include "paged_replay.h"
#include "reserved_replay.h"
#include "static_replay.h"

namespace {

/* Takes `size` bytes, which it copies. */
using Tell = void (*)(const void *place, int64_t size);

/* Result of a replay: records of its pools over so many stages, and handovers[3] step, begin,
 * end. */
struct Found {
    std::vector<xgpt_replay::Told> pools;
    std::vector<int64_t> stages;
    std::vector<double> sent;
};

void keep(Found &found, xgpt_replay::Line &line) {
    found.pools.push_back(std::move(line.told));
    found.stages.push_back(line.stages);
}

template <class Query>
void tell_times(const std::vector<Query> &queries, int64_t preemptions, double *times) {
    for (double Query::*time : {&Query::start_s, &Query::first_s, &Query::last_s})
        for (const Query &query : queries) *times++ = query.*time;
    *times = static_cast<double>(preemptions);
}

/* Input of a replay, as xgpt_replayed gets it. */
struct Arguments {
    const void *const *given;

    const int64_t *ints(int place) const { return static_cast<const int64_t *>(given[place]); }
    const double *reals(int place) const { return static_cast<const double *>(given[place]); }
    xgpt_times::Clock &clock(int place) const {
        return *static_cast<xgpt_times::Clock *>(const_cast<void *>(given[place]));
    }
    xgpt_replay::Given alone() const {
        const int64_t *facts = ints(1);
        return {clock(0), reals(3), facts[0], ints(7), reals(8), facts[1] != 0, facts[3] != 0,
                facts[2] != 0};
    }
};

template <class Replay>
Found *alone(Replay &&replay, double *times) {
    replay.run();
    auto *found = new Found;
    keep(*found, replay.line);
    tell_times(replay.queries, replay.preemptions, times);
    return found;
}

xgpt_rooms::Asked asked(const Arguments &args) {
    const int64_t *facts = args.ints(1), *sizes = args.ints(13);
    xgpt_rooms::Asked asked = {
        {facts[5], facts[6], facts[7], facts[8], facts[9], facts[10]},
        {args.ints(4), args.ints(5), args.ints(10), args.ints(11), args.ints(12), facts[11], {}},
        {}, sizes[3], args.ints(9), args.ints(6), args.ints(4)};
    if (!sizes[0]) return asked;
    asked.forest = {sizes[0], sizes[1], sizes[2], args.ints(15), args.ints(16), args.ints(17),
                    args.ints(18)};
    asked.requests.inputs = args.ints(14);
    return asked;
}

Found *paged(const Arguments &args, double *times) {
    const int64_t *facts = args.ints(1);
    return alone(xgpt_paging::Replay(
        args.alone(), {facts[4], facts[12], facts[13], facts[14]}, asked(args)), times);
}

Found *reserved(const Arguments &args, double *times) {
    const int64_t *facts = args.ints(1);
    const double *figures = args.reals(2);
    return alone(xgpt_reserving::Replay(
        args.alone(), {facts[4], facts[12], facts[13], facts[14], figures[2]},
        {figures[0], figures[1]}, asked(args)), times);
}

Found *batched(const Arguments &args, double *times) {
    const int64_t *facts = args.ints(1);
    return alone(xgpt_batching::Replay(args.alone(), {facts[4], facts[5], facts[6]}, args.ints(4),
                                       args.ints(5), args.ints(6), args.ints(9)), times);
}

Found *handed(const Arguments &args, double *times) {
    const int64_t *facts = args.ints(1);
    const double *figures = args.reals(2);
    const xgpt_waa::Asked asked = {facts[0], args.ints(5), args.ints(4),
                                   {facts[8], facts[16], facts[17], 0, 1, 1}};
    xgpt_waa::EncodeRule encode({facts[6], facts[4], facts[7], facts[9], facts[10], facts[11],
                                 figures[2]}, {figures[0], figures[1]}, asked);
    xgpt_waa::DecodeRule decode({facts[5], facts[12], facts[13], facts[14]}, asked);
    const auto fetch = reinterpret_cast<xgpt_times::Fetch>(const_cast<void *>(args.given[10]));
    xgpt_handing::Replay replay(
        {facts[0], facts[1], facts[2], facts[3], args.reals(3), args.ints(4), args.ints(6),
         args.ints(7), args.reals(8)},
        encode, facts[4], decode, facts[5], args.clock(0), args.clock(9),
        xgpt_times::Blocks(fetch, 0, facts[15], 1));
    replay.run();
    auto *found = new Found{{}, {}, std::move(replay.sent)};
    keep(*found, replay.encoding.line);
    keep(*found, replay.decoding.line);
    tell_times(replay.queries, 0, times);
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

/* A replay with paged KV (kind 0), by RRA's rule or ORCA's (1), of static batches (2), or of two
 * pools (3). `given` has addresses of: the clock; facts (number of requests, whether encoding
 * yields a token, whether rows are compacted, whether steps are recorded, then the rule's own);
 * figures of the rule; factors[stages of all pools] of the clock's seconds; inputs[requests] tokens;
 * reserves[requests] (for static batches the most output, or forecast); left[requests] iterations;
 * order[requests] of arrival; arrival_s[requests]; slots[groups].
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
 * Writes start, first token and last token of each request into times[3][requests] (nan: never),
 * and behind these its number of evictions. Returns the argument of the calls below, or nullptr
 * if Python must replay. */
extern "C" void *xgpt_replayed(int64_t kind, const void *const *given, double *times) {
    Found *(*const kinds[])(const Arguments &, double *) = {paged, reserved, batched, handed};
    try {
        return kinds[kind]({given}, times);
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

/* Sends the record of each pool (pool_replay.h), then handovers[3]. */
extern "C" void xgpt_tell(const void *given, Tell tell) {
    const auto &found = *static_cast<const Found *>(given);
    for (const xgpt_replay::Told &told : found.pools) {
        for (const auto *one : {&told.labels, &told.chunks, &told.ended, &told.moved,
                                &told.memory_tokens, &told.shared}) tell_all(tell, *one);
        for (const auto *one : {&told.memory_s, &told.sizes, &told.durations_s, &told.ends_s})
            tell_all(tell, *one);
    }
    tell_all(tell, found.sent);
}

extern "C" void xgpt_forget(void *found) { delete static_cast<Found *>(found); }
