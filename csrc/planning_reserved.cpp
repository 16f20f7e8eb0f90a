/* Replays of pools that are alone and whose rules reserve what a query takes at most
 * (xsimulator/replay/reserved_alone.py). */
#include "reserved_replay.h"

/* facts[8]: numbers of queries and groups, tokens of KV of a group, decode iterations of a phase (0:
 * ORCA's rule), queries of an encode batch, most queries at work in a group, tokens of a chunk (0:
 * none), whether rows are compacted; even[3]: mean input, adjustment, queries that decode batches
 * are led back to; slots[groups] of ORCA's; tokens[queries] of inputs, reserves[queries],
 * left[queries] iterations. Into counts[5] how many turns, steps, chunks, queries encoded and changes
 * of memory there are, which xgpt_reserved_told hands over, and frees what is returned here. */
extern "C" void *xgpt_reserved(const int64_t *facts, const double *even, const int64_t *slots,
                               const int64_t *tokens, const int64_t *reserves, const int64_t *left,
                               int64_t *counts) {
    auto *replay = new xgpt_reserving::Replay(
        {facts[0], facts[1], facts[2], facts[3], facts[4], facts[5], facts[6], facts[7],
         even[2]},
        {even[0], even[1]}, slots, tokens, reserves, left);
    replay->run();
    const auto &told = replay->told;
    const size_t sizes[5] = {told.waits.size(), told.turn_of.size(), told.chunks.size() / 3,
                             told.ended.size(), told.memory.size() / 2};
    std::copy(sizes, sizes + 5, counts);
    return replay;
}

/* Into waits[turns] the turn whose tokens each waits for (-1: none); turn_of[steps]; labels[steps][6]
 * kind (0 encode, 1 decode, 2 mixed), group, phase, iteration, chunks, encoded; chunks[chunks][3]
 * query, first, tokens; ended: queries; memory[changes][2] turn, tokens; sizes[steps][7] as of
 * LaterLine; times[3][queries] the turns of a query's start, first and last token. */
extern "C" void xgpt_reserved_told(void *given, int64_t *waits, int64_t *turn_of, int64_t *labels,
                                   int64_t *chunks, int64_t *ended, int64_t *memory, double *sizes,
                                   int64_t *times) {
    auto *replay = static_cast<xgpt_reserving::Replay *>(given);
    const auto &told = replay->told;
    const std::pair<const std::vector<int64_t> *, int64_t *> all[] = {
        {&told.waits, waits},   {&told.turn_of, turn_of}, {&told.labels, labels},
        {&told.chunks, chunks}, {&told.ended, ended},     {&told.memory, memory}};
    for (const auto &[from, to] : all) std::copy(from->begin(), from->end(), to);
    std::copy(told.sizes.begin(), told.sizes.end(), sizes);
    const int64_t count = static_cast<int64_t>(replay->queries().size());
    for (int64_t q = 0; q < count; ++q) {
        const auto &query = replay->queries()[q];
        times[q] = query.start;
        times[count + q] = query.first;
        times[2 * count + q] = query.last;
    }
    delete replay;
}
