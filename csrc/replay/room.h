/* The account of one group's KV tokens, by which requests are admitted and evicted: as
 * xrunner/rules/room.py, which explains it. The same decisions from the same integers. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <vector>

namespace xgpt_room {

/* As xgpt.core.controls.ADMISSION_RULES. */
enum Rule : int64_t { GREEDY, RESERVE_STATIC, RESERVE_DYNAMIC, FUTURE_PEAK, RESERVE };

/* `tokens`: the budget, held in whole multiples of `unit`; `spare`: units that greedy keeps
 * free. */
struct Terms {
    int64_t tokens, rule, after_free, evicts, unit, spare;

    bool is_planned() const { return rule != RESERVE && rule != GREEDY; }
};

/* A request. `written`: output tokens of an evicted one, to encode with its input; `left`: tokens
 * to come by its forecast. Once it decodes: its tokens (`base`) and its end, counted from the
 * group's first step. */
struct Request {
    int64_t written = 0, left = 0, base = 0, end = 0;
    bool is_at_work = false, decodes = false;
};

/* Requests by number: input tokens, and the most that each may need. Their forecasts, in output
 * tokens: first[requests]; new ones beyond[ranges][size] by range[requests] of inputs and tokens
 * written, the cap from `size` on. */
struct Requests {
    const int64_t *inputs, *reserves, *first, *range, *beyond;
    int64_t size;
    Request *all;

    int64_t tokens(int64_t q) const { return inputs[q] + all[q].written; }
    int64_t beyond_of(int64_t q, int64_t written) const {
        const int64_t cap = reserves[q] - inputs[q];
        return written < size ? std::min(beyond[range[q] * size + written], cap) : cap;
    }
    /* Tokens that the request is to write, by its forecast. */
    int64_t left(int64_t q) const {
        const int64_t written = all[q].written;
        const int64_t total = first[q] > written ? first[q] : beyond_of(q, written);
        return std::max(std::min(total, reserves[q] - inputs[q]) - written, int64_t{1});
    }
};

/* When a request at work ends by its forecast, in steps; its base; the request. */
using End = std::tuple<int64_t, int64_t, int64_t>;

class Room {
public:
    int64_t held = 0, active = 0, decoding = 0;

    void open(const Terms &terms, Requests &requests) {
        terms_ = terms;
        requests_ = &requests;
        starting_.assign(terms.unit, 0);
    }
    /* Whether the next decode step exceeds the budget. */
    bool is_over() const { return terms_.evicts && held + needed() > terms_.tokens; }
    void resize(int64_t tokens) { terms_.tokens = tokens; }
    /* Whether those at work keep within a budget, by their forecasts. */
    bool fits(int64_t budget) const {
        if (!terms_.is_planned()) return held <= budget;
        return whole_ + active * (terms_.unit - 1) + peak(nullptr) <= budget;
    }
    bool has_room(int64_t q, bool decodes) {
        return !active || has_room(q, decodes, terms_.tokens);
    }
    /* With another budget, which even a request alone must keep. */
    bool has_room(int64_t q, bool decodes, int64_t budget) {
        if (terms_.rule == RESERVE || (!active && terms_.is_planned()))
            return held + reserved(q) <= budget;
        const int64_t tokens = in_units(requests_->tokens(q));
        if (held + tokens + (active ? terms_.spare * terms_.unit : 0) > budget) return false;
        if (terms_.rule == GREEDY) return true;
        look_again();
        const int64_t rounding = (active + 1) * (terms_.unit - 1);
        return whole_ + rounding + load_with(q, decodes) <= budget;
    }
    void admit(int64_t q, bool decodes) {
        Request &one = of(q);
        one.is_at_work = true;
        active += 1;
        if (terms_.evicts) order_.push_back(q);
        if (terms_.rule == RESERVE) {
            held += reserved(q);
        } else {
            one.left = terms_.is_planned() ? requests_->left(q) : 0;
            held += in_units(requests_->tokens(q));
            whole_ += requests_->tokens(q) + one.left;
        }
        if (decodes) begin(q);
    }
    /* Lets an admitted request grow with the next decode step. */
    void begin(int64_t q) {
        Request &one = of(q);
        one.decodes = true;
        decoding += 1;
        if (terms_.rule == RESERVE) return;
        const int64_t tokens = requests_->tokens(q);
        whole_ -= tokens + one.left;
        one.base = tokens - steps_;
        one.end = steps_ + one.left;
        starting_[residue(one.base)] += 1;
        if (terms_.is_planned()) insert({one.end, one.base, q});
    }
    void advance() {
        if (terms_.rule != RESERVE) held += needed();
        steps_ += 1;
    }
    void advance_to(int64_t step) {
        while (steps_ < step) advance();
    }
    void finish(int64_t q) {
        Request &one = of(q);
        if (terms_.rule == RESERVE) {
            held -= reserved(q);
        } else if (one.decodes) {
            held -= in_units(one.base + steps_);
            starting_[residue(one.base)] -= 1;
            if (terms_.is_planned())
                ends_.erase(std::lower_bound(ends_.begin(), ends_.end(),
                                             End{one.end, one.base, q}));
        } else {
            held -= in_units(requests_->tokens(q));
            whole_ -= requests_->tokens(q) + one.left;
        }
        active -= 1;
        decoding -= one.decodes;
        one.is_at_work = one.decodes = false;
    }
    /* Removes the latest admitted request, with its tokens to encode again. */
    int64_t evict() {
        while (!of(order_.back()).is_at_work) order_.pop_back();
        const int64_t q = order_.back();
        order_.pop_back();
        const int64_t written = of(q).decodes ? this->written(q) : of(q).written;
        finish(q);
        of(q).written = written;
        return q;
    }

private:
    Terms terms_{};
    Requests *requests_ = nullptr;
    int64_t steps_ = 0, whole_ = 0;   // decode steps so far; tokens of those that do not decode
    std::vector<int64_t> starting_;   // decoding requests by base modulo `unit`
    std::vector<int64_t> order_;      // of admission, if the rule evicts; some have ended
    std::vector<End> ends_;           // of decoding requests, in order

