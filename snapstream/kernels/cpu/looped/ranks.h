// Where the ranks of one machine meet within a step: memory that all of them have mapped. Each lays its part of a sum
// there, waits until all others have come as far, and adds up all parts for itself.
//
//     | state, arrivals | of rank 0: parts of two sums [2][B][D], likeliest [B] | of rank 1 ... | logits [B, V] |
//
// Invariant: parts are added rank after rank, so all ranks hold the same bits, whatever the batch. Sums take turns in
// two places: a rank that lays down the next sum may be one meeting ahead of one that still reads the last. What is one
// rank's begins with a page of its own, which lies near the rank that writes it first. Alone, none of this is used.
#pragma once
#include <atomic>
#include <cstdint>

#include "abi.h"

namespace looped {

struct Likeliest {  // the likeliest token of a row so far
    float score;
    bool is_finite;
    int64_t token;
};

enum Turn : int64_t { AFTER_ATTENTION = 0, AFTER_MLP = 1 };  // of a sum; the embedding is one, and the logits' is none

class Meeting {
  public:
    Meeting(const Ranks& ranks, const Model& model, int64_t max_batch);
    // Of the memory, zeros at first; the logits end it.
    static int64_t bytes(const Model& model, int64_t ranks, int64_t max_batch);

    bool is_alone() const { return size == 1; }
    float* part(Turn turn, int64_t of) const { return parts(of) + turn * max_batch_ * hidden_; }
    Likeliest* likeliest(int64_t of) const { return reinterpret_cast<Likeliest*>(parts(of) + 2 * max_batch_ * hidden_); }

    // Returns when every rank has called it as often, or with has_failed when they will not; by one member of the team.
    void meet();

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
