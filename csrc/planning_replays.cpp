/* Replays of pools that are alone: of paged KV (xsimulator/replay/paged_alone.py), and of rules that
 * reserve what a query takes at most (reserved_alone.py). Each call has counts[7] filled: how many
 * turns, steps, chunks, queries encoded, queries evicted and changes of memory there are, and how
 * often a query with a row was evicted. xgpt_told hands these over, and frees what is returned. */
#include "paged_replay.h"
#include "reserved_replay.h"

namespace {

template <class Replay>
void *replayed(Replay &&replay, int64_t *counts) {
    replay.run();
    auto *told = new xgpt_replay::Told(replay.finished());
    const size_t sizes[6] = {told->waits.size(), told->turn_of.size(), told->chunks.size() / 3,
                             told->ended.size(), told->evicted.size(), told->memory.size() / 2};
    std::copy(sizes, sizes + 6, counts);
    counts[6] = told->preemptions;
    return told;
}

}  // namespace

/* facts[6]: numbers of queries, groups, blocks of a group, blocks that admission leaves free, tokens
 * of a step, whether inputs are encoded in chunks; slots[groups]; inputs[queries] tokens,
 * left[queries] iterations. */
extern "C" void *xgpt_paged(const int64_t *facts, const int64_t *slots, const int64_t *inputs,
                            const int64_t *left, int64_t *counts) {
    return replayed(xgpt_paging::Replay({facts[0], facts[1], facts[2], facts[3], facts[4], facts[5]},
                                       slots, inputs, left), counts);
}

/* facts[8]: numbers of queries and groups, tokens of KV of a group, decode iterations of a phase (0:
 * ORCA's rule), queries of an encode batch, most queries at work in a group, tokens of a chunk (0:
 * none), whether rows are compacted; even[3]: mean input, adjustment, queries that decode batches
 * are led back to; slots[groups] of ORCA's; tokens[queries] of inputs, reserves[queries],
 * left[queries] iterations. */
extern "C" void *xgpt_reserved(const int64_t *facts, const double *even, const int64_t *slots,
                               const int64_t *tokens, const int64_t *reserves, const int64_t *left,
                               int64_t *counts) {
    return replayed(xgpt_reserving::Replay({facts[0], facts[1], facts[2], facts[3], facts[4],
                                            facts[5], facts[6], facts[7], even[2]},
                                           {even[0], even[1]}, slots, tokens, reserves, left),
                    counts);
}

/* Into waits[turns] the turn whose tokens each waits for (-1: none); turn_of[steps]; labels[steps][7]
 * kind (0 encode, 1 decode, 2 mixed), group, phase (of paged KV the step's number in its group),
 * iteration, chunks, evicted, encoded; chunks[chunks][3] query, first, tokens; ended, evicted:
 * queries; memory[changes][2] turn, tokens; times[3][queries] the turns of a query's start, first and
 * last token; sizes[steps][7] as of LaterLine. */
extern "C" void xgpt_told(void *given, int64_t *waits, int64_t *turn_of, int64_t *labels,
                          int64_t *chunks, int64_t *ended, int64_t *evicted, int64_t *memory,
                          int64_t *times, double *sizes) {
    auto *told = static_cast<xgpt_replay::Told *>(given);
    const std::pair<const std::vector<int64_t> *, int64_t *> all[] = {
        {&told->waits, waits},     {&told->turn_of, turn_of}, {&told->labels, labels},
        {&told->chunks, chunks},   {&told->ended, ended},     {&told->evicted, evicted},
        {&told->memory, memory},   {&told->times, times}};
    for (const auto &[from, to] : all) std::copy(from->begin(), from->end(), to);
    std::copy(told->sizes.begin(), told->sizes.end(), sizes);
    delete told;
}
