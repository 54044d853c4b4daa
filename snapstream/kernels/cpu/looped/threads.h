// The threads of an engine, and where the ranks of one machine meet within a step.
//
// ThreadPool: threads for the life of an engine. The caller is the first. Between two regions workers spin for about a
// millisecond and then sleep; at a barrier inside a region the same holds. After a fork the child makes its own workers
// at its first region. One region runs at a time: a second caller waits.
//
// RankGroup: memory that all ranks have mapped. Each writes its part of a sum there, waits until all others have come
// as far, and adds up all parts for itself.
//
//     | state, arrivals | of rank 0: parts of two sums [2][B][D], likeliest [B] | of rank 1 ... | logits [B, V] |
//
// Invariant: parts are added rank after rank, so all ranks hold the same bits, whatever the batch. Sums take turns in
// two places: a rank that writes the next sum may be one barrier ahead of one that still reads the last. Each rank's
// part begins on its own page, so that it is near the rank that writes it first. With one rank none of it is
// used.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "abi.h"

namespace looped {

class ThreadPool {
  public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    // Calls work(thread) on every thread; returns when all are done.
    void run(const std::function<void(int)>& work);
    // Inside a region: waits for every thread.
    void barrier();
    // The same; the last to arrive runs `last` before any continues.
    void barrier(const std::function<void()>& last);
    int size() const { return threads_; }

  private:
    struct Shared;
    void begin();
    void end();
    static void worker(Shared* shared, int index);

    const int threads_;
    Shared* shared_ = nullptr;
};

// Hands out the tasks of a stage: each thread takes its own share from the front, then what others have left. Counters
// of three stages are kept, so that a thread may begin the next stage while others finish the last.
class Tasks {
  public:
    explicit Tasks(int threads);
    void clear();  // before a region
    // Before the barrier that ends stage `stage`, by every thread.
    void clear_next(int64_t stage, int thread);
    // A range [begin, end) of tasks of `stage`; false where none are left.
    bool take(int64_t stage, int thread, int64_t count, int64_t grain, int64_t& begin, int64_t& end);

  private:
    struct alignas(64) Counter {
        std::atomic<int64_t> taken{0};
    };
    const int threads_;
    std::unique_ptr<Counter[]> counters_;  // [3, threads]
};

struct Likeliest {  // the likeliest token of a row so far
    float score;
    bool is_finite;
    int64_t token;
};

enum Turn : int64_t { AFTER_ATTENTION = 0, AFTER_MLP = 1 };  // of a sum; the embedding is one, and the logits' is none

class RankGroup {
  public:
    RankGroup(const Ranks& ranks, const Model& model, int64_t max_batch);
    // Of the memory, zeros at first; the logits end it.
    static int64_t bytes(const Model& model, int64_t ranks, int64_t max_batch);

    bool is_alone() const { return size == 1; }
    float* part(Turn turn, int64_t of) const { return parts(of) + turn * max_batch_ * hidden_; }
    Likeliest* likeliest(int64_t of) const {
        return reinterpret_cast<Likeliest*>(parts(of) + 2 * max_batch_ * hidden_);
    }

    // Returns when every rank has called it as often, or sets has_failed where one has gone. Called by one thread.
    void barrier();

    const int64_t rank, size;
    const bool waits;  // for the others; false where they are not there
    bool has_failed = false;

  private:
    struct alignas(64) Arrivals {
        std::atomic<uint64_t> count;
    };
    static int64_t rank_bytes(const Model& model, int64_t max_batch);
    static int64_t heading_bytes(int64_t ranks);
    float* parts(int64_t of) const { return reinterpret_cast<float*>(shared_ + heading_ + of * rank_bytes_); }
    bool wait_for(int64_t other) const;

    char* const shared_;
    const int64_t max_batch_, hidden_, heading_, rank_bytes_;
    uint64_t round_ = 0;
};

}  // namespace looped
