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

/* A request. `reserve`: most tokens that it may need; `tokens`: to encode, its input and
 * `written` output tokens of an evicted one; `left`: to come by its forecast. Once it decodes: its
 * tokens (`base`) and its end, counted from the group's first step. */
struct Request {
    int64_t reserve, tokens, written = 0, left = 0, base = 0, end = 0;
    bool is_at_work = false, decodes = false;

    int64_t inputs() const { return tokens - written; }
    int64_t cap() const { return reserve - inputs(); }
};

/* Requests by number. Their forecasts, in output tokens: first[requests]; new ones
 * beyond[ranges][size] by range[requests] of inputs and tokens written, the cap from `size` on. */
struct Requests {
    std::vector<Request> all;
    const int64_t *first, *range, *beyond;
    int64_t size;

    int64_t beyond_of(int64_t q, int64_t written) const {
        const int64_t cap = all[q].cap();
        return written < size ? std::min(beyond[range[q] * size + written], cap) : cap;
    }
    /* Tokens that the request is to write, by its forecast. */
    int64_t left(int64_t q) const {
        const Request &one = all[q];
        const int64_t total = first[q] > one.written ? first[q] : beyond_of(q, one.written);
        return std::max(std::min(total, one.cap()) - one.written, int64_t{1});
    }
};

/* When a request at work ends by its forecast, in steps, and its base. */
struct End {
    int64_t step, base, query;

    bool operator<(const End &other) const {
        return std::tie(step, base, query) < std::tie(other.step, other.base, other.query);
    }
};

class Room {
public:
    int64_t held = 0, active = 0, decoding = 0;

    void open(const Terms &terms, Requests &requests) {
        terms_ = terms;
        requests_ = &requests;
        starting_.assign(terms.unit, 0);
    }
    /* Whether somebody must be evicted before the next decode step. */
    bool is_short() const {
        return terms_.evicts && active > 1 && held + needed() > terms_.tokens;
    }
    bool has_room(int64_t q, bool decodes) {
        if (!active) return true;
        if (terms_.rule == RESERVE) return held + in_units(of(q).reserve) <= terms_.tokens;
        if (held + in_units(of(q).tokens) + terms_.spare * terms_.unit > terms_.tokens) return false;
        if (terms_.rule == GREEDY) return true;
        look_again();
        const int64_t rounding = (active + 1) * (terms_.unit - 1);
        return whole_ + rounding + load_with(q, decodes) <= terms_.tokens;
    }
    void admit(int64_t q, bool decodes) {
        Request &one = of(q);
        one.left = terms_.is_planned() ? requests_->left(q) : 0;
        one.is_at_work = true;
        held += in_units(terms_.rule == RESERVE ? one.reserve : one.tokens);
        whole_ += one.tokens + one.left;
        active += 1;
        if (terms_.evicts) order_.push_back(q);
        if (decodes) begin(q);
    }
    /* Lets an admitted request grow with the next decode step. */
    void begin(int64_t q) {
        Request &one = of(q);
        whole_ -= one.tokens + one.left;
        one.base = one.tokens - steps_;
        one.end = steps_ + one.left;
        one.decodes = true;
        decoding += 1;
        starting_[residue(one.base)] += 1;
        if (terms_.is_planned()) insert({one.end, one.base, q});
    }
    void advance() {
        if (terms_.rule != RESERVE) held += needed();
        steps_ += 1;
    }
    void finish(int64_t q) {
        Request &one = of(q);
        int64_t tokens = one.tokens;
        if (one.decodes) {
            tokens = one.base + steps_;
            decoding -= 1;
            starting_[residue(one.base)] -= 1;
            if (terms_.is_planned())
                ends_.erase(std::lower_bound(ends_.begin(), ends_.end(),
                                             End{one.end, one.base, q}));
        } else {
            whole_ -= tokens + one.left;
        }
        active -= 1;
        held -= in_units(terms_.rule == RESERVE ? one.reserve : tokens);
        one.is_at_work = one.decodes = false;
    }
    /* Removes the latest admitted request, with its tokens to encode again. */
    int64_t evict() {
        while (!of(order_.back()).is_at_work) order_.pop_back();
        const int64_t q = order_.back();
        order_.pop_back();
        Request &one = of(q);
        const int64_t inputs = one.inputs();
        if (one.decodes) one.written = written(one);
        finish(q);
        one.tokens = inputs + one.written;
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
    int64_t in_units(int64_t tokens) const {
        if (terms_.unit == 1) return tokens;
        return (tokens + terms_.unit - 1) / terms_.unit * terms_.unit;
    }
    int64_t residue(int64_t value) const {
        if (terms_.unit == 1) return 0;
        return (value % terms_.unit + terms_.unit) % terms_.unit;
    }
    /* Tokens that the next decode step takes. */
    int64_t needed() const { return starting_[residue(-steps_)] * terms_.unit; }
    int64_t written(const Request &one) const {
        return one.base + steps_ - one.inputs() + 1;  // its latest token is not in the cache yet
    }
    void insert(const End &end) {
        ends_.insert(std::lower_bound(ends_.begin(), ends_.end(), end), end);
    }
    /* Forecasts anew the requests that have written more than forecast. */
    void look_again() {
        while (!ends_.empty() && ends_[0].step <= steps_) {
            const int64_t q = ends_[0].query;
            ends_.erase(ends_.begin());
            Request &one = of(q);
            const int64_t written = this->written(one);
            const int64_t total = std::max(requests_->beyond_of(q, written), written + 1);
            one.end = one.inputs() + total - one.base;
            insert({one.end, one.base, q});
        }
    }
    /* The load that the rule asks of with the request, beside those that do not decode. */
    int64_t load_with(int64_t q, bool decodes) {
        const int64_t tokens = of(q).tokens, left = requests_->left(q), whole = tokens + left;
        int64_t load = 0;
        if (terms_.rule == RESERVE_STATIC) {
            for (const End &end : ends_) load += end.base + end.step;
            return load + whole;
        }
        if (terms_.rule == RESERVE_DYNAMIC) {
            const int64_t first = ends_.empty() ? steps_ : ends_[0].step;
            for (size_t i = terms_.after_free; i < ends_.size(); ++i) load += ends_[i].base + first;
            return load + (decodes ? tokens + std::min(left, first - steps_) : whole);
        }
        const End own = {steps_ + left, tokens - steps_, q};
        return decodes ? peak(&own) : whole + peak(nullptr);
    }
    /* The largest load at any of the ends, and of `own` among them. */
    int64_t peak(const End *own) const {
        int64_t most = 0, bases = 0, count = 0;
        const auto add = [&](const End &end) {
            bases += end.base;
            most = std::max(most, bases + ++count * end.step);
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
