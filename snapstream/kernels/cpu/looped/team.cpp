// See team.h. A generation number tells workers that a region has begun; they are told to spin a while because the next
// step follows within a millisecond while tokens are being made, and to sleep because it may never follow.
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <vector>

#include "spin.h"

namespace looped {

class Gate {
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

struct Team::Shared {
    alignas(64) Gate begun;    // a region, or the end of the team
    alignas(64) Gate arrived;  // all members are at a barrier
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

Team::Team(int threads) : threads_(threads) { begin(); }

Team::~Team() { end(); }

void Team::begin() {
    shared_ = new Shared;
    shared_->threads = threads_;
    shared_->process = getpid();
    sigset_t all, before;  // signals are for the threads of the program, which know what to do about them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 1; i < threads_; ++i) shared_->workers.emplace_back(member, shared_, i);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        shared_->threads = static_cast<int>(shared_->workers.size()) + 1;
        end();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Team::end() {
    if (shared_->process != getpid()) return;  // the workers are the parent's, and so is what they look at
    shared_->is_over = true;
    shared_->begun.open();
    for (auto& worker : shared_->workers) worker.join();
    delete shared_;
}

void Team::member(Shared* shared, int index) {
    for (uint32_t round = 0;; ++round) {
        shared->begun.wait(round);
        if (shared->is_over) return;
        (*shared->work)(index);
        shared->barrier();
    }
}

void Team::run(const std::function<void(int)>& work) {
    if (shared_->process != getpid()) begin();  // a child of a fork has no workers yet
    const std::lock_guard<std::mutex> only(shared_->callers);
    shared_->work = &work;
    shared_->begun.open();
    work(0);
    shared_->barrier();
}

void Team::barrier() { shared_->barrier(); }

void Team::barrier(const std::function<void()>& last) { shared_->barrier(&last); }

void Tasks::clear() {
    for (int i = 0; i < 3 * threads_; ++i) counters_[i].taken.store(0, std::memory_order_relaxed);
}

Tasks::Tasks(int threads) : threads_(threads), counters_(new Counter[3 * threads]) {}

void Tasks::clear_next(int64_t stage, int member) {
    counters_[(stage + 1) % 3 * threads_ + member].taken.store(0, std::memory_order_relaxed);
}

bool Tasks::take(int64_t stage, int member, int64_t count, int64_t grain, int64_t& begin, int64_t& end) {
    Counter* counters = &counters_[stage % 3 * threads_];
    for (int i = 0; i < threads_; ++i) {
        const int owner = (member + i) % threads_;
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

}  // namespace looped
