// A team of threads for the life of an engine. The caller is its first member. Between two regions workers spin for
// about a millisecond and then sleep; at a barrier inside a region the same holds. After a fork the child makes its own
// workers at its first region. One region runs at a time: a second caller waits.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace looped {

class Gate;  // threads wait here until a number has changed

class Team {
  public:
    explicit Team(int threads);
    ~Team();
    // Calls work(member) on every member; returns when all are done.
    void run(const std::function<void(int)>& work);
    // Inside a region: waits until every member is here.
    void barrier();
    // The same; the last to come does `last` before any goes on.
    void barrier(const std::function<void()>& last);
    int size() const { return threads_; }

  private:
    struct Shared;
    void begin();
    void end();
    static void member(Shared* shared, int index);

    const int threads_;
    Shared* shared_ = nullptr;
};

// Hands out the tasks of a stage: each member takes its own share from the front, then what others have left. Three
// stages are kept apart, so that a member may open the next one while others finish the last.
class Tasks {
  public:
    explicit Tasks(int threads);
    void clear();  // before a region
    // Before the barrier that ends stage `stage`, by every member.
    void clear_next(int64_t stage, int member);
    // A range [begin, end) of tasks of `stage`; false where none are left.
    bool take(int64_t stage, int member, int64_t count, int64_t grain, int64_t& begin, int64_t& end);

  private:
    struct alignas(64) Counter {
        std::atomic<int64_t> taken{0};
    };
    const int threads_;
    std::unique_ptr<Counter[]> counters_;  // [3, threads]
};

}  // namespace looped
