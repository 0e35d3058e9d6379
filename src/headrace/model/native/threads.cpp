#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <string>

#include "errors.h"

namespace headrace::model {
namespace {

constexpr int kAwakeTurns = 2000;  // some 100 us: longer than the gap between two calls of a step

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Until `value` is no longer `old`.
void wait_changed(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int turn = 0; turn < kAwakeTurns; turn++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

void pin(std::thread& thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) throw InputError("cpus", "must be CPU numbers, one is " + std::to_string(cpu));
  CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof set, &set))
    throw InputError("cpus", "must be CPUs that this process may use, " + std::to_string(cpu) + " is none");
}

}  // namespace

Threads::Threads(const std::vector<int>& cpus, int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw InputError("threads", "must be in 1..1024, is " + std::to_string(num_threads));
  try {
    for (int index = 1; index < num_threads; index++) {
      others_.emplace_back([this, index] { loop(index); });
      if (static_cast<std::size_t>(index) < cpus.size()) pin(others_.back(), cpus[index]);
    }
  } catch (...) {
    close();
    throw;
  }
}

void Threads::close() {
  if (others_.empty()) return;
  shared_ = nullptr;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (auto& thread : others_) thread.join();
  others_.clear();
}

void Threads::share(Shared shared, void* context) {
  if (others_.empty()) return shared(context, 0);
  shared_ = shared;
  context_ = context;
  num_busy_.store(static_cast<std::uint32_t>(others_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  shared(context, 0);
  for (std::uint32_t busy; (busy = num_busy_.load(std::memory_order_acquire));) wait_changed(num_busy_, busy);
}

void Threads::loop(int index) {
  for (std::uint32_t seen = 0;;) {
    wait_changed(round_, seen);
    seen++;
    if (!shared_) return;
    shared_(context_, index);
    if (num_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_busy_.notify_one();
  }
}

}  // namespace headrace::model
