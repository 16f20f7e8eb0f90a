/* Replays of two pools, of which one encodes by WAA's rule and hands over to the other
 * (xsimulator/replay/handed_over.py). */
#include "handed_replay.h"

namespace {

/* Is handed `size` bytes, which it copies. */
using Tell = void (*)(const void *place, int64_t size);

template <class Number>
void tell_all(Tell tell, const std::vector<Number> &all) {
    tell(all.data(), static_cast<int64_t>(all.size() * sizeof(Number)));
}

void tell_pool(Tell tell, const xgpt_handing::Told &told) {
    for (const auto *one : {&told.labels, &told.chunks, &told.ended, &told.handed,
                            &told.memory_tokens}) tell_all(tell, *one);
    for (const auto *one : {&told.memory_s, &told.sizes, &told.durations_s, &told.ends_s})
        tell_all(tell, *one);
}

}  // namespace

/* given: where these lie. facts[15]: numbers of queries, groups of the pool that encodes and of the
 * other; queries of an encode batch, most queries in the system, tokens of KV of the pool that decodes
 * and of the other, queries that it is planned to decode, tokens of inputs that are to lie ready for
 * it; most queries of its groups, tokens of a chunk (0: none), queries from which on it begins no
 * input (0: without limit), whether encoding gives a token, whether rows are compacted, and tokens of
 * handovers in a block. even[3]: mean input, adjustment, queries that decode batches are led back to.
 * inputs[queries] tokens, reserves[queries], left[queries] iterations, order[queries] in which they
 * come; arrival_s[queries]; numbers and figures of the two clocks, as in step_times.h. `fetch` says
 * where blocks of tables lie, of the clocks (0, 1) and of the handover's seconds (2).
 *
 * Tells of each pool labels[steps][7] as of xgpt_told, chunks[chunks][3], queries encoded, queries
 * handed over, memory: tokens[changes] from seconds[changes] on, sizes[steps][4] tokens, encoded,
 * decoded, context, seconds[steps][stages], ends[steps][stages]; then [handovers][3] step, begin, end,
 * and [3][queries] when each query started, had its first and its last token (nan: never). Returns 0,
 * and tells nothing, where Python is to replay. */
extern "C" int xgpt_handed(const void *const *given, xgpt_times::Fetch fetch, Tell tell) {
    auto ints = [&](int place) { return static_cast<const int64_t *>(given[place]); };
    auto reals = [&](int place) { return static_cast<const double *>(given[place]); };
    const int64_t *facts = ints(0);
    const double *even = reals(1);
    const xgpt_waa::Asked asked = {ints(3), ints(2)};
    xgpt_handing::Replay replay(
        {facts[0], facts[12], facts[13], ints(2), ints(4), ints(5), reals(6)},
        xgpt_waa::EncodeRule({facts[3], facts[1], facts[4], facts[5], facts[6], facts[7], facts[8],
                              even[2]}, {even[0], even[1]}, asked), facts[1],
        xgpt_waa::DecodeRule({facts[2], facts[9], facts[10], facts[11]}, asked, facts[0]), facts[2],
        xgpt_times::Clock(fetch, 0, ints(7), reals(8)),
        xgpt_times::Clock(fetch, 1, ints(9), reals(10)),
        xgpt_times::Blocks(fetch, 2, 0, facts[14], 1));
    try {
        replay.run();
    } catch (const xgpt_times::Stopped &) {
        return 0;
    }
    tell_pool(tell, replay.encoding.told);
    tell_pool(tell, replay.decoding.told);
    tell_all(tell, replay.sent);
    std::vector<double> times;
    for (double xgpt_handing::Query::*time : {&xgpt_handing::Query::start_s,
                                              &xgpt_handing::Query::first_s,
                                              &xgpt_handing::Query::last_s})
        for (const xgpt_handing::Query &query : replay.queries) times.push_back(query.*time);
    tell_all(tell, times);
    return 1;
}
