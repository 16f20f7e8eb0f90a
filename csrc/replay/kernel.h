/* A deterministic kernel of events, as xsimulator/replay/kernel.py: these happen in the order of
 * (seconds, priority, sequence). */
#pragma once

#include <stdint.h>

#include <limits>
#include <queue>
#include <tuple>
#include <vector>

namespace xgpt_replay {

enum Priority : int64_t { ARRIVAL, TURN, ROUTING };

class Process {
public:
    virtual ~Process() = default;
    /* Does what it scheduled as `what` and `which`. */
    virtual void act(int64_t what, int64_t which, double now) = 0;
};

class Kernel {
public:
    /* Until `quiet_s` processes are alone with their own events: none has effects on another. */
    bool are_apart = false;
    double quiet_s = std::numeric_limits<double>::infinity();

    void at(double at_s, Priority priority, Process &process, int64_t what, int64_t which = 0) {
        events_.push({at_s, priority, ++sequence_, what, which, &process});
    }
    /* Whether a process may go on to `at_s` without an event of its own. */
    bool is_free_until(double at_s) const {
        return are_apart ? quiet_s > at_s : events_.empty() || events_.top().at_s > at_s;
    }
    void run() {
        while (!events_.empty()) {
            const Event event = events_.top();
            events_.pop();
            event.process->act(event.what, event.which, event.at_s);
        }
    }

private:
    struct Event {
        double at_s;
        int64_t priority, sequence, what, which;
        Process *process;
        bool operator<(const Event &other) const {  // the first event is the greatest
            return std::tie(at_s, priority, sequence) >
                   std::tie(other.at_s, other.priority, other.sequence);
        }
    };
    std::priority_queue<Event> events_;
    int64_t sequence_ = 0;
};

}  // namespace xgpt_replay