    Request &of(int64_t q) { return requests_->all[q]; }
    int64_t reserved(int64_t q) const { return in_units(requests_->reserves[q]); }
    int64_t in_units(int64_t tokens) const {
        return (tokens + terms_.unit - 1) / terms_.unit * terms_.unit;
    }
    int64_t residue(int64_t value) const {
        return (value % terms_.unit + terms_.unit) % terms_.unit;
    }
    /* Tokens that the next decode step takes. */
    int64_t needed() const { return starting_[residue(-steps_)] * terms_.unit; }
    int64_t written(int64_t q) const {
        const int64_t held = requests_->all[q].base + steps_;
        return held - requests_->inputs[q] + 1;  // its latest token is not in the cache yet
    }
    void insert(const End &end) {
        ends_.insert(std::lower_bound(ends_.begin(), ends_.end(), end), end);
    }
    /* Forecasts anew the requests that have written more than forecast. */
    void look_again() {
        while (!ends_.empty() && std::get<0>(ends_[0]) <= steps_) {
            const int64_t q = std::get<2>(ends_[0]);
            ends_.erase(ends_.begin());
            Request &one = of(q);
            const int64_t written = this->written(q);
            const int64_t total = std::max(requests_->beyond_of(q, written), written + 1);
            one.end = requests_->inputs[q] + total - one.base;
            insert({one.end, one.base, q});
        }
    }
    /* The load that the rule asks of with the request, beside those that do not decode. */
    int64_t load_with(int64_t q, bool decodes) {
        const int64_t tokens = requests_->tokens(q), left = requests_->left(q);
        const int64_t whole = tokens + left;
        int64_t load = 0;
        if (terms_.rule == RESERVE_STATIC) {
            for (const auto &[step, base, one] : ends_) load += base + step;
            return load + whole;
        }
        if (terms_.rule == RESERVE_DYNAMIC) {
            const int64_t first = ends_.empty() ? steps_ : std::get<0>(ends_[0]);
            for (size_t i = terms_.after_free; i < ends_.size(); ++i)
                load += std::get<1>(ends_[i]) + first;
            return load + (decodes ? tokens + std::min(left, first - steps_) : whole);
        }
        const End own = {steps_ + left, tokens - steps_, q};
        return decodes ? peak(&own) : whole + peak(nullptr);
    }
    /* The largest load at any of the ends, and of `own` among them. */
    int64_t peak(const End *own) const {
        int64_t most = 0, bases = 0, count = 0;
        const auto add = [&](const End &end) {
            bases += std::get<1>(end);
            most = std::max(most, bases + ++count * std::get<0>(end));
        };
        size_t place = ends_.size();
        if (own) {
            for (; place && *own < ends_[place - 1]; --place) add(ends_[place - 1]);
            add(*own);
        }
        for (; place; --place) add(ends_[place - 1]);
        return most;
    }
};

}  // namespace xgpt_room
