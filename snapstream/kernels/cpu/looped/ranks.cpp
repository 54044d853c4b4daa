// See ranks.h. The first byte of the memory is 1 once a rank has gone: whoever waits then looks there, and nobody else.
#include "ranks.h"

#include "spin.h"

namespace looped {

namespace {

constexpr int64_t PAGE = 4096;
constexpr auto NAP = std::chrono::microseconds(50);  // a rank that is so late was put aside by the system

int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

}  // namespace

Meeting::Meeting(const Ranks& ranks, const Model& model, int64_t max_batch)
    : rank(ranks.rank), size(ranks.size), waits(ranks.waits), shared_(ranks.shared), max_batch_(max_batch),
      hidden_(model.hidden), heading_(heading_bytes(ranks.size)), rank_bytes_(rank_bytes(model, max_batch)) {}

int64_t Meeting::rank_bytes(const Model& model, int64_t max_batch) {
    return whole_pages(max_batch * (2 * model.hidden * 4 + sizeof(Likeliest)) + sizeof(Likeliest));
}

int64_t Meeting::heading_bytes(int64_t ranks) { return whole_pages((1 + ranks) * sizeof(Arrivals)); }

int64_t Meeting::bytes(const Model& model, int64_t ranks, int64_t max_batch) {
    return heading_bytes(ranks) + ranks * rank_bytes(model, max_batch) + max_batch * model.vocab * 4;
}

void Meeting::meet() {
    if (is_alone() || !waits || has_failed) return;
    ++round_;
    reinterpret_cast<Arrivals*>(shared_)[1 + rank].count.store(round_, std::memory_order_release);
    for (int64_t other = 0; other < size; ++other)
        if (other != rank && !wait_for(other)) has_failed = true;
}

bool Meeting::wait_for(int64_t other) const {
    const std::atomic<uint64_t>& arrived = reinterpret_cast<Arrivals*>(shared_)[1 + other].count;
    const auto is_here = [&] { return arrived.load(std::memory_order_acquire) >= round_; };
    if (spin(is_here)) return true;
    const auto& is_over = *reinterpret_cast<std::atomic<char>*>(shared_);
    while (!is_here()) {
        if (is_over.load(std::memory_order_acquire)) return false;
        std::this_thread::sleep_for(NAP);
    }
    return true;
}

}  // namespace looped
