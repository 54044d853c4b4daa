// Waiting for what comes within a step: some turns without a look at the clock, then about a millisecond in turn with
// whoever else wants this core. Who waits longer should sleep.
#pragma once
#include <chrono>
#include <thread>

namespace looped {

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

}  // namespace looped
