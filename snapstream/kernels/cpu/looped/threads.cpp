// A generation number tells workers that a region has begun. They spin a while because the next step follows within a
// millisecond while tokens are being made, and then sleep because it may never follow.
#include "threads.h"

#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace looped {

namespace {

// Waiting: some turns without a look at the clock, then about a millisecond yielding the core.
constexpr auto SPIN = std::chrono::milliseconds(1);
constexpr int SPINS_PER_LOOK = 256;  // at the clock

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether is_done() came true in that time.
template <class IsDone>
bool spin(IsDone is_done) {
    const auto look = [&] {
        for (int i = 0; i < SPINS_PER_LOOK; ++i) {
            if (is_done()) return true;
            relax();
        }
        return false;
    };
    if (look()) return true;
    const auto until = std::chrono::steady_clock::now() + SPIN;
    while (std::chrono::steady_clock::now() < until) {
        if (look()) return true;
        std::this_thread::yield();  // on a busy machine the one that is waited for may want this core
    }
    return false;
}

}  // namespace

class Gate {  // threads wait here until a number has changed
  public:
    // Until the number is not `old` any more.
    void wait(uint32_t old) {
        if (spin([&] { return number.load(std::memory_order_acquire) != old; })) return;
        while (number.load(std::memory_order_acquire) == old) number.wait(old, std::memory_order_acquire);
    }
    void open() {
        number.fetch_add(1, std::memory_order_release);
        number.notify_all();
    }
    std::atomic<uint32_t> number{0};
};

struct ThreadPool::Shared {
    alignas(64) Gate begun;    // a region, or the end of the pool
    alignas(64) Gate arrived;  // all threads are at a barrier
    alignas(64) std::atomic<int> waiting{0};
    int threads = 0;
    bool is_over = false;
    const std::function<void(int)>* work = nullptr;
    pid_t process = 0;
    std::mutex callers;
    std::vector<std::thread> workers;

    void barrier(const std::function<void()>* last = nullptr) {
        if (threads == 1) {
            if (last) (*last)();
            return;
        }
        const uint32_t round = arrived.number.load(std::memory_order_acquire);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            waiting.store(0, std::memory_order_relaxed);
            if (last) (*last)();
            arrived.open();
        } else {
            arrived.wait(round);
        }
    }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) { begin(); }

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::begin() {
    shared_ = new Shared;
    shared_->threads = threads_;
    shared_->process = getpid();
    // Signals go to the program's own threads. (On Linux the mask is the calling thread's; pthread_sigmask itself would
    // ask for glibc 2.32.)
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 1; i < threads_; ++i) shared_->workers.emplace_back(worker, shared_, i);
    } catch (...) {
        sigprocmask(SIG_SETMASK, &before, nullptr);
        shared_->threads = static_cast<int>(shared_->workers.size()) + 1;
        end();
        throw;
    }
    sigprocmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::end() {
    if (shared_->process != getpid()) return;  // workers and shared state are the parent's
    shared_->is_over = true;
    shared_->begun.open();
    for (auto& thread : shared_->workers) thread.join();
    delete shared_;
}

void ThreadPool::worker(Shared* shared, int index) {
    for (uint32_t round = 0;; ++round) {
        shared->begun.wait(round);
        if (shared->is_over) return;
        (*shared->work)(index);
        shared->barrier();
    }
}

void ThreadPool::run(const std::function<void(int)>& work) {
    if (shared_->process != getpid()) begin();  // a child of a fork has no workers yet
    const std::lock_guard<std::mutex> only(shared_->callers);
    shared_->work = &work;
    shared_->begun.open();
    work(0);
    shared_->barrier();
}

void ThreadPool::barrier() { shared_->barrier(); }

void ThreadPool::barrier(const std::function<void()>& last) { shared_->barrier(&last); }

void Tasks::clear() {
    for (int i = 0; i < 3 * threads_; ++i) counters_[i].taken.store(0, std::memory_order_relaxed);
}

Tasks::Tasks(int threads) : threads_(threads), counters_(new Counter[3 * threads]) {}

void Tasks::clear_next(int64_t stage, int thread) {
    counters_[(stage + 1) % 3 * threads_ + thread].taken.store(0, std::memory_order_relaxed);
}

bool Tasks::take(int64_t stage, int thread, int64_t count, int64_t grain, int64_t& begin, int64_t& end) {
    Counter* counters = &counters_[stage % 3 * threads_];
    for (int i = 0; i < threads_; ++i) {
        const int owner = (thread + i) % threads_;
        const int64_t first = count * owner / threads_, last = count * (owner + 1) / threads_;
        if (i && first + counters[owner].taken.load(std::memory_order_relaxed) >= last) continue;
        begin = first + counters[owner].taken.fetch_add(grain, std::memory_order_relaxed);
        if (begin < last) {
            end = begin + grain < last ? begin + grain : last;
            return true;
        }
    }
    return false;
}

// -- ranks. The first byte of the memory is 1 once a rank has gone; only a rank that waits looks there.

namespace {

constexpr int64_t PAGE = 4096;
constexpr auto NAP = std::chrono::microseconds(50);  // a rank that is so late was put aside by the system

int64_t whole_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

}  // namespace

RankGroup::RankGroup(const Ranks& ranks, const Model& model, int64_t max_batch)
    : rank(ranks.rank), size(ranks.size), waits(ranks.waits), shared_(ranks.shared), max_batch_(max_batch),
      hidden_(model.hidden), heading_(heading_bytes(ranks.size)), rank_bytes_(rank_bytes(model, max_batch)) {}

int64_t RankGroup::rank_bytes(const Model& model, int64_t max_batch) {
    return whole_pages(max_batch * (2 * model.hidden * 4 + sizeof(Likeliest)) + sizeof(Likeliest));
}

int64_t RankGroup::heading_bytes(int64_t ranks) { return whole_pages((1 + ranks) * sizeof(Arrivals)); }

int64_t RankGroup::bytes(const Model& model, int64_t ranks, int64_t max_batch) {
    return heading_bytes(ranks) + ranks * rank_bytes(model, max_batch) + max_batch * model.vocab * 4;
}

void RankGroup::barrier() {
    if (is_alone() || !waits || has_failed) return;
    ++round_;
    reinterpret_cast<Arrivals*>(shared_)[1 + rank].count.store(round_, std::memory_order_release);
    for (int64_t other = 0; other < size; ++other)
        if (other != rank && !wait_for(other)) has_failed = true;
}

bool RankGroup::wait_for(int64_t other) const {
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
